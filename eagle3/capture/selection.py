"""Which rows of a prompts file are captured, what they will weigh, and why the others are not.

Nothing here runs the target, so that a whole file is known before anything is spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from eagle3.capture.regenerate import count_user_turns
from eagle3.config import RegenerateConfig, UserError
from eagle3.plan import SampleSize
from eagle3.prompts.conversations import BadRow, Conversation, read_conversations
from eagle3.prompts.rendering import ChatRenderer, RenderingError


@dataclass(frozen=True)
class Row:
    """A conversation that will be captured."""

    conversation: Conversation
    size: SampleSize  # exact for given answers; for answers to come a bound, unless their text encodes to more tokens


@dataclass(frozen=True)
class TooLong:
    """A conversation that exceeds the token limit."""

    line: int  # 1-based
    reason: str


@dataclass(frozen=True)
class Selection:
    """A prompts file, sorted into what can be captured and what cannot."""

    rows: list[Row]
    bad_rows: list[BadRow]
    too_long: list[TooLong]

    @property
    def rejected(self) -> list[BadRow | TooLong]:
        """Everything that is left out, in file order."""
        return sorted([*self.bad_rows, *self.too_long], key=lambda row: row.line)


def select_rows(
    path: Path, renderer: ChatRenderer, regenerate: RegenerateConfig, *, max_tokens: int, fail_on_bad_row: bool
) -> Selection:
    """Reads and renders every row of a prompts file; rows of more than `max_tokens` tokens are too long.

    Raises:
        UserError: the file cannot be read, has no usable row, or has a bad one and `fail_on_bad_row` is set.
    """
    selection = Selection([], [], [])
    columns = (SpinnerColumn(), TextColumn("reading prompts"), TaskProgressColumn(show_speed=True), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for row in progress.track(read_conversations(path), total=None):
            result = _examine(row, renderer, regenerate, max_tokens) if isinstance(row, Conversation) else row
            if isinstance(result, Row):
                selection.rows.append(result)
            elif isinstance(result, TooLong):
                selection.too_long.append(result)
            elif fail_on_bad_row:
                raise UserError(
                    f"every row must be usable with prompts.fail_on_bad_row=true, got a bad one: {result.reason} "
                    f"({path}, line {result.line}); correct it or leave the setting off"
                )
            else:
                selection.bad_rows.append(result)
    if not selection.rows:
        first = selection.rejected[0]
        raise UserError(
            f"prompts must have at least one usable row, got none of {len(selection.rejected)}: line {first.line}, "
            f"{first.reason} ({path}); correct the file"
        )
    return selection


def _examine(
    conversation: Conversation, renderer: ChatRenderer, regenerate: RegenerateConfig, max_tokens: int
) -> Row | BadRow | TooLong:
    try:
        if regenerate.enabled:
            return _size_with_answers_to_come(conversation, renderer, regenerate.max_new_tokens, max_tokens)
        return _size_with_given_answers(conversation, renderer, max_tokens)
    except RenderingError as error:
        return BadRow(conversation.line, str(error))


def _size_with_given_answers(
    conversation: Conversation, renderer: ChatRenderer, max_tokens: int
) -> Row | BadRow | TooLong:
    rendered = renderer.render(conversation.messages)
    num_tokens, num_supervised = len(rendered.input_ids), sum(rendered.loss_mask)
    if num_supervised == 0:
        return BadRow(conversation.line, "row must have an assistant turn to learn from, got none")
    if num_tokens > max_tokens:
        return TooLong(conversation.line, f"row must have at most {max_tokens} tokens, got {num_tokens}")
    return Row(conversation, SampleSize(num_tokens, num_supervised))


def _size_with_answers_to_come(
    conversation: Conversation, renderer: ChatRenderer, max_new_tokens: int, max_tokens: int
) -> Row | BadRow | TooLong:
    first_prompt = renderer.prompt_ids(_until_first_user_turn(conversation.messages))
    if len(first_prompt) >= max_tokens:
        reason = f"prompt must have fewer than {max_tokens} tokens, got {len(first_prompt)}"
        return TooLong(conversation.line, reason)
    num_turns = count_user_turns(conversation)
    num_prompt_tokens = len(first_prompt)
    if num_turns > 1:
        num_prompt_tokens = len(renderer.prompt_ids(_with_placeholders(conversation.messages)))
    num_tokens = min(max_tokens, num_prompt_tokens + num_turns * max_new_tokens)
    num_supervised = min(num_turns * max_new_tokens, max_tokens - len(first_prompt))
    return Row(conversation, SampleSize(num_tokens, num_supervised))


def _until_first_user_turn(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return [message for message in messages[: first + 1] if message["role"] != "assistant"]


def _with_placeholders(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the prompt of the last user turn, every answer before it one character long."""
    placed: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        if message["role"] == "user" and any(each["role"] == "user" for each in placed):
            placed.append({"role": "assistant", "content": "."})
        placed.append(message)
    while placed[-1]["role"] != "user":
        placed.pop()
    return placed
