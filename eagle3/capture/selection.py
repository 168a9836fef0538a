"""Which rows of a prompts file are captured, what they will weigh, and why the others are not.

Nothing here runs the target, so that a whole file is known before anything is spent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from eagle3.capture.regenerate import count_user_turns
from eagle3.config import PromptsConfig, RegenerateConfig, UserError
from eagle3.plan import SampleSize
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.lengths import fit, render_row
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.workers import examine_rows, settings_for


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
    file: str | None = None  # which of several


@dataclass(frozen=True)
class Selection:
    """A prompts file, sorted into what can be captured and what cannot."""

    rows: list[Row]
    bad_rows: list[BadRow]
    too_long: list[TooLong]
    shortened: list[int] = field(default_factory=list)  # lines of rows that were cut at a turn, or split

    @property
    def rejected(self) -> list[BadRow | TooLong]:
        """Everything that is left out, in file order."""
        return sorted([*self.bad_rows, *self.too_long], key=lambda row: (row.file or "", row.line))

    def share(self, writer: int, num_writers: int) -> "Selection":
        """Returns the rows that one of several writers captures: every `num_writers`-th."""
        return replace(self, rows=self.rows[writer::num_writers])


def select_rows(
    prompts: PromptsConfig, renderer: ChatRenderer, regenerate: RegenerateConfig, *, max_tokens: int
) -> Selection:
    """Reads and renders every row of the prompts; rows of more than `max_tokens` tokens are too long.

    Raises:
        UserError: the file cannot be read, has no usable row, or has a bad one and prompts.fail_on_bad_row is set.
    """
    selection = Selection([], [], [])
    prompts = settings_for(prompts, renderer)
    path = str(prompts.path)
    columns = (SpinnerColumn(), TextColumn("reading prompts"), TaskProgressColumn(show_speed=True), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        make_examine = partial(_make_examine, renderer, regenerate, max_tokens, prompts.too_long)
        for examined in progress.track(examine_rows(prompts, make_examine, keep_rows=True), total=None):
            row = examined.row
            result = row if isinstance(row, BadRow) else examined.result
            assert result is not None, row
            if isinstance(result, list):
                selection.rows.extend(result)
                if [each.conversation for each in result] != [row]:
                    selection.shortened.append(row.line)
            elif isinstance(result, TooLong):
                selection.too_long.append(result)
            elif prompts.fail_on_bad_row:
                raise UserError(
                    f"every row must be usable with prompts.fail_on_bad_row=true, got a bad one: {result.reason} "
                    f"({result.file or path}, line {result.line}); correct it or leave the setting off"
                )
            else:
                selection.bad_rows.append(result)
    if not selection.rows:
        first = selection.rejected[0]
        raise UserError(
            f"prompts must have at least one usable row, got none of {len(selection.rejected)}: line {first.line}, "
            f"{first.reason} ({first.file or path}); correct the file"
        )
    return selection


def _make_examine(
    renderer: ChatRenderer,
    regenerate: RegenerateConfig,
    max_tokens: int,
    too_long: Literal["drop", "truncate", "split"],
) -> Callable[[Conversation], list[Row] | BadRow | TooLong]:
    return partial(_examine, renderer, regenerate, max_tokens, too_long)


def _examine(
    renderer: ChatRenderer,
    regenerate: RegenerateConfig,
    max_tokens: int,
    too_long: Literal["drop", "truncate", "split"],
    row: Conversation,
) -> list[Row] | BadRow | TooLong:
    if regenerate.enabled:
        return _size_with_answers_to_come(row, renderer, regenerate.max_new_tokens, max_tokens)
    rendered = render_row(renderer, row)
    if not any(rendered.loss_mask):
        return BadRow(row.line, "row must have an assistant turn to learn from, got none", row.file)
    samples = fit(renderer, row, rendered, max_tokens=max_tokens, too_long=too_long)
    if not samples:
        reason = f"row must have at most {max_tokens} tokens, got {len(rendered.input_ids)}"
        return TooLong(row.line, reason, row.file)
    sizes = [SampleSize(len(each.rendered.input_ids), sum(each.rendered.loss_mask)) for each in samples]
    return [Row(sample.conversation, size) for sample, size in zip(samples, sizes, strict=True)]


def _size_with_answers_to_come(
    row: Conversation, renderer: ChatRenderer, max_new_tokens: int, max_tokens: int
) -> list[Row] | BadRow | TooLong:
    problem = row.why_not_answerable()
    if problem is not None:
        return BadRow(row.line, f"{problem} with regenerate.enabled=false", row.file)
    first_prompt = renderer.prompt_ids(_until_first_user_turn(row.messages), row.options)
    if len(first_prompt) >= max_tokens:
        reason = f"prompt must have fewer than {max_tokens} tokens, got {len(first_prompt)}"
        return TooLong(row.line, reason, row.file)
    num_turns = count_user_turns(row)
    num_prompt_tokens = len(first_prompt)
    if num_turns > 1:
        num_prompt_tokens = len(renderer.prompt_ids(_with_placeholders(row.messages), row.options))
    num_tokens = min(max_tokens, num_prompt_tokens + num_turns * max_new_tokens)
    num_supervised = min(num_turns * max_new_tokens, max_tokens - len(first_prompt))
    return [Row(row, SampleSize(num_tokens, num_supervised))]


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
