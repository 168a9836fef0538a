"""Checkpoints written beside the steps: a step waits for the copy off the devices, not for the disk.

The trap is the last one: whoever ends a run must wait for the thread, and must not lose what it raised.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from eagle3.config import RunConfig
from eagle3.training.checkpoints import TrainState, checkpoint_path, prune_checkpoints, save_checkpoint
from eagle3.training.engine import Engine
from eagle3.training.host_copy import HostCopy

logger = logging.getLogger(__name__)


class Saver:
    """Writes a run's checkpoints on a thread, one at a time; only the main rank has any to write."""

    def __init__(self, engine: Engine, run_dir: Path, config: RunConfig) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._writing: Future[None] | None = None
        self._host = HostCopy(engine.state_bytes if engine.world.is_main else 0, engine.world.device)

    def save(self, state: TrainState) -> Path:
        """Copies the state off the devices, begins to write it, and returns where it will be; every rank must call it.

        Raises:
            OSError: the checkpoint before this one could not be written.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - started
        tensors = self._engine.read_state(self._host)
        path = checkpoint_path(self._run_dir, state.step)
        if self._engine.world.is_main:
            self._writing = self._thread.submit(self._write, tensors, state)
            seconds = time.perf_counter() - started
            logger.info(
                "saving %s; the steps waited %.2f s, %.2f of them for the save before", path, seconds, waited
            )  # fmt: skip
        return path

    def check(self) -> None:
        """Raises what a save raised, if one did; costs nothing.

        Raises:
            OSError: a checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Waits until what was saved is on the disk.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Waits until what was saved is on the disk, or could not be written, which is logged."""
        writing, self._writing = self._writing, None
        if writing is not None and writing.exception() is not None:
            logger.error("the last checkpoint could not be written: %s", writing.exception())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()
        self._host.__exit__(kind, error, at)
        if kind is None:
            self.wait()
        else:
            self.finish()

    def _write(self, tensors: dict[str, Tensor], state: TrainState) -> None:
        save_checkpoint(self._run_dir, tensors, state)
        prune_checkpoints(self._run_dir, state.step, self._config.keep_last, self._config.keep_best)
