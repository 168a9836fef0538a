"""Which rows of a prompts file are captured, what they will weigh, and why the others are not.

Nothing here runs the target, so that a whole file is known before anything is spent.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from eagle3.capture.regenerate import count_user_turns
from eagle3.config import PromptsConfig, RegenerateConfig, UserError
from eagle3.plan import SampleSize
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.lengths import first_prompt_ids, fit, last_prompt_ids, render_row, why_prompt_too_long
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.sources import unread_files
from eagle3.prompts.workers import examine_rows, settings_for
from eagle3.words import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """A conversation that will be captured."""

    conversation: Conversation
    size: SampleSize  # exact for given answers; for answers to come a bound, unless their text encodes to more tokens


@dataclass(frozen=True)
class _Fitted:
    """What is captured of a row."""

    rows: list[Row]
    num_lost: int = 0  # supervised tokens that do not fit


@dataclass(frozen=True)
class TooLong:
    """A conversation that exceeds the token limit."""

    line: int  # 1-based
    reason: str
    file: str | None = None  # which of several
    kind: Literal["too long"] = "too long"  # for counts, as that of a bad row


@dataclass(frozen=True)
class Selection:
    """A prompts file, sorted into what can be captured and what cannot."""

    rows: list[Row]
    bad_rows: list[BadRow]
    too_long: list[TooLong]
    num_shortened: int = 0  # rows that are cut at a turn, or split
    num_lost: int = 0  # supervised tokens of theirs that are in no sample

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
        UserError: the file cannot be read, has no usable row, or has a bad one and prompts.fail_on_bad_row is set; or
            a setting is for given answers, and the target writes them.
    """
    if regenerate.enabled and prompts.too_long != "drop":
        raise UserError(
            f"prompts.too_long must be 'drop' where the target writes the answers, got {prompts.too_long!r}: it cuts "
            f"given ones; leave it out, or keep those of the file with regenerate.enabled=false"
        )
    selection = Selection([], [], [])
    num_shortened = num_lost = 0
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
            if isinstance(result, _Fitted):
                selection.rows.extend(result.rows)
                is_cut = [each.conversation for each in result.rows] != [row]
                num_shortened, num_lost = num_shortened + is_cut, num_lost + result.num_lost
            elif isinstance(result, TooLong):
                selection.too_long.append(result)
            elif prompts.fail_on_bad_row and not result.is_left_out_on_purpose:
                raise UserError(
                    f"every row must be usable with prompts.fail_on_bad_row=true, got a bad one: {result.reason} "
                    f"({result.file or path}, line {result.line}); correct it or leave the setting off"
                )
            else:
                selection.bad_rows.append(result)
    for name in unread_files(path):
        logger.info("prompts: %s is in no form that is read, and left out", name)
    if selection.rejected:
        kinds = Counter(row.kind for row in selection.rejected).most_common()
        told = ", ".join(f"{kind} {count}" for kind, count in kinds)
        logger.info("prompts: %s left out: %s", counted(len(selection.rejected), "row"), told)
    if num_shortened:
        logger.info(
            "prompts: %s cut (prompts.too_long=%s), which leaves out %s",
            counted(num_shortened, "row"), prompts.too_long, counted(num_lost, "supervised token"),
        )  # fmt: skip
    if not selection.rows:
        first = selection.rejected[0]
        remedy = "correct the file" if regenerate.enabled else "correct the file, or set regenerate.enabled=true"
        raise UserError(
            f"prompts must have at least one usable row, got none of {len(selection.rejected)}: line {first.line}, "
            f"{first.reason} ({first.file or path}); {remedy}"
        )
    return replace(selection, num_shortened=num_shortened, num_lost=num_lost)


def _make_examine(
    renderer: ChatRenderer,
    regenerate: RegenerateConfig,
    max_tokens: int,
    too_long: Literal["drop", "truncate", "split"],
) -> Callable[[Conversation], _Fitted | BadRow | TooLong]:
    return partial(_examine, renderer, regenerate, max_tokens, too_long)


def _examine(
    renderer: ChatRenderer,
    regenerate: RegenerateConfig,
    max_tokens: int,
    too_long: Literal["drop", "truncate", "split"],
    row: Conversation,
) -> _Fitted | BadRow | TooLong:
    if regenerate.enabled:
        return _size_with_answers_to_come(row, renderer, regenerate.max_new_tokens, max_tokens)
    rendered = render_row(renderer, row)
    if not any(rendered.loss_mask):
        return BadRow(row.line, "row must have an assistant turn to learn from, got none", row.file, "no answer")
    samples = fit(renderer, row, rendered, max_tokens=max_tokens, too_long=too_long)
    if not samples:
        reason = f"row must have at most {max_tokens} tokens, got {len(rendered.input_ids)}"
        return TooLong(row.line, reason, row.file)
    sizes = [SampleSize(len(each.rendered.input_ids), sum(each.rendered.loss_mask)) for each in samples]
    rows = [Row(sample.conversation, size) for sample, size in zip(samples, sizes, strict=True)]
    return _Fitted(rows, max(0, sum(rendered.loss_mask) - sum(size.num_supervised for size in sizes)))


def _size_with_answers_to_come(
    row: Conversation, renderer: ChatRenderer, max_new_tokens: int, max_tokens: int
) -> _Fitted | BadRow | TooLong:
    problem = row.why_not_answerable()
    if problem is not None:
        return BadRow(row.line, f"{problem} with regenerate.enabled=false", row.file, "not answerable")
    num_first = len(first_prompt_ids(renderer, row))
    reason = why_prompt_too_long(num_first, max_tokens)
    if reason is not None:
        return TooLong(row.line, reason, row.file)
    num_turns = count_user_turns(row)
    num_prompt_tokens = num_first if num_turns == 1 else len(last_prompt_ids(renderer, row))
    num_tokens = min(max_tokens, num_prompt_tokens + num_turns * max_new_tokens)
    num_supervised = min(num_turns * max_new_tokens, max_tokens - num_first)
    return _Fitted([Row(row, SampleSize(num_tokens, num_supervised))])
