"""The staging directory as one run sees it: claimed, kept within a budget of bytes, cleaned of dead runs.

A run holds a lock file as long as it lives, so what a killed one left behind is told from what a living one uses
without trusting process ids.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3.capture.staging import (
    AUX_NAME,
    BESIDE,
    CODEC_KEY,
    DTYPE_KEY,
    LAST_NAME,
    error_path,
    partial_path,
    request_id,
    sample_path,
)
from eagle3.config import UserError
from eagle3.features.codec import CodedStates

LOCK_PREFIX, LOCK_SUFFIX = ".eagle3-", ".lock"
# A file of a request that a run made; others may have theirs beside it, and it may be anybody's directory.
OWN_FILE = re.compile(r"eagle3-[1-9][0-9]*-([0-9a-f]{8})-[0-9]+\.(?:safetensors|error\.json|partial)")
POLL_SECONDS = (0.001, 0.05)  # first and longest pause between two looks for a file


class SampleError(Exception):
    """A sample did not come, or not whole; the message says why."""


@dataclass(frozen=True)
class StagedSample:
    """The content of one file."""

    input_ids: Tensor  # (T,)
    aux: CodedStates  # (T, A*D)
    last: CodedStates  # (T, D)
    codec: str | None  # in which the server coded them; None: they are as they were
    dtype: str  # of the states before that

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [self.input_ids, *vars(self.aux).values(), *vars(self.last).values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class StagingArea:
    """A context manager; samples pass through its `directory`."""

    def __init__(self, parent: Path, budget_bytes: int | None, *, shared: bool) -> None:
        """`shared` uses `parent` itself, as running servers do; otherwise a new directory is made in it.

        `budget_bytes` None is half of what is free there.

        Raises:
            UserError: `parent` is not a directory, or has less room than the budget.
        """
        if not parent.is_dir():
            raise UserError(f"server.staging_dir must be a directory, got {str(parent)!r}; make it or name another one")
        remove_dead_runs(parent)
        free_bytes = shutil.disk_usage(parent).free
        if budget_bytes is not None and budget_bytes > free_bytes:
            raise UserError(
                f"server.staging_bytes must be at most the {free_bytes:,} bytes that are free, got {budget_bytes:,} "
                f"({parent}); lower it or name another server.staging_dir"
            )
        self.budget_bytes = free_bytes // 2 if budget_bytes is None else budget_bytes
        self._run = secrets.token_hex(4)
        self._parent = parent
        self._lock_path = parent / f"{LOCK_PREFIX}{self._run}{LOCK_SUFFIX}"
        self._shared = shared
        self.directory = parent if shared else parent / f"eagle3-{self._run}"
        self._numbers = count()
        self.used_bytes = 0  # of samples that were asked for and not read yet

    def __enter__(self) -> Self:
        # Locked under another name first: a run that starts now would take a lock that nobody holds for a dead one's.
        unlocked = self._lock_path.with_suffix(".new")
        self._lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self._lock_path)
        if not self._shared:
            self.directory.mkdir(mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _remove_files(self._parent, self._run)
        if not (self._shared and error is not None):
            self._lock_path.unlink()
        # Otherwise the next run finds a lock that nobody holds: what was under way may still be written.
        os.close(self._lock)

    def new_request_id(self, num_tokens: int) -> str:
        """Returns an id that no other request of any run has."""
        return request_id(num_tokens, f"{self._run}-{next(self._numbers)}")

    def reserve(self, num_bytes: int) -> bool:
        """Takes room, if there is some; a sample larger than the whole budget has it for itself."""
        if self.used_bytes and self.used_bytes + num_bytes > self.budget_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Gives room back."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, self.used_bytes

    def wait_for(self, request: str, timeout_seconds: float, lives: Callable[[], bool] = lambda: True) -> None:
        """Returns once a sample is there; the server writes it a moment after it has answered.

        Raises:
            SampleError: the server says that it cannot be whole, it does not come, or the server no longer `lives`.
        """
        path, failed = sample_path(self.directory, request), error_path(self.directory, request)
        deadline = time.monotonic() + timeout_seconds
        pause, longest = POLL_SECONDS
        while not path.exists():
            if failed.exists():
                raise SampleError(json.loads(failed.read_text())["error"])
            if not lives():
                raise SampleError(f"the server died before it wrote {path}")
            if time.monotonic() > deadline:
                raise SampleError(f"the server answered but wrote nothing to {path} in {timeout_seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def recorded_boundaries(self) -> list[int] | None:
        """Returns what the plugin said when it was last started here, None if it never was."""
        markers = sorted(self.directory.glob("plugin-*.json"), key=lambda path: path.stat().st_mtime)
        return json.loads(markers[-1].read_text())["boundaries"] if markers else None

    def take(self, request: str) -> StagedSample:
        """Reads a sample and deletes its file."""
        sample = read_sample(sample_path(self.directory, request))
        self.discard(request)
        return sample

    def discard(self, request: str) -> None:
        """Deletes what there is of a sample."""
        for path in (sample_path, error_path, partial_path):
            path(self.directory, request).unlink(missing_ok=True)


def read_sample(path: Path) -> StagedSample:
    """Copies a sample out of its file, which may be deleted then."""
    with safe_open(path, framework="pt") as file:
        names, metadata = set(file.keys()), file.metadata() or {}
        codec = metadata.get(CODEC_KEY)

        def read(pieces: list[str]) -> CodedStates:
            # Side by side (T, A*D), however the engine had them: A of D or one of A*D.
            kinds = [""] if codec is None else ["", *(f".{kind}" for kind in BESIDE)]
            return CodedStates(*(torch.cat([file.get_tensor(name + kind) for name in pieces], dim=1) for kind in kinds))

        aux_names = [f"{AUX_NAME}.{i}" for i in range(len(names)) if f"{AUX_NAME}.{i}" in names]
        last = read([LAST_NAME])
        return StagedSample(
            input_ids=file.get_tensor("input_ids").clone(),
            aux=read(aux_names),
            last=last,
            codec=codec,
            dtype=metadata.get(DTYPE_KEY, str(last.codes.dtype).removeprefix("torch.")),
        )


def remove_dead_runs(parent: Path) -> None:
    """Deletes what killed runs left in `parent`."""
    for lock_path in parent.glob(f"{LOCK_PREFIX}*{LOCK_SUFFIX}"):
        try:
            lock = os.open(lock_path, os.O_WRONLY)
        except FileNotFoundError:
            continue  # its run has just ended, or another one cleans too
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # alive
        finally:
            os.close(lock)
        _remove_files(parent, lock_path.name.removeprefix(LOCK_PREFIX).removesuffix(LOCK_SUFFIX))
        lock_path.unlink(missing_ok=True)
    # What a server wrote after its run was gone, and cleaned up: a living run has a lock before it asks for anything.
    for path in parent.glob("eagle3-*-*-*"):
        ours = OWN_FILE.fullmatch(path.name)
        if ours and not (parent / f"{LOCK_PREFIX}{ours[1]}{LOCK_SUFFIX}").exists():
            path.unlink(missing_ok=True)


def _remove_files(parent: Path, run: str) -> None:
    shutil.rmtree(parent / f"eagle3-{run}", ignore_errors=True)
    for path in parent.glob(f"eagle3-*-{run}-*"):
        path.unlink(missing_ok=True)
