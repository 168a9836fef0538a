"""Where a step's time goes, on the device's own clock: reading it makes nobody wait.

On a GPU the clock runs behind the program, which is many operations ahead; marks are read once a log line is written.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

import torch

STRAGGLER_RATIO = 1.3  # of the median rank's own work; micro-batches differ by less


class Mark:
    """A moment of the device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def seconds_until(self, later: "Mark") -> float:
        """Returns the time between two moments, once the device has passed the later one."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3


@dataclass(frozen=True)
class StepMarks:
    """The moments of one step."""

    met: Mark  # the ranks have told each other what they have
    forward_done: Mark  # of the last micro-batch, and all of those before it
    own_done: Mark | None  # this rank has made all of its gradients; None where nobody tells
    backward_done: Mark  # and they have crossed the ranks
    update_done: Mark


@dataclass(frozen=True)
class StepSeconds:
    """Where the time of some steps went."""

    data: float = 0.0  # waiting for the next batch
    forward: float = 0.0  # with the backward of all micro-batches but the last: a rank's own work
    backward: float = 0.0
    exchange: float = 0.0  # gradients that cross the ranks after the last of them was made; waiting for a rank, too
    update: float = 0.0  # under DeepSpeed with the weights on their way between ranks

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        return StepSeconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def shares(self, seconds: float) -> dict[str, float]:
        """Returns each part's share of a time."""
        return {each.name: getattr(self, each.name) / seconds for each in fields(self)}


def seconds_of(data: float, marks: StepMarks) -> StepSeconds:
    """Reads a step's marks; `data` is what the batch was waited for."""
    own_done = marks.backward_done if marks.own_done is None else marks.own_done
    return StepSeconds(
        data=data,
        forward=marks.met.seconds_until(marks.forward_done),
        backward=marks.forward_done.seconds_until(own_done),
        exchange=own_done.seconds_until(marks.backward_done),
        update=marks.backward_done.seconds_until(marks.update_done),
    )


def find_stragglers(own_seconds: Sequence[float]) -> dict[int, float]:  # by rank
    """Returns the ranks whose own work took much longer than the median's, with the ratio."""
    usual = median(own_seconds)
    if usual <= 0:
        return {}
    ratios = {rank: seconds / usual for rank, seconds in enumerate(own_seconds)}
    return {rank: ratio for rank, ratio in ratios.items() if ratio > STRAGGLER_RATIO}
