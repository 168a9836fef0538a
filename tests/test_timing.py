"""Parts of a step add up, and a rank is slow only beside the others."""

import time

import pytest
import torch

from eagle3.training.timing import Mark, StepMarks, StepSeconds, find_stragglers, seconds_of

CPU = torch.device("cpu")


def marks_apart(*, tells: bool) -> StepMarks:
    moments = []
    for seconds in (0.0, 0.04, 0.02, 0.03, 0.01):
        time.sleep(seconds)
        moments.append(Mark(CPU))
    met, forward, own, backward, update = moments
    return StepMarks(met, forward, own if tells else None, backward, update)


def test_the_parts_are_those_between_the_marks() -> None:
    marks = marks_apart(tells=True)
    found = seconds_of(0.5, marks)
    assert found.data == 0.5
    total = found.forward + found.backward + found.exchange + found.update
    assert total == pytest.approx(marks.met.seconds_until(marks.update_done))
    for seconds, slept in ((found.forward, 0.04), (found.backward, 0.02), (found.exchange, 0.03), (found.update, 0.01)):
        assert seconds >= slept
    assert sum(found.shares(total + 0.5).values()) == pytest.approx(1.0)


def test_alone_there_is_no_exchange() -> None:
    found = seconds_of(0.0, marks_apart(tells=False))
    assert found.exchange == 0.0
    assert found.backward >= 0.05


def test_parts_of_steps_are_added() -> None:
    both = StepSeconds(1.0, 2.0, 3.0, 4.0, 5.0) + StepSeconds(0.5, 0.5, 0.5, 0.5, 0.5)
    assert both == StepSeconds(1.5, 2.5, 3.5, 4.5, 5.5)


def test_a_straggler_is_slow_beside_the_median() -> None:
    assert find_stragglers([1.0, 1.1, 1.0, 1.4]) == {3: pytest.approx(1.4 / 1.05)}
    assert find_stragglers([1.0, 1.2, 1.1]) == {}
    assert find_stragglers([5.0]) == {}
    assert find_stragglers([0.0, 0.0]) == {}
