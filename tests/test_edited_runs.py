"""A run whose files somebody edited is compared, or refused in one sentence: no value in them makes a traceback."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from eagle3.commands.compare import main
from eagle3.config import UserError
from eagle3.draft import acceptance
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.questions import Question, write_questions
from eagle3.evaluation.report import measure
from eagle3.evaluation.runs import read_run

QUESTIONS = [Question("d", False, AnswerRounds(f"q{i}", 9, 4.0, (4.0, 3.0), (3.0, 1.0))) for i in range(3)]
REMOVED = object()
OTHERS = [REMOVED, None, -1, "x", [], {}, 10**400, float("inf"), True]


def session(job_type: str, **said: Any) -> dict[str, Any]:
    run = {"id": job_type, "name": job_type, "group": "g", "job_type": job_type, "inputs": []}
    return {"run": run, "git": {"commit": "c"}, "versions": {}, "hardware": {"host": "h"}, **said}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A training and an evaluation, with everything that a comparison reads."""
    train, evaluation = tmp_path / "train", tmp_path / "evaluation"
    store = {"digest": "s", "num_tokens": 10, "num_bytes": 20}
    said = {"store": store, "device": "cpu", "num_draft_tokens": 2, "num_parameters": 7, "config": {"run": {"seed": 0}}}
    config = {"seed": 0, "drafter": "nowhere/drafter", "prompts": {"path": "nowhere.jsonl"}}
    sessions = {
        train: session("train", **said),
        evaluation: session("evaluate", config=config, digests={"prompts": "x"}),
    }
    for directory, written in sessions.items():
        directory.mkdir()
        (directory / "run.json").write_text(json.dumps({"sessions": [written]}))
    found = measure(QUESTIONS, 0).all_answers
    line: dict[str, Any] = {
        "step": 2,
        "loss": 1.0,
        "num_tokens": 9,
        "held_out/tau": found.tau,
        "held_out/tau_low": found.low,
    }
    line |= {"held_out/tau_high": found.high, "device_seconds": 3.0, "held_out/conditional": found.conditional}
    (train / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    write_questions(train / "questions.jsonl", {"held_out": QUESTIONS})
    write_questions(evaluation / "questions.jsonl", {"trained": QUESTIONS})
    parts = {name: getattr(found, name) for name in found.__dataclass_fields__}
    figures = {"tau_trained": found.tau, "num_draft_tokens": 2, "speed_up": 1.5}
    result = figures | {"trained": {"all_answers": parts, "without_loops": parts}}
    (evaluation / "result.json").write_text(json.dumps(result))
    return train, evaluation


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*place, key))


def edited(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return document


@pytest.mark.parametrize(
    "name", ["train/run.json", "train/metrics.jsonl", "evaluation/run.json", "evaluation/result.json"]
)
def test_no_edit_makes_a_traceback(runs: tuple[Path, Path], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation = runs
    path = train.parent / name
    document = json.loads(path.read_text())
    num_refused = num_tried = 0
    with mock.patch.object(acceptance, "NUM_RESAMPLES", 3):
        for place in places(document):
            for value in OTHERS if place else OTHERS[1:]:
                path.write_text(json.dumps(edited(document, place, value)) + "\n")
                for arguments in (["--verify", str(path.parent)], [str(train), str(evaluation)]):
                    num_tried += 1
                    try:
                        main(arguments)
                    except UserError:
                        num_refused += 1
                    except Exception as error:
                        raise AssertionError(f"{name} with {value!r} at {place}: {arguments[0]}") from error
        capsys.readouterr()
        path.write_text(json.dumps(document) + "\n")
        assert main([str(train), str(evaluation)]) == 0
    assert 0 < num_refused < num_tried


def test_what_is_of_another_kind_is_named(runs: tuple[Path, Path]) -> None:
    train, evaluation = runs
    written = json.loads((evaluation / "run.json").read_text())
    edited_one = edited(written, ("sessions", 0, "config", "seed"), "x")
    edited_one = edited(edited_one, ("sessions", 0, "digests"), None)
    (evaluation / "run.json").write_text(json.dumps(edited_one))
    with pytest.raises(UserError, match=r"in the form that this version writes, got digests=None, config\.seed=x \("):
        read_run(evaluation)
    written = json.loads((train / "run.json").read_text())
    (train / "run.json").write_text(json.dumps(edited(written, ("sessions", 0, "run", "name"), 5)))
    with pytest.raises(UserError, match=r"a run's identity must be text, got \{.*'name': 5"):
        read_run(train)


def test_an_interval_that_is_not_there_is_unknown(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    train, evaluation = runs
    line = json.loads((train / "metrics.jsonl").read_text())
    del line["held_out/tau_low"]
    (train / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    main([str(train), str(evaluation)])
    assert "2.250 (unknown)" in capsys.readouterr().out


def test_values_that_are_not_finite_are_left_out_and_counted(
    runs: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    train = runs[0]
    line = json.loads((train / "metrics.jsonl").read_text()) | {"loss": float("inf")}
    (train / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "loss" not in read_run(train).lines[0]
    assert "1 value of" in caplog.text
