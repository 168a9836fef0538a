"""On two GPUs a killed run ends bit for bit as an undisturbed one."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from tiny_training import tiny_config, write_target_and_store
from torch import Tensor

from eagle3.config import TrainConfig, config_to_dict

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def launch(config: TrainConfig, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Trains on two GPUs."""
    directory.mkdir(exist_ok=True)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(config)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}:{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.run(
        [*command, str(TESTS / "launched_training.py"), str(path), str(directory), *arguments],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def state_of(run_dir: Path) -> dict[str, Tensor]:
    with safe_open(run_dir / "step-000010" / "state.safetensors", framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no dict


@pytest.mark.parametrize("deepspeed", [None, "zero2"])
def test_a_killed_run_ends_bit_for_bit_as_an_undisturbed_one(tmp_path: Path, deepspeed: str | None) -> None:
    target, store = write_target_and_store(tmp_path)
    config = tiny_config(store, target, tmp_path / "whole")
    run = dataclasses.replace(
        config.run, mixed_precision="bf16", deterministic=True, deepspeed=deepspeed, validate_every=10
    )
    config = dataclasses.replace(
        config,
        run=run,
        target=dataclasses.replace(config.target, device="cuda", dtype="bfloat16"),
        data=dataclasses.replace(config.data, batch_tokens=20),
        draft=dataclasses.replace(config.draft, head_dim=64),  # as the kernels of a GPU know it
    )
    whole = launch(config, tmp_path / "whole-facts")
    assert whole.returncode == 0, whole.stderr[-4000:]
    config = dataclasses.replace(config, run=dataclasses.replace(run, dir=str(tmp_path / "killed"), resume="auto"))
    send = ["--send", str(int(signal.SIGKILL)), "1", "8", "--micro-step", "2"]
    killed = launch(config, tmp_path / "facts", *send)
    assert killed.returncode == 1, killed.stderr[-4000:]
    resumed = launch(config, tmp_path / "facts")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    facts = json.loads((tmp_path / "facts" / "rank0.json").read_text())
    assert facts["num_steps"] == 5
    state, wanted = state_of(tmp_path / "killed"), state_of(tmp_path / "whole")
    differing = [name for name in wanted if not torch.equal(state[name], wanted[name])]
    assert not differing
