"""Results come in order, a bounded number ahead, and errors in their place."""

import threading

import pytest

from eagle3.training import prefetch
from eagle3.training.prefetch import prefetched


def test_results_come_in_order() -> None:
    assert list(prefetched(lambda number: number * number, range(20), depth=3)) == [n * n for n in range(20)]
    assert list(prefetched(str, [], depth=2)) == []


def test_at_most_depth_results_are_made_ahead() -> None:
    made: list[int] = []
    three = threading.Event()

    def load(number: int) -> int:
        made.append(number)
        if number == 3:
            three.set()
        return number

    results = prefetched(load, range(100), depth=3)
    assert next(results) == 0  # 1 and 2 may be made by now
    assert next(results) == 1
    assert three.wait(timeout=10)  # begun when 1 was asked for
    results.close()
    assert len(made) <= 4


def test_several_threads_load_at_once_and_in_order() -> None:
    together = threading.Barrier(2, timeout=20)

    def load(number: int) -> int:
        together.wait()  # breaks, and is raised, unless another one is under way
        return number

    assert list(prefetched(load, range(10), depth=2, num_threads=2)) == list(range(10))
    together = threading.Barrier(2, timeout=0.2)
    alone = prefetched(load, range(2), depth=2)
    with pytest.raises(threading.BrokenBarrierError):
        list(alone)


def test_an_error_is_raised_in_its_turn() -> None:
    results = prefetched(lambda number: 1 // (2 - number), range(9), depth=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    results = prefetched(str, range(10), depth=2)
    next(results)
    results.close()
    assert threading.active_count() == before


def test_nothing_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def load(number: int) -> int:
        begun.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        next(prefetched(load, range(9), depth=3))
    assert begun == [0], "the others would be waited for"


def test_who_gives_up_waits_for_nothing_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "GIVE_UP_SECONDS", 0.01)
    asked: list[int] = []
    answered = threading.Event()

    def gives_up() -> bool:
        asked.append(1)
        return len(asked) == 3

    def load(number: int) -> int:
        if number == 1:
            answered.wait(timeout=60)
        return number

    assert list(prefetched(load, range(9), depth=2, gives_up=gives_up)) == [0]
    assert len(asked) == 3
    closed = prefetched(load, range(9), depth=2, gives_up=lambda: True)
    assert next(closed) == 0
    closed.close()
    assert not answered.is_set()
    answered.set()
