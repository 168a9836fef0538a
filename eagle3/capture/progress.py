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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle3.capture.engine import StagingUse
from eagle3.plan import readable_bytes

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


class LiveProgress:
    """Rows that are done, with rates; a context manager."""

    def __init__(self, report: ExtractionReport, staging: Callable[[], StagingUse | None]) -> None:
        """`staging` says how full the staging area is."""
        self._report = report
        self._staging = staging
        self._num_rows = self._num_before = self._num_done = 0
        self._started = self._told_at = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples {task.description}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("")

    def begin(self, num_rows: int, num_done: int) -> None:
        """Says how many rows there are, and how many of them earlier runs have done."""
        self._num_rows, self._num_before, self._num_done = num_rows, num_done, num_done
        self._started = time.monotonic()
        self._bar.update(self._task, total=num_rows, completed=num_done)

    def show(self, advance: int = 0) -> None:
        """Brings the bar up to date, or says a line if the last one is a while ago."""
        self._num_done += advance
        now = time.monotonic()
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._num_done, description=self.state())
        elif now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            left = f", {self._time_left(now)} left" if self._num_done > self._num_before else ""
            logger.info("%d/%d samples, %s%s", self._num_done, self._num_rows, self.state(), left)

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

    def _time_left(self, now: float) -> timedelta:
        seconds = (now - self._started) / (self._num_done - self._num_before) * (self._num_rows - self._num_done)
        return timedelta(seconds=round(seconds))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
