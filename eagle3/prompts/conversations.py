"""Accepted formats -> messages.

A broken row is an answer, not an exception: the reader yields a `BadRow` with its line and reason in the row's place,
so that the caller can count it and go on.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eagle3.config import UserError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}

# These change what the target reads or writes, so that leaving them out would render another conversation.
UNSUPPORTED_ROW_FIELDS = ("tools", "functions", "system")
UNSUPPORTED_MESSAGE_FIELDS = ("tool_calls", "function_call", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """One usable row: messages `{"role": system | user | assistant, "content": text}`.

    Without assistant turns it is a list of prompts, and the target answers each user turn in order.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    line: int  # 1-based


@dataclass(frozen=True)
class BadRow:
    """One unusable row; `reason` says what was expected and what was seen."""

    line: int  # 1-based
    reason: str


def read_conversations(path: Path) -> Iterator[Conversation | BadRow]:
    """Yields every row of a JSONL file in OpenAI's `messages` or ShareGPT's `conversations` form, in file order.

    A row's id is its own `id`, else a hash of its messages. Rows stream; only their ids stay in memory, to find
    duplicates. Blank lines are no rows.

    Raises:
        UserError: the file is missing, is a directory, or has no rows.
    """
    if not path.exists():
        raise UserError(f"prompts must be a JSONL file, got no file at {str(path)!r}; check the path")
    if not path.is_file():
        if path.is_dir():
            raise UserError(f"prompts must be a JSONL file, got a directory ({str(path)!r}); name one file in it")
        raise UserError(
            f"prompts must be a JSONL file, got a device or a pipe, which cannot be read twice ({str(path)!r}); "
            f"save the rows as a file"
        )
    return _rows(path)


def _rows(path: Path) -> Iterator[Conversation | BadRow]:
    first_lines: dict[str, int] = {}  # sample id -> the line that has it
    num_rows = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            raw = raw.strip()
            if not raw:
                continue
            num_rows += 1
            try:
                conversation = _conversation(raw, line)
                first_line = first_lines.setdefault(conversation.id, line)
                if first_line != line:
                    raise _RowError(f"id must be unique, got {conversation.id!r} again (first on line {first_line})")
            except _RowError as error:
                yield BadRow(line=line, reason=str(error))
            else:
                yield conversation
    if num_rows == 0:
        raise UserError(f"prompts must have at least one row, got an empty file ({str(path)!r}); check the path")


class _RowError(ValueError):
    """Why a row cannot be used; never leaves this module."""


def _conversation(raw: bytes, line: int) -> Conversation:
    try:
        # utf-8-sig: files saved on Windows open with a byte order mark.
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or nesting past Python's limits
        raise _RowError(f"row must be JSON in UTF-8, got {_shown(raw)} ({error})") from error
    if not isinstance(row, dict):
        raise _RowError(f"row must be a JSON object, got {_type_name(row)}")
    for field in UNSUPPORTED_ROW_FIELDS:
        if row.get(field):
            raise _RowError(f"row must have no {field!r} field, which is not supported, got {_shown(row[field])}")
    messages = _messages(row)
    return Conversation(id=_sample_id(row.get("id"), messages), messages=messages, line=line)


def _messages(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    forms = [name for name in ("messages", "conversations") if name in row]
    if len(forms) != 1:
        raise _RowError(f"row must have either 'messages' or 'conversations', got the fields {sorted(row)}")
    name = forms[0]
    turns = row[name]
    if not isinstance(turns, list):
        raise _RowError(f"{name} must be a list, got {_type_name(turns)}")
    if not turns:
        raise _RowError(f"{name} must have at least one turn, got an empty list")
    messages = tuple(_message(turn, f"{name}[{i}]") for i, turn in enumerate(turns))
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise _RowError(f"{name} must have a user turn, got only {', '.join(sorted(set(roles)))} turns")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise _RowError(f"{name} must have a user turn before the first answer, got the roles {', '.join(roles)}")
    return messages


def _message(turn: Any, where: str) -> dict[str, Any]:
    """Returns one turn with the field names and roles of OpenAI's form; `where` is its place in the row."""
    if not isinstance(turn, dict):
        raise _RowError(f"{where} must be an object, got {_type_name(turn)}")
    for field in UNSUPPORTED_MESSAGE_FIELDS:
        if turn.get(field):
            raise _RowError(f"{where} must have no {field!r} field, which is not supported, got {_shown(turn[field])}")
    role_field, content_field = (
        next((name for name in names if name in turn), None) for names in (("role", "from"), ("content", "value"))
    )
    if role_field is None or content_field is None:
        raise _RowError(f"{where} must have role and content (or from and value), got the fields {sorted(turn)}")
    role, content = turn[role_field], turn[content_field]
    if not isinstance(role, str) or role not in ROLES:
        raise _RowError(f"{where}.{role_field} must be one of {', '.join(ROLES)}, got {_shown(role)}")
    if not isinstance(content, str):
        raise _RowError(f"{where}.{content_field} must be a string, got {_type_name(content)}")
    if ROLES[role] != "system" and not content.strip():
        raise _RowError(f"{where}.{content_field} must be a {role} turn with text, got {content!r}")
    if not _is_unicode(content):
        raise _RowError(f"{where}.{content_field} must be valid Unicode, got half of a surrogate pair")
    return {"role": ROLES[role], "content": content}


def _sample_id(row_id: Any, messages: tuple[dict[str, Any], ...]) -> str:
    if row_id is None:
        return xxhash.xxh3_128_hexdigest(json.dumps(messages).encode())
    is_id = isinstance(row_id, str | int) and not isinstance(row_id, bool)  # JSON's true is a Python int
    if not is_id or not str(row_id).strip() or not _is_unicode(str(row_id)):
        raise _RowError(f"id must be a string with text, or an integer, got {_shown(row_id)}")
    return str(row_id)


def _is_unicode(text: str) -> bool:
    """Tells whether text has no lone surrogates: JSON can spell them, UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(value: Any) -> str:
    """Names a JSON value's type as JSON does."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    """Returns a value for a message, cut to a length that fits one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
