"""How far a command on stores is: a bar on a terminal, else a line now and then."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0  # between lines of progress where there is no terminal


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, else a line now and then; yields what moves it on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _logged(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)


def _logged(title: str, total: int) -> Callable[[int], None]:
    done, next_at = 0, time.monotonic() + LOG_SECONDS

    def advance(amount: int) -> None:
        nonlocal done, next_at
        done += amount
        if time.monotonic() >= next_at:
            logger.info("%s: %.1f %%", title, 100 * done / max(1, total))
            next_at = time.monotonic() + LOG_SECONDS

    return advance
