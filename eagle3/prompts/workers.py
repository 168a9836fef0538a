"""Rows are parsed, rendered and looked at in processes of their own, and come back in file order.

A bounded number of rows is on its way at any time, so that a file of any size takes the same memory.
"""

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from eagle3.config import PromptsConfig, UserError
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import BadRow, Conversation, UniqueIds, parse_row
from eagle3.prompts.raw_rows import RawRow
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.screening import NearDuplicates, QuestionSets, signature
from eagle3.prompts.sources import Source, find_sources, read_rows

Result = TypeVar("Result")
CHUNK_ROWS = 256
CHUNKS_IN_FLIGHT = 3  # per process: one at work, one waiting, one on its way back
PARALLEL_BYTES = 16 * 2**20  # a process takes seconds to start; a smaller file is done by then


@dataclass(frozen=True)
class Examined(Generic[Result]):
    """A row, and what was made of it."""

    row: Conversation | BadRow
    result: Result | None  # None for a bad row


# One worker's own: how it looks at a row. Set once, when the process starts.
_LOOK: list[Callable[[RawRow], tuple[Examined[Any], bytes]]] = []


def examine_rows(
    config: PromptsConfig, make_examine: Callable[[], Callable[[Conversation], Result]], *, keep_rows: bool
) -> Iterator[Examined[Result]]:
    """Yields all rows of the prompts in order, each usable one with what `make_examine()` makes of it.

    `make_examine` is called once in each process, and must be a function of a module (or a partial of one). A row that
    it refuses by RenderingError is a bad one. Without `keep_rows` conversations come without their messages.

    Raises:
        UserError: the prompts or a question set cannot be read, there are no rows, or the number of processes is none.
    """
    sources = find_sources(str(config.path))
    ids, near_duplicates = UniqueIds(), NearDuplicates()
    examined = None
    for examined, bands in _looked_at(config, sources, make_examine, keep_rows):
        row = examined.row
        if isinstance(row, Conversation):
            row = ids.check(row)
        if isinstance(row, Conversation) and bands:
            reason = near_duplicates.why_duplicate(bands, row)
            if reason is not None:
                row = BadRow(row.line, reason, row.file, "near duplicate")
        yield examined if isinstance(row, Conversation) else Examined(row, None)
    if examined is None:
        raise UserError(f"prompts must have at least one row, got an empty file ({config.path!r}); check the path")


def settings_for(config: PromptsConfig, renderer: ChatRenderer) -> PromptsConfig:
    """Returns the settings without processes where the renderer cannot be sent to them."""
    return config if renderer.can_be_sent else replace(config, num_workers=0)


def _looked_at(
    config: PromptsConfig,
    sources: list[Source],
    make_examine: Callable[[], Callable[[Conversation], Result]],
    keep_rows: bool,
) -> Iterator[tuple[Examined[Result], bytes]]:
    rows = read_rows(sources, config.max_row_bytes)
    num_workers = _num_workers(config, sources)
    if num_workers == 0:
        yield from map(_make_look(config, make_examine, keep_rows), rows)
        return
    QuestionSets(config.exclude)  # one that cannot be read is said here, and not by each process
    # Forked processes inherit locks that tokenizer threads hold: they are started from nothing instead.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(config, make_examine, keep_rows)
    ) as pool:
        waiting: deque[Future[list[tuple[Examined[Result], bytes]]]] = deque()
        try:
            while chunk := list(islice(rows, CHUNK_ROWS)):
                with _interrupts_held():  # a process that is started by this inherits it
                    waiting.append(pool.submit(_look_at_chunk, chunk))
                if len(waiting) == num_workers * CHUNKS_IN_FLIGHT:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"processes that render prompts must live until the last row, got one of {num_workers} that was "
                f"killed, most likely for want of memory; lower prompts.num_workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _num_workers(config: PromptsConfig, sources: list[Source]) -> int:
    if config.num_workers is not None:
        if config.num_workers < 0:
            raise UserError(f"prompts.num_workers must be 0 or more, got {config.num_workers}; change it")
        return config.num_workers
    paths = [Path(source.name) for source in sources]
    if sum(path.stat().st_size for path in paths if path.is_file()) < PARALLEL_BYTES:
        return 0
    return len(os.sched_getaffinity(0))


def _start(
    config: PromptsConfig, make_examine: Callable[[], Callable[[Conversation], Result]], keep_rows: bool
) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only the processes of a pool are started so"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _LOOK.append(_make_look(config, make_examine, keep_rows))


def _end_with(parent: "multiprocessing.process.BaseProcess") -> None:
    """Ends with the process that asks for rows: that is killed without a word, and a pool waits for ever."""
    parent.join()
    os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C back meanwhile; it reaches all processes of a terminal, and one of them is to answer it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _look_at_chunk(rows: Iterable[RawRow]) -> list[tuple[Examined[Any], bytes]]:
    return [_LOOK[0](row) for row in rows]


def _make_look(
    config: PromptsConfig, make_examine: Callable[[], Callable[[Conversation], Result]], keep_rows: bool
) -> Callable[[RawRow], tuple[Examined[Result], bytes]]:
    """Returns the function that looks at one row, and gives its signature beside what it found."""
    questions = QuestionSets(config.exclude)
    examine = make_examine()

    def look(raw: RawRow) -> tuple[Examined[Result], bytes]:
        row = parse_row(raw)
        if isinstance(row, BadRow):
            return Examined(row, None), b""
        reason = questions.why_excluded(row)
        if reason is not None:
            return Examined(BadRow(row.line, reason, row.file, "question set"), None), b""
        try:
            result = examine(row)
        except RenderingError as error:
            return Examined(BadRow(row.line, str(error), row.file, "not rendered"), None), b""
        bands = signature(row) if config.near_duplicates == "drop" else b""
        kept = row if keep_rows else replace(row, messages=(), text=None, tokens=None)
        return Examined(kept, result), bands

    return look
