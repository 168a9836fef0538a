"""Values out of a row: parsed, checked, and how a message shows them."""

import json
from typing import Any


class RowError(ValueError):
    """Why a row cannot be used; never leaves the reading of prompts."""


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        RowError: an object has a field twice: a parser keeps the last one, and the row would mean something else.
        ValueError, RecursionError: it is no JSON, or past the limits of Python's numbers or nesting.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"row must have each field once, got {shown(twice)} twice in one object")
    return made


def parsed(text: str, where: str) -> Any:
    """Parses JSON text that stands within a row.

    Raises:
        RowError: it is none.
    """
    try:
        return parse_json(text)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where} must be JSON, got {shown(text)} ({error})") from error


def check_json(value: Any, where: str) -> None:
    """Refuses what a request to a server could not hold: a date out of a table, NaN, half of a surrogate pair.

    Raises:
        RowError: it holds such a thing.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{where} must hold what JSON has, got {shown(value)} ({error})") from error
    checked_text(text, where)


def checked_text(value: Any, where: str) -> str:
    """Returns a value that is text.

    Raises:
        RowError: it is none, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise RowError(f"{where} must be a string, got {type_name(value)}")
    if not is_unicode(value):
        raise RowError(f"{where} must be valid Unicode, got half of a surrogate pair")
    return value


def is_unicode(text: str) -> bool:
    """Tells whether text has no lone surrogates: JSON can spell them, UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(value: Any) -> str:
    """Names a JSON value's type as JSON does."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """Returns a value for a message, cut to a length that fits one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
