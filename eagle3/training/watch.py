"""The ranks watch each other: who is dead, late, or has stopped is named, and nobody waits for it for ever.

A rank that waits in a collective can be woken by nothing but the end of its process, so a thread of each says where the
rank is, and ends the process once the main rank's thread has found that another one cannot come.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

from eagle3.training.distributed import World, from_main, gather

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
DEAD_AFTER_SECONDS = 60.0  # without a beat: a thread that cannot run for so long has a process that cannot either
STOP = "stop"


@dataclass(frozen=True)
class Beat:
    """Where a rank is, as it says itself."""

    rank: int
    host: str
    step: int
    part: str  # of the step
    number: int  # of the parts it has begun

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, in the {self.part} of step {self.step}"


@dataclass(frozen=True)
class Heard:
    """A rank's last beat, by the main rank's clock."""

    beat: Beat
    silent: float  # seconds since the last beat
    unmoved: float  # seconds since it began the part that it is in


def find_fault(ranks: Sequence[Heard], *, dead_after: float, timeout: float) -> str | None:
    """Returns what keeps a run from going on, or None: a rank that is silent, or one that all others wait for.

    Both are in seconds. The culprit of a wait is who has begun the fewest parts.
    """
    silent = [heard for heard in ranks if heard.silent > dead_after]
    if silent:
        named = "; ".join(f"{heard.beat}, last heard of {heard.silent:.0f} s ago" for heard in silent)
        return f"every rank must be alive, got no word from {named}; look into its host's logs"
    if min(heard.unmoved for heard in ranks) <= timeout:
        return None
    fewest = min(heard.beat.number for heard in ranks)
    late = [heard for heard in ranks if heard.beat.number == fewest]
    others = [heard for heard in ranks if heard.beat.number != fewest]
    named = "; ".join(f"{heard.beat}, for {heard.unmoved:.0f} s" for heard in late)
    waiting = ", ".join(f"{heard.beat.rank} ({heard.beat.part})" for heard in others) or "nobody is further"
    return (
        f"a part of a step must end within run.timeout={timeout / 60:g} minutes, got {named}; "
        f"waiting for it: {waiting}; raise run.timeout if the machine is only slow"
    )


class Watch:
    """Says where this rank is and learns where the others are, for the length of a `with` block; alone it does nothing.

    Raises:
        ChildProcessError: at the block's end, in place of what a collective raised: another rank has stopped or died.
    """

    def __init__(self, world: World, *, timeout: float, before_end: Callable[[], None] | None = None) -> None:
        """`timeout` is in minutes; `before_end` is called before this process is ended because of another one."""
        self._world, self._timeout, self._before_end = world, 60 * timeout, before_end
        self._place = Beat(world.rank, socket.gethostname(), 0, "start", 0)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._times: dict[int, tuple[Beat, float, int, float]] = {}

    def at(self, part: str, step: int | None = None) -> None:
        """Says what this rank begins now, in the step that it is in unless another one is named."""
        place = self._place
        self._place = Beat(place.rank, place.host, place.step if step is None else step, part, place.number + 1)

    def __enter__(self) -> Self:
        if self._world.size > 1:
            host = os.environ["MASTER_ADDR"]
            if self._world.is_main:
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = from_main(self._store.port if self._world.is_main else 0)
            if not self._world.is_main:
                self._store = TCPStore(host, port, is_master=False)
            self._beat()
            gather(None)  # everybody has said something
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is None:
            return
        if error is None:
            self._ended.set()
            self._thread.join()
            gather(None)  # the main rank's end is the store's
            return
        self._ended.set()
        self._thread.join()
        # A collective says that a peer is gone, and not which one; the peer's last words do, or its silence.
        cause = self._cause_of_loss() if isinstance(error, RuntimeError) else None
        if cause is not None:
            raise ChildProcessError(cause) from None
        if isinstance(error, Exception) and not isinstance(error, FloatingPointError):  # which every rank finds itself
            self._tell(f"rank {self._world.rank} on {self._place.host} stopped: {error}")

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
                if self._store.check([STOP]):
                    self._end(self._store.get(STOP).decode())
                if self._world.is_main and (fault := find_fault(
                    self._hear(), dead_after=DEAD_AFTER_SECONDS, timeout=self._timeout
                )):  # fmt: skip
                    self._tell(fault)
                    self._end(fault)
            except dist.DistError as error:
                if not self._ended.is_set():
                    self._end(f"the main rank must be there, got {error}; it died, or its host cannot be reached")

    def _beat(self) -> None:
        self._store.set(f"beat-{self._world.rank}", json.dumps({**asdict(self._place), "at": time.monotonic()}))

    def _hear(self) -> list[Heard]:
        """Reads every rank's beat; its own clock tells the main rank for how long one has not changed."""
        now, found = time.monotonic(), []
        for rank in range(self._world.size):
            values = json.loads(self._store.get(f"beat-{rank}"))
            sign = values.pop("at")
            beat = Beat(**values)
            known = self._times.get(rank)
            heard_at = known[1] if known is not None and known[2] == sign else now
            moved_at = known[3] if known is not None and known[0].number == beat.number else now
            self._times[rank] = (beat, heard_at, sign, moved_at)
            found.append(Heard(beat, now - heard_at, now - moved_at))
        return found

    def _tell(self, message: str) -> None:
        try:
            if not self._store.check([STOP]):
                self._store.set(STOP, message)
        except dist.DistError:
            logger.info("the other ranks could not be told: %s", message)

    def _cause_of_loss(self) -> str | None:
        """Returns what another rank said before it stopped, or on the main rank who has gone silent."""
        until = time.monotonic() + 4 * BEAT_SECONDS
        try:
            while time.monotonic() < until:
                self._beat()
                if self._store.check([STOP]):
                    return self._store.get(STOP).decode()
                if self._world.is_main:
                    silent = [heard for heard in self._hear() if heard.silent > 2 * BEAT_SECONDS]
                    if silent:
                        fault = "every rank must be alive, got no word from " + "; ".join(
                            str(heard.beat) for heard in silent
                        )
                        self._tell(fault)
                        return fault
                time.sleep(BEAT_SECONDS / 4)
        except dist.DistError:
            return "the main rank must be there, got no answer from it"
        return None

    def _end(self, message: str) -> None:
        """Ends this process, whose main thread may wait for what cannot come."""
        if self._before_end is not None:
            self._before_end()
        if self._world.is_main:
            print(f"error: {message}", file=sys.stderr, flush=True)
            time.sleep(2 * BEAT_SECONDS)  # the store ends with this process, and the others read from it why
        os._exit(1)
