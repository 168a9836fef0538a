"""What each answer counted, in a file: the raw counters behind a tau.

Two drafters are compared question by question, and a tau is derived again, from these lines alone.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.ttt import PackedSequences
from eagle3.features.record import FeatureSample
from eagle3.files import write_whole

QUESTIONS_NAME = "questions.jsonl"
COLUMNS = ("measure", "sample_id", "prompt", "loops", "num_tokens", "rounds", "reached", "accepted")


@dataclass(frozen=True)
class Question:
    """One answer's counters, and which prompt it answers."""

    prompt: str  # digest of the token ids before the sample's first answer: equal means that the same was asked
    loops: bool | None  # the answer repeats itself; None where that is not asked
    answer: AnswerRounds


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Returns the digest of a prompt's token ids."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i4").tobytes())


def of_samples(samples: Iterable[FeatureSample], answers: Iterable[AnswerRounds]) -> list[Question]:
    """Joins answers with the prompts of the samples that they were counted in."""
    prompts = {sample.sample_id: _prompt_of(sample.input_ids, sample.loss_mask) for sample in samples}
    return [Question(prompts[answer.sample_id], None, answer) for answer in answers]


def of_pack(packed: PackedSequences, answers: Iterable[AnswerRounds]) -> list[Question]:
    """Joins answers with the prompts of the pack that they were counted in."""
    lengths = packed.document_lengths
    documents = zip(packed.input_ids.split(lengths), packed.loss_mask.split(lengths), strict=True)
    prompts = {name: _prompt_of(*one) for name, one in zip(packed.sample_ids, documents, strict=True)}
    return [Question(prompts[answer.sample_id], None, answer) for answer in answers]


def write_questions(path: Path, measures: Mapping[str, Sequence[Question]]) -> None:
    """Writes one line per answer of each measure, such as `trained` or `held_out`."""
    lines = [
        json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n"
        for measure, questions in measures.items()
        for row in rows(measure, questions)
    ]
    write_whole(path, "".join(lines))


def read_questions(path: Path) -> dict[str, list[Question]]:
    """Returns what `write_questions` wrote.

    Raises:
        UserError: a line is something else.
    """
    found: dict[str, list[Question]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            values = json.loads(line)
            row = [values[column] for column in COLUMNS]
        except (ValueError, TypeError, KeyError):
            row = []
        add_row(found, row, f"{path}, line {number}")
    return found


def rows(measure: str, questions: Sequence[Question]) -> list[list[Any]]:
    """Returns a measure as a table with COLUMNS."""
    return [
        [measure, question.answer.sample_id, question.prompt, question.loops, *dataclasses.astuple(question.answer)[1:]]
        for question in questions
    ]


def add_row(found: dict[str, list[Question]], row: Sequence[Any], where: str) -> None:
    """Adds a row of such a table to its measure.

    Raises:
        UserError: it is none.
    """
    try:
        measure, sample_id, prompt, loops, num_tokens, rounds, reached, accepted = row
        answer = AnswerRounds(
            str(sample_id), int(num_tokens), float(rounds), tuple(map(float, reached)), tuple(map(float, accepted))
        )
        counters = [float(num_tokens), answer.rounds, *answer.reached, *answer.accepted]
        known = found.get(str(measure), [])
        positions = {len(answer.reached), len(answer.accepted), *(len(each.answer.reached) for each in known[:1])}
        if num_tokens != answer.num_tokens or len(positions) != 1 or not all(0 <= each < math.inf for each in counters):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise UserError(
            f"every question must have the counters {', '.join(COLUMNS)}, finite and for as many positions as the "
            f"others, got {str(row)[:60]} ({where}); "
            f"evaluate again, or restore the file"
        ) from None
    found.setdefault(str(measure), []).append(Question(str(prompt), loops, answer))


def _prompt_of(input_ids: Tensor, loss_mask: Tensor) -> str:  # (T,), (T,)
    first = int(loss_mask.int().argmax())  # the first token of the first answer
    return prompt_digest(input_ids[:first].tolist())
