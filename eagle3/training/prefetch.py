"""Work that is done ahead, on threads, in order."""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

GIVE_UP_SECONDS = 5.0  # a launcher that asks its ranks to stop kills them 30 s later, and they have a save to write


def prefetched(
    load: Callable[[Item], Result],
    items: Iterable[Item],
    depth: int,
    gives_up: Callable[[], bool] = lambda: False,
    *,
    num_threads: int = 1,
) -> Generator[Result, None, None]:
    """Yields `load(item)` of each item, with at most `depth` results waiting; what `load` raises is raised in turn.

    Close it to end the threads: what is under way is finished, nothing more is begun, nor is it after an error. Who
    waits for a result, or for that end, is asked every few seconds whether it `gives_up`, and then leaves the threads.
    """
    has_failed = has_given_up = False

    def load_unless_failed(item: Item) -> Result:
        nonlocal has_failed
        if has_failed:
            raise CancelledError  # of what came before it, which is raised first
        try:
            return load(item)
        except BaseException:
            has_failed = True
            raise

    def waits_for(results: Collection[Future[Result]]) -> bool:
        nonlocal has_given_up
        while not has_given_up and wait(results, GIVE_UP_SECONDS).not_done:
            has_given_up = gives_up()
        return not has_given_up

    under_way: deque[Future[Result]] = deque()
    rest = iter(items)
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
    try:
        while True:
            while len(under_way) < depth:
                try:
                    item = next(rest)
                except StopIteration:
                    break
                under_way.append(threads.submit(load_unless_failed, item))
            if not under_way:
                return
            if not waits_for([under_way[0]]):
                return
            yield under_way.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        if waits_for([each for each in under_way if each.running()]):
            threads.shutdown()
