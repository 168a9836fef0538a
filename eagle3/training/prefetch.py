"""Work that is done ahead, on a thread, in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(load: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Generator[Result, None, None]:
    """Yields `load(item)` of each item, with at most `depth` results waiting; what `load` raises is raised in turn.

    Close it to end the thread: what is under way is finished, nothing more is begun, nor is it after an error.
    """
    has_failed = False

    def load_unless_failed(item: Item) -> Result:
        nonlocal has_failed
        if has_failed:
            raise CancelledError  # of what came before it, which is raised first
        try:
            return load(item)
        except BaseException:
            has_failed = True
            raise

    under_way: deque[Future[Result]] = deque()
    rest = iter(items)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        while True:
            while len(under_way) < depth:
                try:
                    item = next(rest)
                except StopIteration:
                    break
                under_way.append(thread.submit(load_unless_failed, item))
            if not under_way:
                return
            yield under_way.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)
