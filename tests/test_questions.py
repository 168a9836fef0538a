"""Counters come back from their file as they were, and a line that holds none is named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.config import UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.questions import (
    COLUMNS,
    Question,
    of_pack,
    of_samples,
    prompt_digest,
    read_questions,
    write_questions,
)
from eagle3.draft.ttt import pack
from eagle3.features.record import FeatureSample

ANSWER = AnswerRounds("a", num_tokens=10, rounds=6.25, reached=(6.25, 3.0), accepted=(3.0, 0.5))


def test_questions_come_back_as_they_were(tmp_path: Path) -> None:
    other = dataclasses.replace(ANSWER, sample_id="b")
    measures = {
        "trained": [Question("p", True, ANSWER), Question("q", None, other)],
        "simulated": [Question("p", False, ANSWER)],
    }
    write_questions(tmp_path / "q.jsonl", measures)
    assert read_questions(tmp_path / "q.jsonl") == measures


def row(**changes: object) -> str:
    values = dict(zip(COLUMNS, ["trained", "b", "p", None, 10, 6.25, [6.25, 3.0], [3.0, 0.5]], strict=True))
    return json.dumps(values | changes)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "{}",
        '{"measure": "trained"}',
        "\udcff",
        row(rounds=float("nan")),
        row(rounds=-1.0),
        row(num_tokens=float("inf")),
        row(num_tokens=10**400),
        row(num_tokens=10.5),
        row(accepted=[float("nan"), 0.5]),
        row(accepted=[3.0]),
        row(reached=[6.25], accepted=[3.0]),
    ],
)
def test_a_line_without_counters_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "q.jsonl"
    write_questions(path, {"trained": [Question("p", True, ANSWER)]})
    with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"every question must have the counters measure, .* line 2\); evaluate again"):
        read_questions(path)


def test_a_prompt_is_what_stands_before_the_first_answer(make_sample: Callable[..., FeatureSample]) -> None:
    sample = make_sample("a", [0, 0, 1, 1, 0, 1])
    (question,) = of_samples([sample], [ANSWER])
    assert question.prompt == prompt_digest(sample.input_ids[:2].tolist())
    assert question.prompt != prompt_digest(sample.input_ids[:3].tolist())
    assert question.answer is ANSWER
    other = make_sample("b", [0, 0, 0, 1], seed=1)
    (same,) = of_pack(pack([other, sample]), [ANSWER])
    assert same == question
