"""What an extraction says while it runs: a bar in a terminal, elsewhere the same in a line now and then."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eagle3.capture.engine import StagingUse
from eagle3.words import counted, readable_bytes

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0  # between two lines where there is no bar


@dataclass
class ExtractionReport:
    """What one run did; filled in as it goes."""

    num_stored_before: int = 0
    num_stored: int = 0  # samples, by this run
    num_tokens: int = 0
    num_supervised: int = 0
    num_bytes: int = 0  # of features, by this run, those that are buffered not included
    num_bad_rows: int = 0
    num_too_long: int = 0
    num_quarantined: int = 0  # by all runs
    num_generated: int = 0  # tokens, those of cut loops included
    num_unfinished: int = 0  # answers that ended at a token limit
    num_looped: int = 0  # answers that were cut where they began to repeat themselves
    num_reencoded: int = 0  # answers that lost their supervision, since their text encodes to other ids
    num_turns_dropped: int = 0  # user turns that found no room under the token limit
    generation_seconds: float = 0.0
    capture_seconds: float = 0.0
    plain_tokens_per_second: float | None = None  # of the same prefills, unrecorded; null: not measured

    def answers(self) -> str:
        """Returns what became of the answers."""
        return (
            f"answers: {self.num_unfinished} reached a token limit, {counted(self.num_looped, 'loop')} cut, "
            f"{self.num_reencoded} not supervised for encoding otherwise, {counted(self.num_turns_dropped, 'turn')} "
            f"dropped"
        )

    def rates(self) -> str:
        """Returns tokens per second of both stages, and what recording leaves of plain prefill's."""
        stages = [
            ("answers", self.num_generated, self.generation_seconds),
            ("capture", self.num_tokens, self.capture_seconds),
        ]
        parts = [f"{name} {tokens / seconds:,.0f} tokens/s" for name, tokens, seconds in stages if seconds]
        if self.plain_tokens_per_second and self.capture_seconds:
            share = self.num_tokens / self.capture_seconds / self.plain_tokens_per_second
            parts[-1] += f" ({share:.0%} of plain prefill)"
        return ", ".join(parts)


@dataclass(frozen=True)
class _Mark:
    """A moment at which no row was between its answer and its capture."""

    num_done: int
    at: float  # seconds of the monotonic clock


class LiveProgress:
    """Rows that are done, with rates; a context manager.

    Rows are answered and captured in turns, many at a time, so that neither stage's pace alone tells the time left.
    """

    def __init__(self, report: ExtractionReport, staging: Callable[[], StagingUse | None]) -> None:
        """`staging` says how full the staging area is."""
        self._report = report
        self._staging = staging
        self._num_rows = self._num_before = self._num_done = 0
        self._told_at = self._shown_at = time.monotonic()
        self._answering_seconds = 0.0
        self._begin = self._turn = _Mark(0, self._shown_at)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples {task.description}"))
        console = Console(stderr=True)
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("")

    def begin(self, num_rows: int, num_done: int) -> None:
        """Says how many rows there are, and how many of them earlier runs have done."""
        self._num_rows, self._num_before, self._num_done = num_rows, num_done, num_done
        self._shown_at = time.monotonic()
        self._begin = self._turn = _Mark(num_done, self._shown_at)
        self._bar.update(self._task, total=num_rows, completed=num_done)

    def show(self, advance: int = 0) -> None:
        """Brings the bar up to date, or says a line if the last one is a while ago."""
        self._mark_turn()
        self._num_done += advance
        self._shown_at = now = time.monotonic()
        if not self._bar.disable:
            told = self.state() + self._left(now)
            self._bar.update(self._task, completed=self._num_done, description=told)
        elif now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            logger.info("%d/%d samples, %s%s", self._num_done, self._num_rows, self.state(), self._left(now))

    def state(self) -> str:
        """Returns rates, bytes written and bytes that wait."""
        parts = [self._report.rates(), f"{readable_bytes(self._report.num_bytes)} written"]
        staging = self._staging()
        if staging is not None:
            parts.append(f"staging {readable_bytes(staging.used_bytes)} of {readable_bytes(staging.budget_bytes)}")
        return ", ".join(part for part in parts if part)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the bar away meanwhile: a log line would land in the middle of it."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def _mark_turn(self) -> None:
        """Marks where the writing of answers begins again: all rows before it have been through both stages."""
        seconds = self._report.generation_seconds
        if seconds > self._answering_seconds:
            is_first = self._answering_seconds == 0
            if is_first or self._num_done > self._turn.num_done:
                self._turn = _Mark(self._num_done, self._shown_at)
            if is_first:
                self._begin = self._turn  # rows before had their answers from an earlier run
            self._answering_seconds = seconds

    def _left(self, now: float) -> str:
        """Returns how long the rows that are left will take, as far as those before them tell."""
        report, begin, turn = self._report, self._begin, self._turn
        num_left = self._num_rows - self._num_done
        if self._num_done == begin.num_done:
            return ""
        covers = ""
        if not (report.generation_seconds and report.capture_seconds):  # one stage is all there is
            seconds = (now - begin.at) / (self._num_done - begin.num_done) * num_left
        else:
            seconds = report.capture_seconds / (self._num_done - self._num_before) * num_left
            if turn.num_done > begin.num_done:
                seconds_per_row = (turn.at - begin.at) / (turn.num_done - begin.num_done)
                seconds = max(seconds, seconds_per_row * (self._num_rows - turn.num_done) - (now - turn.at))
            elif num_left:
                covers = ", answers to come not counted"
        return f", {timedelta(seconds=round(seconds))} left{covers}"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
