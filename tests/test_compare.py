"""One experiment of real runs on a tiny target, compared from its directories."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_experiment import run_experiment, run_of

from eagle3.commands.compare import main
from eagle3.config import UserError
from eagle3.draft.questions import Question
from eagle3.evaluation.compare import read
from eagle3.evaluation.comparison import ASSUMED_SPREAD, seed_spread
from eagle3.evaluation.comparison import compare as compare_contenders
from eagle3.evaluation.page import draw
from eagle3.evaluation.runs import Contender, Run, line_up, read_directory


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(tmp_path_factory.mktemp("experiment"), tiny_target)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_command_shows_the_same_from_both(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = printed(capsys, str(base / "long"), str(base / "short"))
    both = ("train", "evaluation")
    mixed = printed(capsys, str(base / "long"), *(str(base / "short" / kind / "wandb") for kind in both))
    assert mixed == local
    assert re.search(r"run\.max_steps +\W+ 12 +\W+ 6 ", local)
    assert "learning_rate" not in local  # the same in both
    assert "decoded or served, 3 drafts a round" in local
    assert "held-out samples, in training, 3 drafts a round" in local
    trained = run_of(base, "long", "train")
    best = max(tau for step, tau in trained.curve("held_out/tau").items() if step)
    assert f"{best:.3f} (" in local
    assert f"{trained.provenance['store']['num_bytes']:,}" in local
    assert "1.6% of tau" in local


def test_an_evaluation_brings_its_training(base: Path) -> None:
    (contender,) = line_up(read_directory(base / "long" / "evaluation"))
    assert (contender.training, contender.evaluation) == (
        run_of(base, "long", "train"),
        run_of(base, "long", "evaluation"),
    )


def test_the_page_holds_picture_and_tables(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    shown = printed(capsys, str(base / "long"), str(base / "short"), "--out", str(tmp_path / "page"))
    assert str(tmp_path / "page" / "comparison.html") in shown
    page = (tmp_path / "page" / "comparison.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # everything is inside
    assert "<script" not in page
    picture = (tmp_path / "page" / "comparison.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    for text in ("run.max_steps", "decoded or served", "tokens trained on", "data:image/png;base64,"):
        assert text in page
    figures = json.loads((tmp_path / "page" / "comparison.json").read_text())
    assert figures["command"].startswith(f"eagle3 compare {base / 'long'}")
    assert figures["acceptance"]["trained"][0]["tau"] == run_of(base, "long", "evaluation").lines[-1]["tau_trained"]
    assert [each["measure"] for each in figures["verdicts"]] == ["trained", "held_out"]
    assert [[run["name"] for run in runs] for runs in figures["runs"]] == [["train", "evaluation"]] * 2


def test_a_name_is_drawn_as_it_is(base: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    contenders = line_up([*read_directory(base / "long"), *read_directory(base / "short")])
    contenders[0] = dataclasses.replace(contenders[0], name=r"a$\nothing_{b$")
    assert draw(compare_contenders(contenders)).startswith(b"\x89PNG")


def test_a_comparison_without_a_test_is_drawn(base: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    runs = [run_of(base, name, "train") for name in ("long", "short")]
    contenders = [Contender(run.config["run"]["dir"], dataclasses.replace(run, questions={}), None) for run in runs]
    comparison = compare_contenders(contenders)
    assert (comparison.verdicts, comparison.acceptance) == ([], {})
    assert draw(comparison).startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_named(base: Path, tmp_path: Path) -> None:
    with (
        mock.patch.dict("sys.modules", {"matplotlib.figure": None}),
        pytest.raises(
            UserError, match=r"must have matplotlib for its picture, got none .*pip install matplotlib, or leave"
        ),
    ):
        main([str(base / "long"), str(base / "short"), "--out", str(tmp_path)])


def test_every_headline_can_be_derived_again(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--verify", str(base / "long"), str(base / "short" / "train" / "wandb"))
    assert "NOT" not in shown
    assert "All figures hold." in shown
    tau = run_of(base, "long", "evaluation").lines[-1]["tau_trained"]
    assert f"ok  tau trained: reported {tau}" in shown
    for what in ("held-out tau, low", "trained, rounds", "digest of", "simulated: answers whose counters contradict"):
        assert what in shown, what


def tampered(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "long", tmp_path / "long", ignore=shutil.ignore_patterns("wandb", "step-*"))
    return tmp_path / "long"


def test_a_figure_that_does_not_follow_from_its_counters_is_found(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tampered(base, tmp_path)
    result = json.loads((run / "evaluation" / "result.json").read_text())
    result["tau_trained"] += 0.01
    (run / "evaluation" / "result.json").write_text(json.dumps(result))
    lines = [json.loads(line) for line in (run / "train" / "questions.jsonl").read_text().splitlines()]
    lines[0]["rounds"] = 1.0  # more tokens than a round can have emitted
    (run / "train" / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "NOT tau trained: reported" in shown
    assert "NOT held-out tau: reported" in shown
    assert (
        f'NOT held_out: answers whose counters contradict each other: reported [], derived ["{lines[0]["sample_id"]}"]'
        in shown
    )


def test_counters_by_position_and_loops_are_derived_again_too(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tampered(base, tmp_path)
    result = json.loads((run / "evaluation" / "result.json").read_text())
    result["trained"]["without_loops"]["tau"] += 0.01
    result["simulated"]["all_answers"]["tau"] += 0.01
    del result["tau_simulated"]
    (run / "evaluation" / "result.json").write_text(json.dumps(result))
    lines = [json.loads(line) for line in (run / "train" / "questions.jsonl").read_text().splitlines()]
    lines[0]["accepted"][0] = lines[0]["reached"][0] + 1.0
    (run / "train" / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    for what in (
        "trained without loops, tau: reported",
        "simulated, tau: reported",
        "tau simulated: reported null",
        "held-out acceptance at position 0: reported",
        "held_out: answers whose counters contradict each other: reported",
    ):
        assert f"NOT {what}" in shown, what
    assert shown.count("NOT ") == 5


def test_a_run_without_counters_does_not_hold(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tampered(base, tmp_path)
    (run / "train" / "questions.jsonl").unlink()
    (run / "evaluation" / "questions.jsonl").unlink()
    assert main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "NOT a validation and its questions.jsonl" in shown
    assert "NOT result.json and questions.jsonl" in shown
    assert main([str(run), str(base / "short")]) == 0
    assert "cannot be tested against train" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["[]", "null", "{}", '{"step": "a"}', '{"step": 1, "loss": null}', '{"step"'])
def test_a_damaged_metric_line_is_named(base: Path, tmp_path: Path, line: str) -> None:
    run = tampered(base, tmp_path) / "train"
    path = run / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"every line of metrics\.jsonl must be a JSON object with a step .* line 1\)"):
        read(str(run))


def test_a_line_that_a_kill_cut_short_is_left_out(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tampered(base, tmp_path) / "train"
    lines = run_of(base, "long", "train").lines
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    assert read(str(run))[0].lines == lines
    assert "the last line of" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_result_is_named(base: Path, tmp_path: Path, text: str) -> None:
    run = tampered(base, tmp_path) / "evaluation"
    (run / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result\.json must be the JSON object that an evaluation wrote, got"):
        read(str(run))


def test_a_run_that_does_not_say_what_is_needed_is_refused(base: Path, tmp_path: Path) -> None:
    run = tampered(base, tmp_path) / "train"
    record = json.loads((run / "run.json").read_text())
    del record["sessions"][-1]["store"], record["sessions"][-1]["config"]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"a run to compare must say its git, .* another kind of config, store \("):
        read(str(run))
    record["sessions"][-1]["run"]["job_type"] = "cook"
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"a run's job type must be one of extract, train, evaluate, got 'cook'"):
        read(str(run))
    with pytest.raises(UserError, match=r"a run to compare must be a training or an evaluation, got an extraction"):
        main(["--verify", str(base / "features")])


def test_what_was_not_logged_costs_nothing_known(base: Path, tmp_path: Path) -> None:
    run = tampered(base, tmp_path)
    (run / "train" / "metrics.jsonl").write_text("")
    (run / "evaluation" / "result.json").unlink()
    found = compare_contenders(line_up([*read_directory(base / "short"), *read_directory(run)]))
    assert found.cost["training, device hours"][1] is None
    assert found.cost["tokens trained on"][1] is None
    assert found.cost["tokens trained on"][0] is not None
    shown = compare_contenders(line_up([run_of(base, "short", "evaluation"), run_of(tmp_path, "long", "evaluation")]))
    assert "drafts a round 3 against unknown" in shown.remarks[0]


def test_names_that_mean_no_run_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a run to compare must be a directory, a \.wandb file, .* got 'nothing'"):
        read("nothing")
    with pytest.raises(UserError, match=r"a run to compare must be a directory with a run\.json, got none in it or"):
        read(str(tmp_path))
    (tmp_path / "run.json").write_text('{"sessions": []}')
    with pytest.raises(UserError, match=r"run\.json must hold a session, got none"):
        read(str(tmp_path))
    with pytest.raises(UserError, match=r"a comparison must have two runs or more, got 1 \(train\)"):
        main([str(base / "long")])
    with pytest.raises(UserError, match=r"--seed-spread must be from 0 to below 1, got 2\.0; 0\.01 is one percent"):
        main([str(base / "long"), str(base / "short"), "--seed-spread", "2"])


def seeded(run: Run, seed: int, num_rounds_more: float) -> Contender:
    """A copy of a training with another seed, whose answers took more rounds."""
    config: dict[str, Any] = run.config | {"run": run.config["run"] | {"seed": seed}}
    questions = [
        dataclasses.replace(each, answer=dataclasses.replace(each.answer, rounds=each.answer.rounds + num_rounds_more))
        for each in run.questions["held_out"]
    ]
    changed = dataclasses.replace(run, config=config, questions={"held_out": questions})
    return Contender(str(seed), changed, None)


def test_seeds_of_one_recipe_measure_their_spread(base: Path) -> None:
    run = run_of(base, "long", "train")
    contenders = [seeded(run, 0, 0.0), seeded(run, 1, 1.0)]
    comparison = compare_contenders(contenders)
    first, second = (each.tau for each in comparison.acceptance["held_out"] if each is not None)
    mean = (first + second) / 2
    squares = (first / mean - 1) ** 2 + (second / mean - 1) ** 2
    assert comparison.spread == pytest.approx(((4 * ASSUMED_SPREAD**2 + squares) / 5) ** 0.5)
    assert seed_spread([contenders[0], contenders[0]], comparison.acceptance) > ASSUMED_SPREAD / 1.2
    assert list(comparison.differences) == ["run.seed"]


def test_chains_of_another_length_are_not_tested_against_each_other(base: Path) -> None:
    run = run_of(base, "long", "train")
    longer = dataclasses.replace(run, provenance=run.provenance | {"num_draft_tokens": 7})
    comparison = compare_contenders([Contender("a", run, None), Contender("b", longer, None)])
    assert comparison.verdicts == []
    assert comparison.remarks == [
        "b cannot be tested against a (held-out samples, in training: drafts a round 3 against 7)"
    ]


def test_a_run_that_one_side_does_not_have_is_one_row(base: Path) -> None:
    long, short = (run_of(base, name, "train") for name in ("long", "short"))
    evaluation = run_of(base, "long", "evaluation")
    with_evaluation = Contender("a", long, evaluation)
    found = compare_contenders([with_evaluation, Contender("b", short, None)]).differences
    assert found == {"has evaluation": ["yes", None], "run.max_steps": [12, 6]}
    other = dataclasses.replace(evaluation, config=evaluation.config | {"seed": 5})
    columns = [Contender("b", short, None), with_evaluation, Contender("c", None, other)]
    assert compare_contenders(columns).differences == {
        "has training": ["yes", "yes", None],
        "has evaluation": [None, "yes", "yes"],
        "run.max_steps": [6, 12, None],
        "evaluate.seed": [None, 0, 5],
    }


def test_too_few_questions_in_common_are_counted(base: Path) -> None:
    run = run_of(base, "long", "train")
    first, second, *_ = run.questions["held_out"]
    silent = dataclasses.replace(first.answer, rounds=0.0)

    def remark(a: list[Question], b: list[Question]) -> str:
        contenders = [
            Contender(name, dataclasses.replace(run, questions={"held_out": questions}), None)
            for name, questions in (("a", a), ("b", b))
        ]
        return compare_contenders(contenders).remarks[0]

    said = "b cannot be tested against a (held-out samples, in training: "
    assert remark([first], [first]) == said + "fewer than two questions in common, got 1)"
    assert remark([first], [second]) == said + "fewer than two questions in common, got 0)"
    silents = [
        dataclasses.replace(first, answer=dataclasses.replace(silent, sample_id=sample_id)) for sample_id in ("x", "y")
    ]
    took_none = "2 questions in common, for which one or both took no round)"
    assert remark([*silents, first], [*silents, second]) == said + took_none
