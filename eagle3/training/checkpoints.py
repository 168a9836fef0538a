"""Resumable state.

RUN/step-000100/ holds `state.safetensors` (fp32 masters and moments, whole tensors under the drafter's names) and
`state.json`, with a checksum of each tensor. It appears whole or not at all, and any world size, DDP or DeepSpeed, goes
on from it.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config import TrainConfig, UserError, by_dotted_name, config_to_dict
from eagle3.features.samples import Samples
from eagle3.features.store import digest_store
from eagle3.features.stored import bytes_of
from eagle3.files import PRIVATE, sync, system_errors, write_whole
from eagle3.training.batches import Position

logger = logging.getLogger(__name__)

STATE_NAME = "state.json"
TENSORS_NAME = "state.safetensors"
STEP_PATTERN = re.compile(r"step-(\d{6,})")
UNREADABLE = (OSError, ValueError, TypeError, KeyError, SafetensorError)  # what reading a damaged checkpoint raises

# Settings that say where a run goes on, what it is called and how its samples are cut up; the others are the maths.
# The store says what target and layers its features are of; in what dtype its head is multiplied it does not.
FREE_SETTINGS = {
    "target.path", "target.device", "target.capture_layers", "target.trust_remote_code", "tracking",
    "data.path", "data.batch_tokens", "data.split_sequences", "data.read_threads", "data.prefetch_steps",
    "data.embeddings", "data.cache_bytes",
    "run.dir", "run.resume", "run.save_every", "run.validate_every", "run.log_every", "run.keep_last", "run.keep_best",
    "run.timeout", "run.patience", "run.stop_after", "run.deepspeed", "run.deterministic",
}  # fmt: skip


@dataclass(frozen=True)
class TrainState:
    """Where a run stands between two optimizer steps; there is no random state, since all orders are functions."""

    maths: dict[str, Any]  # the settings that change the numbers, by dotted name
    store_digest: str
    step: int = 0  # optimizer steps taken
    position: Position = field(default_factory=Position)  # of the next step's samples
    tau_untrained: float | None = None
    best_tau: float | None = None
    best_step: int | None = None
    validated_step: int | None = None  # the last step whose tau is known
    tau: float | None = None  # of that step
    num_worse: int = 0  # validations since the best one

    def after_validation(self, tau: float) -> "TrainState":
        """Returns the state with the held-out tau of its step; the untrained drafter is never the best."""
        state = dataclasses.replace(self, validated_step=self.step, tau=tau)
        if self.step == 0:
            return dataclasses.replace(state, tau_untrained=tau)
        if self.best_tau is None or tau > self.best_tau:
            return dataclasses.replace(state, best_tau=tau, best_step=self.step, num_worse=0)
        return dataclasses.replace(state, num_worse=self.num_worse + 1)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: TrainState

    def open_tensors(self) -> Any:
        """Opens the tensors for a `with` block, mapped: nothing is read before it is asked for."""
        return safe_open(self.path / TENSORS_NAME, framework="pt")


def initial_state(config: TrainConfig, store: Samples) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(maths=maths_of(config), store_digest=digest_store(store))


def maths_of(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a resumed run must share, by dotted name."""
    flat = by_dotted_name(config_to_dict(config))
    return {name: value for name, value in flat.items() if not {name, name.split(".")[0]} & FREE_SETTINGS}


def save_checkpoint(run_dir: Path, tensors: dict[str, Tensor], state: TrainState) -> Path:
    """Writes RUN/step-NNNNNN, down to the disk, and returns it.

    Of a step that is there already, as after a stop before its validation, the whole tensors stay: a kill or a full
    disk would leave neither the old nor the new ones.
    """
    path = checkpoint_path(run_dir, state.step)
    temporary = run_dir / f".{path.name}.tmp"
    for left_over in run_dir.glob(".step-*.tmp"):  # of runs that were killed in a save
        shutil.rmtree(left_over, ignore_errors=True)
    record = dataclasses.asdict(state) | {
        "tensor_digests": {name: _tensor_digest(tensor) for name, tensor in tensors.items()}
    }
    text = json.dumps(record | {"digest": _record_digest(record)}, indent=1) + "\n"
    if path.exists() and _holds(path, record["tensor_digests"]):
        write_whole(path / STATE_NAME, text, mode=PRIVATE)
        return path
    temporary.mkdir(mode=0o700)
    with system_errors(temporary / TENSORS_NAME):
        save_file(tensors, temporary / TENSORS_NAME)
    sync(temporary / TENSORS_NAME)
    write_whole(temporary / STATE_NAME, text, mode=PRIVATE)
    shutil.rmtree(path, ignore_errors=True)  # one that was damaged, and passed over
    os.replace(temporary, path)
    sync(run_dir)
    return path


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Returns where the checkpoint of a step lies."""
    return run_dir / f"step-{step:06d}"


def prune_checkpoints(run_dir: Path, step: int, keep_last: int, keep_best: int) -> None:
    """Removes all checkpoints up to a step but the last ones of them and those with the highest held-out tau.

    Later ones were damaged, and passed over when the run went on from before them: none of them counts as kept.
    """
    paths = [path for path in _step_paths(run_dir) if _step_of(path) <= step]
    taus = {path: tau for path in paths if (tau := _own_tau(path)) is not None}
    best = sorted(taus, key=lambda path: (-taus[path], _step_of(path)))[:keep_best]
    for path in paths[: max(0, len(paths) - keep_last)]:
        if path not in best:
            shutil.rmtree(path)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Returns the last whole checkpoint of a run; a damaged one is passed over with a word that says what is damaged.

    All its bytes are read: those of a head of 2 B parameters are 23 GB.
    """
    for path in reversed(_step_paths(run_dir)):
        try:
            return read_checkpoint(path)
        except UNREADABLE as error:
            logger.warning("checkpoint %s is passed over, it is not whole: %s", path, error)
    return None


def _holds(path: Path, digests: dict[str, str]) -> bool:
    """Tells whether a checkpoint is whole, with these tensors."""
    try:
        read_checkpoint(path)
        held: dict[str, str] = json.loads((path / STATE_NAME).read_text())["tensor_digests"]
    except UNREADABLE:
        return False
    return held == digests


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint and compares every byte with what was written.

    Raises:
        one of UNREADABLE: it is not whole.
    """
    record = json.loads((path / STATE_NAME).read_text())
    if record.pop("digest") != _record_digest(record):
        raise ValueError(f"{STATE_NAME} is not what was written")
    digests = record.pop("tensor_digests")
    state = TrainState(**{**record, "position": Position(**record["position"])})
    with safe_open(path / TENSORS_NAME, framework="pt") as tensors:  # notices a file that was cut short
        if sorted(tensors.keys()) != sorted(digests):
            raise ValueError(f"{TENSORS_NAME} does not hold the tensors that were written")
        damaged = [name for name in digests if _tensor_digest(tensors.get_tensor(name)) != digests[name]]
    if damaged:
        raise ValueError(f"{', '.join(damaged)} in {TENSORS_NAME} are not what was written")
    return Checkpoint(path, state)


def check_same_run(checkpoint: Checkpoint, state: TrainState) -> None:
    """Refuses to go on with other maths or other data.

    Raises:
        UserError: names each setting that differs, and the store, with both values.
    """
    saved = checkpoint.state
    problems = [
        f"  {name} must be {saved.maths.get(name)!r}, got {state.maths.get(name)!r}"
        for name in sorted(saved.maths.keys() | state.maths.keys())
        if saved.maths.get(name) != state.maths.get(name)
    ]
    if saved.store_digest != state.store_digest:
        problems.append(f"  the store's digest must be {saved.store_digest}, got {state.store_digest}")
    if problems:
        raise UserError(
            f"a run goes on only with the settings and the store it was begun with ({checkpoint.path}):\n"
            + "\n".join(problems)
            + "\nuse those, or start anew with run.resume=never"
        )


def _tensor_digest(tensor: Tensor) -> str:
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _record_digest(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def _own_tau(path: Path) -> float | None:
    """Returns the held-out tau of a checkpoint's own step; None if it was not validated, or cannot be read."""
    try:
        record = json.loads((path / STATE_NAME).read_text())
        return float(record["tau"]) if record["validated_step"] == record["step"] > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _step_of(path: Path) -> int:
    match = STEP_PATTERN.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _step_paths(run_dir: Path) -> list[Path]:
    return sorted((path for path in run_dir.glob("step-*") if STEP_PATTERN.fullmatch(path.name)), key=_step_of)
