"""Resumable state.

RUN/step-000100/ holds `state.safetensors` (fp32 masters and moments, whole tensors under the drafter's names) and
`state.json`. It appears whole or not at all, and any world size, DDP or DeepSpeed, goes on from it.
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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config import TrainConfig, UserError, config_to_dict
from eagle3.features.store import FeatureStore, digest_store
from eagle3.files import PRIVATE, sync, write_whole
from eagle3.training.batches import Position

logger = logging.getLogger(__name__)

STATE_NAME = "state.json"
TENSORS_NAME = "state.safetensors"
STEP_PATTERN = re.compile(r"step-(\d{6,})")

# Settings that say where a run goes on, what it is called and how its samples are cut up; the others are the maths.
FREE_SETTINGS = {
    "target", "tracking", "data.path", "data.batch_tokens", "data.read_threads", "data.prefetch_steps",
    "data.cache_bytes",
    "run.dir", "run.resume", "run.save_every", "run.validate_every", "run.log_every", "run.keep_last",
    "run.deepspeed", "run.deterministic",
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: TrainState

    def open_tensors(self) -> Any:
        """Opens the tensors for a `with` block, mapped: nothing is read before it is asked for."""
        return safe_open(self.path / TENSORS_NAME, framework="pt")


def initial_state(config: TrainConfig, store: FeatureStore) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(maths=maths_of(config), store_digest=digest_store(store))


def maths_of(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a resumed run must share, by dotted name."""
    flat = _flatten(config_to_dict(config))
    return {name: value for name, value in flat.items() if not {name, name.split(".")[0]} & FREE_SETTINGS}


def save_checkpoint(run_dir: Path, tensors: dict[str, Tensor], state: TrainState) -> Path:
    """Writes RUN/step-NNNNNN, down to the disk, and returns it."""
    path = run_dir / f"step-{state.step:06d}"
    temporary = run_dir / f".{path.name}.tmp"
    for left_over in (path, temporary):  # of a run that was killed, or damaged and passed over
        shutil.rmtree(left_over, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    save_file(tensors, temporary / TENSORS_NAME)
    sync(temporary / TENSORS_NAME)
    write_whole(temporary / STATE_NAME, json.dumps(dataclasses.asdict(state), indent=1) + "\n", mode=PRIVATE)
    os.replace(temporary, path)
    sync(run_dir)
    return path


def prune_checkpoints(run_dir: Path, keep_last: int, best_step: int | None) -> None:
    """Removes all but the last checkpoints and the best one."""
    paths = _step_paths(run_dir)
    for path in paths[: max(0, len(paths) - keep_last)]:
        if _step_of(path) != best_step:
            shutil.rmtree(path)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Returns the last whole checkpoint of a run; a damaged one is passed over with a word."""
    for path in reversed(_step_paths(run_dir)):
        try:
            values = json.loads((path / STATE_NAME).read_text())
            state = TrainState(**{**values, "position": Position(**values["position"])})
            with safe_open(path / TENSORS_NAME, framework="pt") as tensors:  # notices a file that was cut short
                assert tensors.keys()
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            logger.warning("checkpoint %s is passed over, it is not whole: %s", path, error)
            continue
        return Checkpoint(path, state)
    return None


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


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _step_of(path: Path) -> int:
    match = STEP_PATTERN.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _step_paths(run_dir: Path) -> list[Path]:
    return sorted((path for path in run_dir.glob("step-*") if STEP_PATTERN.fullmatch(path.name)), key=_step_of)
