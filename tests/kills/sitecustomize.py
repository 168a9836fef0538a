"""Kills a process of a real run at a phase of its work, from within, as `kill -9` would: for tests.

Python imports a module of this name when it starts, so nothing of the run is changed: the real command, the real
server. EAGLE3_KILL is `VICTIM PHASE COUNT FLAG`: the process dies when it enters PHASE for the COUNTth time, once, and
leaves the file FLAG to show that it was there.
"""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

WRITER = "eagle3.capture.sample_writer"  # the process of a server that writes its samples


def main() -> None:
    victim, phase, number, flag = os.environ["EAGLE3_KILL"].split(" ")
    is_victim = {
        "extract": any(word.endswith("extract.py") for word in sys.orig_argv),
        "writer": WRITER in sys.orig_argv,
        "server": "EAGLE3_CAPTURE_DIR" in os.environ and WRITER not in sys.orig_argv,
    }[victim]
    if is_victim and not Path(flag).exists():
        PHASES[victim, phase](Death(int(number), Path(flag)))


class Death:
    """Comes when it is called for the last time."""

    def __init__(self, number: int, flag: Path) -> None:
        self._calls = count(1)
        self._number = number
        self._flag = flag

    def is_now(self) -> bool:
        return next(self._calls) == self._number

    def strike(self) -> None:
        self._flag.touch(exist_ok=False)
        if "EAGLE3_CAPTURE_DIR" in os.environ:
            os.killpg(os.getpgrp(), signal.SIGKILL)  # a server is its whole group
        os.kill(os.getpid(), signal.SIGKILL)  # extract.py may share its group with the test


def before(module: str, name: str) -> Callable[[Death], None]:
    """Dies on entering a function."""

    def patch(death: Death) -> None:
        def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if death.is_now():
                death.strike()
            return original(*args, **kwargs)

        replace(module, name, replacement)

    return patch


def half_written(module: str, name: str, path_of: Callable[..., Path]) -> Callable[[Death], None]:
    """Dies when half of what a function writes to a file is there."""

    def patch(death: Death) -> None:
        def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not death.is_now():
                return original(*args, **kwargs)
            path = path_of(*args)
            size_before = path.stat().st_size if path.exists() else 0
            original(*args, **kwargs)
            os.truncate(path, (size_before + path.stat().st_size) // 2)
            death.strike()

        replace(module, name, replacement)

    return patch


def replace(module: str, name: str, replacement: Callable[..., Any]) -> None:
    owner: Any = import_module(module)
    *classes, attribute = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original = getattr(owner, attribute)
    setattr(owner, attribute, lambda *args, **kwargs: replacement(original, *args, **kwargs))


PHASES = {
    # A sequence was sent, its states are on their way.
    ("extract", "waiting"): before("eagle3.capture.staging_area", "StagingArea.wait_for"),
    ("extract", "answering"): half_written("eagle3.capture.answers", "AnswerLog.append", lambda log, *_: log._path),
    ("extract", "writing"): half_written("eagle3.features.writer", "write_shard", lambda path, *_: path),
    # Between the link to the final name and the end of the temporary one.
    ("extract", "renaming"): before("eagle3.features.writer", "sync"),
    ("extract", "indexing"): half_written(
        "eagle3.features.writer", "append_to_index", lambda path, *_: path / "index.jsonl"
    ),
    # The forward has run, nothing is written.
    ("server", "waiting"): before("eagle3.capture.handover", "Handover.submit"),
    ("writer", "writing"): before("os", "pwrite"),  # of the five pieces of a file
    ("writer", "renaming"): before("pathlib", "Path.rename"),
}

if "EAGLE3_KILL" in os.environ:
    main()
