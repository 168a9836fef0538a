"""Raw rows -> conversations with ids, or the reason why not.

A broken row is an answer, not an exception: the reader yields a `BadRow` with its line and reason in the row's place,
so that the caller can count it and go on.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from eagle3.config import UserError
from eagle3.prompts.formats import (
    detect_format,
    domain_of,
    messages_of,
    template_kwargs_of,
    text_of,
    tokens_of,
    tools_of,
)
from eagle3.prompts.hashes import Places, SeenHashes
from eagle3.prompts.raw_rows import RawRow
from eagle3.prompts.row_values import RowError, is_unicode, parse_json, shown, type_name
from eagle3.prompts.sources import find_sources, read_rows
from eagle3.prompts.templates import RESERVED_TEMPLATE_KWARGS, TemplateOptions

SCREENED_KINDS = ("near duplicate", "question set")
MAX_ROW_BYTES = 4 * 2**20  # a million tokens of text, in about four seconds of tokenizing


@dataclass(frozen=True)
class GivenTokens:
    """A row that comes tokenised: nothing is rendered."""

    input_ids: tuple[int, ...]  # (T,)
    loss_mask: tuple[bool, ...]  # (T,)


@dataclass(frozen=True)
class Conversation:
    """One usable row: messages in OpenAI's form, or instead of them a text or its tokens.

    Without assistant turns it is a list of prompts, and the target answers each user turn in order.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    line: int  # 1-based
    file: str | None = None  # which of several
    format: str = field(default="messages", compare=False)
    options: TemplateOptions = field(default_factory=TemplateOptions)
    text: str | None = None  # supervised as a whole
    tokens: GivenTokens | None = None
    domain: str | None = field(default=None, compare=False)

    def why_not_answerable(self) -> str | None:
        """Says what keeps a target from answering the user turns anew; None if nothing does."""
        if not self.messages:
            return f"row must be a conversation for the target to answer, got {self.format}; keep its answers as given"
        if any(message["role"] == "tool" or "tool_calls" in message for message in self.messages):
            return "row must have no tool calls for the target to answer, got some; keep its answers as given"
        return None


@dataclass(frozen=True)
class BadRow:
    """One unusable row; `reason` says what was expected and what was seen."""

    line: int  # 1-based
    reason: str
    file: str | None = None  # which of several
    kind: str = field(default="malformed", compare=False)  # for counts

    @property
    def is_left_out_on_purpose(self) -> bool:
        """Tells whether nothing is wrong with the row but what it repeats."""
        return self.kind in SCREENED_KINDS


def read_conversations(pattern: str | Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Conversation | BadRow]:
    """Yields every row of a file, glob, folder or data set, in file order.

    A row's id is its own `id`, else a hash of its messages. Rows stream; 21 to 43 bytes of each stay in memory, to find
    ids that come again. Blank lines are no rows.

    Raises:
        UserError: there are no files, or no rows in them.
    """
    sources = find_sources(str(pattern))
    return unique_rows((parse_row(raw) for raw in read_rows(sources, max_row_bytes)), str(pattern))


def unique_rows(rows: Iterator[Conversation | BadRow], name: str) -> Iterator[Conversation | BadRow]:
    """Turns rows whose id came before into bad ones.

    Raises:
        UserError: there are no rows.
    """
    seen = UniqueIds()
    row = None
    for row in rows:
        yield row if isinstance(row, BadRow) else seen.check(row)
    if row is None:
        raise UserError(f"prompts must have at least one row, got an empty file ({name!r}); check the path")


class UniqueIds:
    """Finds ids that come again.

    Hashes of 64 bits stand for them: of 50 million ids, two agree by chance in one of 15,000 files.
    """

    def __init__(self) -> None:
        self._seen = SeenHashes()
        self._places = Places()

    def check(self, row: Conversation) -> Conversation | BadRow:
        """Returns the row, or a bad one if its id came before."""
        place = self._places.number(row.line, row.file)
        first = self._seen.first_place(xxhash.xxh3_64_intdigest(row.id.encode()), place)
        if first is None:
            return row
        reason = (
            f"id must be unique, got {row.id!r} again (first on {self._places.shown(first)}; a row without one goes by "
            f"its content)"
        )
        return BadRow(row.line, reason, row.file, "id again")


def parse_row(raw: RawRow) -> Conversation | BadRow:
    """Makes a conversation of one row, or says why it is none."""
    try:
        if raw.content is None:
            raise RowError(str(raw.problem))
        return _conversation(raw.content, raw)
    except RowError as error:
        return BadRow(raw.line, str(error), raw.file)


def _conversation(content: bytes | dict[str, Any], raw: RawRow) -> Conversation:
    row = content
    if isinstance(row, bytes):
        try:
            # utf-8-sig: files saved on Windows open with a byte order mark.
            row = parse_json(row.decode("utf-8-sig"))
        except RowError:
            raise
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or nesting past Python's limits
            raise RowError(f"row must be JSON in UTF-8, got {shown(row)} ({error})") from error
    if not isinstance(row, dict):
        raise RowError(f"row must be a JSON object, got {type_name(row)}")
    kind = detect_format(row)
    messages: tuple[dict[str, Any], ...] = ()
    options = TemplateOptions()
    text = tokens = None
    if kind == "token ids":
        ids, mask = tokens_of(row)
        tokens = GivenTokens(tuple(ids), tuple(mask))
        hashed: Any = [ids, mask]
    elif kind == "text":
        hashed = text = text_of(row)
    else:
        hashed = messages = messages_of(row, kind)
        options = TemplateOptions(tools_of(row), template_kwargs_of(row, RESERVED_TEMPLATE_KWARGS))
        if options != TemplateOptions():
            hashed = [messages, options.tools, options.kwargs]
    return Conversation(
        id=_sample_id(row.get("id"), hashed),
        messages=messages,
        line=raw.line,
        file=raw.file,
        format=kind,
        options=options,
        text=text,
        tokens=tokens,
        domain=domain_of(row),
    )


def _sample_id(row_id: Any, hashed: Any) -> str:
    if row_id is None:
        return xxhash.xxh3_128_hexdigest(json.dumps(hashed).encode())
    is_id = isinstance(row_id, str | int) and not isinstance(row_id, bool)  # JSON's true is a Python int
    if not is_id or not str(row_id).strip() or not is_unicode(str(row_id)):
        raise RowError(f"id must be a string with text, or an integer, got {shown(row_id)}")
    return str(row_id)
