"""Short runs for the tests of the trainer: their settings, what they leave, and how two of them are compared."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from tiny_training import tiny_config, write_target_and_store
from torch import Tensor

from eagle3.config import TrainConfig, config_to_dict

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("launched_training.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
STEPS = 6
EXACT = ("step", "loss", "grad_norm", "learning_rate", "held_out/tau")  # of a line of metrics: no times

# fp32 sums in another order, of each tensor's largest element: 2e-6 was the most that six steps made of it.
TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-6  # relative; 1e-7 was seen


def six_steps(directory: Path) -> TrainConfig:
    """Writes a target and a store; returns settings of six steps, of five samples of 14 to 20 tokens each."""
    target, store = write_target_and_store(directory)
    config = tiny_config(store, target, directory / "run")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.6))
    return with_run(config, max_steps=STEPS, save_every=3, validate_every=3, keep_last=9)


def with_run(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


def with_batch_tokens(config: TrainConfig, batch_tokens: int) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_tokens=batch_tokens))


def state_of(run_dir: Path, step: int = STEPS) -> dict[str, Tensor]:
    with safe_open(run_dir / f"step-{step:06d}" / "state.safetensors", framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no dict


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(run_dir: Path, reference: Path) -> None:
    """Compares masters, moments, and every loss and tau of two runs."""
    state, wanted = state_of(run_dir), state_of(reference)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = float((state[name] - tensor).abs().max() / tensor.abs().max())
        assert difference < TOLERANCE, (name, difference)
    for line, wanted_line in zip(metrics_of(run_dir), metrics_of(reference), strict=True):
        assert line.keys() == wanted_line.keys()
        for name in ("step", "loss", "grad_norm", "held_out/loss", "held_out/tau"):
            if name in wanted_line:
                assert line[name] == pytest.approx(wanted_line[name], rel=LOSS_TOLERANCE), (line["step"], name)


def assert_same_bits(run_dir: Path, reference: Path, step: int = STEPS) -> None:
    """Compares the state after the last step, and the exported drafter."""
    state, wanted = state_of(run_dir, step), state_of(reference, step)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    exported = [path / "drafter" / "model.safetensors" for path in (run_dir, reference)]
    assert exported[0].read_bytes() == exported[1].read_bytes()


def launch(
    command: list[str], config: TrainConfig, directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command on `config`, which CONFIG among the arguments stands for."""
    directory.mkdir(exist_ok=True)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(config)))
    own = f"{ROOT}:{WORKER.parent}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": own, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *(str(path) if each == "CONFIG" else each for each in arguments)],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def launch_worker(command: list[str], config: TrainConfig, directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs launched_training.py and returns each rank's facts."""
    done = launch([*command, str(WORKER)], config, directory, "CONFIG", str(directory), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]
