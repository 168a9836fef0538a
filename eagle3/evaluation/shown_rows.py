"""Rows of a prompts file as they are shown: their text, and what of it is supervised."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.text import Text

from eagle3.config import PromptsConfig
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import Conversation, read_conversations
from eagle3.prompts.inspection import calls_of
from eagle3.prompts.lengths import first_prompt_ids, render_row
from eagle3.prompts.rendering import ChatRenderer

SHOWN_CHARS = 1200  # of one row


@dataclass(frozen=True)
class ShownRow:
    """A row as it is shown: a template that writes the time renders it once."""

    row: Conversation
    pieces: list[tuple[str, bool]]  # of its text, True where it is supervised


def usable_rows(prompts: PromptsConfig, renderer: ChatRenderer | None, num_rows: int) -> list[ShownRow]:
    """Returns the first rows that can be rendered."""
    return list(islice(_rendered(prompts, renderer), num_rows))


def _rendered(prompts: PromptsConfig, renderer: ChatRenderer | None) -> Iterator[ShownRow]:
    for row in read_conversations(str(prompts.path), prompts.max_row_bytes):
        if isinstance(row, Conversation):
            with suppress(RenderingError):  # counted already
                yield shown_row(row, renderer)


def show_row(console: Console, shown: ShownRow) -> None:
    """Prints a row, what is supervised of it in green."""
    row, text = shown.row, Text()
    for piece, is_supervised in shown.pieces:
        text.append(piece, style="green" if is_supervised else "dim")
    if len(text) > SHOWN_CHARS:
        text = text[: SHOWN_CHARS // 2] + Text(" [...] ", style="red") + text[-SHOWN_CHARS // 2 :]
    console.rule(f"line {row.line}, id {row.id}", style="dim")
    console.print(text)


def shown_row(row: Conversation, renderer: ChatRenderer | None) -> ShownRow:
    """Returns a row with its text.

    Raises:
        RenderingError: it cannot be rendered.
    """
    return ShownRow(row, list(_pieces(row, renderer)))


def _pieces(row: Conversation, renderer: ChatRenderer | None) -> Iterator[tuple[str, bool]]:
    is_asked_only = row.messages and not any(message["role"] == "assistant" for message in row.messages)
    if renderer is None:
        for message in row.messages:
            thought = f"({message['reasoning_content']}) " if "reasoning_content" in message else ""
            text = f"{message['role']}: {thought}{message['content']}{calls_of(message)}\n"
            yield text, message["role"] == "assistant"
        yield row.text or "", True
        if row.tokens is not None:
            yield from _runs(list(row.tokens.input_ids), list(row.tokens.loss_mask), lambda ids: f"{ids} ")
    elif is_asked_only:
        yield renderer.decode(first_prompt_ids(renderer, row)), False
        for message in [each for each in row.messages if each["role"] == "user"][1:]:
            yield f"\n[then] {message['content']}", False
    else:
        rendered = render_row(renderer, row)
        yield from _runs(rendered.input_ids, rendered.loss_mask, renderer.decode)


def _runs(ids: list[int], mask: list[bool], shown: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    start = 0
    for t in range(1, len(ids) + 1):
        if t == len(ids) or mask[t] != mask[start]:
            yield shown(ids[start:t]), mask[start]
            start = t
