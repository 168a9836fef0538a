"""Ctrl-C and SIGTERM end a run between two writes, never within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Turns the first SIGINT or SIGTERM into KeyboardInterrupt, at once or when a held block ends; ignores later ones.

    Signals belong to the main thread; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_pending = False
        self._has_raised = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets a block finish before the run ends."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_pending:
            self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._has_raised:
            return  # what was captured is being written; a run that hangs can be killed without harm
        if self._is_held:
            self._is_pending = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._has_raised = True
        raise KeyboardInterrupt
