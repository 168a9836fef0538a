"""Ctrl-C while a command's modules are imported.

A command imports this first, and next to nothing with it: before that, Ctrl-C is answered by Python itself.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted\n"


@contextmanager
def loading() -> Iterator[None]:
    """Answers Ctrl-C with the same word and exit code while a block imports what takes seconds, torch above all.

    An exception would not do: an import may swallow it, or make another one of it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or another's
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), INTERRUPTED.encode())
    os._exit(130)  # nothing has been begun
