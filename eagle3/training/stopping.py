"""What ends a run before its last step: a signal, the time it was given, samples that do not come, a tau that stays."""

import signal
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self, TypeVar

from eagle3.config import UserError
from eagle3.training.checkpoints import TrainState

Item = TypeVar("Item")


def has_ended(state: TrainState, num_steps: int, patience: int | None) -> bool:
    """Tells whether a run has taken its last step, or has been no better for as long as its patience."""
    return state.step >= num_steps or (patience is not None and state.num_worse >= patience)


class StopSignal:
    """Notes SIGTERM and Ctrl-C instead of dying of them, for the length of a `with` block, and when time is up.

    A second Ctrl-C interrupts at once. A first one that did would be lost in code that takes it for its own error, as
    safetensors' does. No time is up before the first step: a run that spent it on what comes before, a validation
    perhaps, would do so each time that it is resumed.
    """

    def __init__(self, stop_after: float | None = None) -> None:
        """`stop_after` is in minutes from now."""
        self._deadline = None if stop_after is None else time.monotonic() + 60 * stop_after
        self._limit = stop_after
        self._signal: int | None = None
        self._takes_steps = False
        self.error: UserError | OSError | None = None  # for want of which samples this rank cannot go on

    def next_of(self, loaded: Iterator[Item]) -> Item | None:
        """Returns the next of what is loaded ahead; None after the last, where nobody waits for it any more, or if it
        cannot be had, which is noted.

        Whoever cannot go on for that must not leave the other ranks in a collective, nor the steps so far unsaved: the
        error is to be raised once the ranks have ended the run together.
        """
        try:
            return next(loaded, None)
        except (UserError, OSError) as error:
            self.error = error
            return None

    def step_begins(self) -> None:
        """Notes that this session takes a step: from now on its time can be up."""
        self._takes_steps = True

    @property
    def requested(self) -> bool:
        """True once the run should end."""
        is_late = self._takes_steps and self._deadline is not None and time.monotonic() >= self._deadline
        return self._signal is not None or is_late or self.error is not None

    @property
    def reason(self) -> str:
        """Says what asked for it."""
        if self.error is not None:
            return "no samples"
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return f"run.stop_after={self._limit:g} minutes" if self.requested else "another rank has to"

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handled, handler in self._before.items():
            signal.signal(handled, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
