"""A benchmark's file, or a folder of them -> its questions, as conversations."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.config import UserError
from eagle3.evaluation.question_sets import ID_FIELDS, SETS
from eagle3.prompts.conversations import MAX_ROW_BYTES
from eagle3.prompts.sources import Source, find_sources, open_source, read_rows


def read_questions(name: str, path: Path) -> Iterator[dict[str, Any]]:
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
