"""Tables and JSON say the same figures."""

import dataclasses
import io
import json
import logging

import pytest
from rich.console import Console

from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.questions import Question
from eagle3.evaluation.report import (
    Measured,
    Report,
    Speed,
    Stopwatch,
    measure,
    names_apart,
    narrow_table,
    progress_bar,
)
from eagle3.evaluation.served import ServerFacts

ROUNDS = [
    AnswerRounds("a", num_tokens=10, rounds=6.0, reached=(6.0, 3.0), accepted=(3.0, 0.0)),
    AnswerRounds("b", num_tokens=31, rounds=10.0, reached=(10.0, 10.0), accepted=(10.0, 10.0)),
    AnswerRounds("c", num_tokens=1, rounds=0.0, reached=(0.0, 0.0), accepted=(0.0, 0.0)),
]


def questions(answers: list[AnswerRounds], looping: list[bool]) -> list[Question]:
    return [Question("p", loops, answer) for answer, loops in zip(answers, looping, strict=True)]


def make_report(trained: Measured) -> Report:
    return Report(
        num_draft_tokens=2, max_new_tokens=32, num_conversations=3, num_answers=3, num_looping=1, trained=trained
    )


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    report.print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_looping_answers_are_left_out_of_the_second_figure() -> None:
    measured = measure(questions(ROUNDS, [False, True, False]), seed=0)
    assert measured.all_answers.tau == 42 / 16
    assert measured.without_loops is not None
    assert measured.without_loops.tau == 11 / 6


def test_no_second_figure_where_every_answer_with_rounds_loops() -> None:
    assert measure(questions(ROUNDS, [True, True, False]), seed=0).without_loops is None


def test_table_and_json_agree() -> None:
    measured = measure(questions(ROUNDS, [False, True, False]), seed=0)
    report = dataclasses.replace(
        make_report(measured),
        untrained=Measured(measure(questions(ROUNDS[:1], [False]), seed=0).all_answers, None, []),
        simulated=measured,
        simulated_store=measured,
        speed=Speed(4, tokens_per_second_plain=20.0, tokens_per_second_speculative=30.0, num_equal_answers=3),
        findings=["something odd"],
    )
    values = json.loads(json.dumps(report.to_dict()))
    assert values["tau_trained"] == values["trained"]["all_answers"]["tau"] == 42 / 16
    assert values["tau_untrained"] == 10 / 6
    assert values["tau_simulated"] == values["tau_simulated_store"] == 42 / 16
    assert (values["tokens_per_second_plain"], values["tokens_per_second_speculative"]) == (20.0, 30.0)
    assert values["speed_up"] == 1.5
    text = printed(report)
    acceptance = measured.all_answers
    for figure in ("2.625", f"{acceptance.low:.2f}-{acceptance.high:.2f}", f"{39 / 16:.3f}", "1.83", "81% 77%"):
        assert figure in text, (figure, text)
    assert "3 answers of up to 32 tokens, 1 of them looping" in text
    assert "20.0 tokens/s plain, 30.0 speculative, 1.50x; equal token for token: 3 of 4 answers." in text
    assert "The others part at near-ties" in text
    assert "Warning: something odd" in text


def test_a_served_report_names_the_server_and_shows_positions_nobody_reached() -> None:
    idle = AnswerRounds("a", num_tokens=24, rounds=23.0, reached=(23.0, 0.0), accepted=(0.0, 0.0))
    facts = ServerFacts("http://host:30000", "0.5.23", "tokenizer", {})
    report = make_report(measure(questions([idle], [False]), seed=0))
    text = printed(dataclasses.replace(report, server=facts, tokens_per_second_served=12.34))
    assert "SGLang 0.5.23 at http://host:30000: 12.3 tokens/s over all requests" in text
    assert "served" in text
    assert "1.043" in text
    assert "0% -" in text
    assert text.count("1.043") == 1
    assert "simulated" not in text


def test_stages_are_timed() -> None:
    stopwatch = Stopwatch()
    with stopwatch.stage("load"):
        pass
    assert list(stopwatch.seconds) == ["load"]
    assert 0 <= stopwatch.seconds["load"] < 1


def test_a_bar_shows_count_and_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("decoding", 3, "answer") as advance:
        advance(2)
        advance(1)
    shown = capsys.readouterr().err
    assert "decoding" in shown
    assert "3/3" in shown
    assert "answers/s" in shown


def test_without_a_terminal_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    monkeypatch.setattr("eagle3.evaluation.report.time.monotonic", lambda: now)
    with progress_bar("decoding", 40, "answer") as advance:
        for _ in range(40):
            now += 2.0
            advance(1)
    assert caplog.messages == [
        "decoding: 40 answers",
        "decoding: 15/40 answers, 30.0 s, 0.5 answers/s",
        "decoding: 30/40 answers, 60.0 s, 0.5 answers/s",
        "decoding: 40/40 answers, 80.0 s, 0.5 answers/s",
    ]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["ckpts/long/drafter"], ["drafter"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["ckpts/long/drafter", "ckpts/short/drafter"], ["long", "short"]),
        (["/x/ckpts/long/1/drafter", "/x/ckpts/long/2/drafter"], ["1", "2"]),
        (["a/drafter", "a/b/drafter"], ["drafter", "b/drafter"]),
        (["drafter", "b/drafter"], ["drafter", "b/drafter"]),
        (["x/drafter", "y/z/drafter"], ["x", "y/z"]),
        ([".", "a/drafter"], [".", "drafter"]),
    ],
)
def test_names_say_what_tells_paths_apart(paths: list[str], names: list[str]) -> None:
    assert list(names_apart(paths).values()) == names


def test_a_narrow_table_keeps_its_numbers() -> None:
    table = narrow_table("tau", ["drafter", "set"], ["tau"], ["by position"])
    table.add_row("a-long-name-that-folds", "all", "1.234", "75% 75% 75%")
    console = Console(file=io.StringIO(), width=24)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 24
    assert any("1.234" in line.split() for line in lines)
