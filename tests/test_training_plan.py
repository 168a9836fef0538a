"""What a training is said to take is what it then has, and reads, and writes."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from tiny_training import overrides
from training_runs import six_steps, with_run

from eagle3.commands import plan as plan_command
from eagle3.config import TrainConfig, UserError
from eagle3.features.store import FeatureStore
from eagle3.training import planning
from eagle3.training.inputs import device_weights, load_inputs
from eagle3.training.memory import GIB
from eagle3.training.planning import TrainingPlan, read_training_plan
from eagle3.training.trainer import train
from eagle3.training.work import step_flops


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return six_steps(tmp_path_factory.mktemp("training"))


def plan_of(config: TrainConfig, num_gpus: int = 1) -> TrainingPlan:
    return read_training_plan(config, num_gpus=num_gpus, gpu="H200")


def rows_and_keys(masks: list[list[bool]], ttt_steps: int) -> tuple[list[int], int]:
    """Counts by the definition: row t drafts x[t+2+k], if it and all supervised tokens from t+1 on belong together."""
    num_rows, num_keys = [0] * ttt_steps, 0
    for mask in masks:
        for row in range(len(mask)):
            for step in range(ttt_steps):
                drafted = mask[row + 1 : row + 3 + step]
                if len(drafted) == 2 + step and all(drafted):
                    num_rows[step] += 1
                    num_keys += row + 1
    return num_rows, num_keys


@pytest.mark.parametrize("counted_samples", [2000, 5])
def test_it_is_what_the_training_does(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted_samples: int
) -> None:
    monkeypatch.setattr(planning, "COUNTED_SAMPLES", counted_samples)
    plan, inputs = plan_of(base), load_inputs(base)
    store = FeatureStore(base.data.path)
    masks = [store[index].loss_mask.tolist() for index in inputs.train_indices]
    assert plan.num_samples == len(masks)
    assert plan.num_held_out == len(inputs.held_out_indices)
    assert plan.num_tokens == sum(map(len, masks))
    assert plan.num_supervised == sum(map(sum, masks))
    assert plan.num_parameters == sum(each.numel() for each in inputs.drafter.parameters() if each.requires_grad)
    assert (plan.num_steps, plan.steps_per_epoch) == (6, -(-len(masks) // 5))
    num_rows, num_keys = rows_and_keys(masks, base.objective.ttt_steps)
    assert num_rows[-1] > 0
    epochs = plan.num_steps / plan.steps_per_epoch
    flops = epochs * step_flops(inputs.drafter.config, plan.num_tokens, num_rows, num_keys)
    # Of the lengths and answers that come in turns, every fifth sample has as many as all.
    assert plan.flops == pytest.approx(flops, rel=1e-12 if counted_samples == 2000 else 0.1)


@pytest.mark.parametrize("ema_decay", [None, 0.6])
def test_a_checkpoint_has_the_bytes_that_are_planned(
    base: TrainConfig, tmp_path: Path, ema_decay: float | None
) -> None:
    config = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, ema_decay=ema_decay))
    config = with_run(config, dir=str(tmp_path / "run"), max_steps=1)
    plan = plan_of(config)
    with safe_open(train(config) / "step-000001" / "state.safetensors", framework="pt") as tensors:
        num_bytes = sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 - no dict
    assert plan.checkpoint_bytes == num_bytes


@pytest.mark.parametrize("embeddings", ["device", "host"])
def test_memory_counts_the_weights_that_a_device_gets(base: TrainConfig, embeddings: Literal["device", "host"]) -> None:
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, embeddings=embeddings))
    inputs = load_inputs(config)
    kept = device_weights(inputs.target, inputs.drafter.target_ids, config.data.embeddings)
    tensors = {id(each): each.to(torch.float32) for each in (kept.embed_tokens, kept.lm_head, kept.norm)}
    plan = plan_of(config)
    assert plan.memory.target == sum(each.nbytes for each in tensors.values())
    assert plan.least_memory.total < plan.memory.total


def test_more_gpus_take_less_time_and_less_memory_each(base: TrainConfig) -> None:
    sharded = with_run(base, deepspeed="zero1")
    alone, eight = plan_of(sharded), plan_of(sharded, num_gpus=8)
    assert eight.seconds == pytest.approx(alone.seconds / 8)
    assert eight.memory.optimizer == alone.memory.optimizer // 8
    assert str(eight.setup) == "DeepSpeed ZeRO-1 over 8 ranks"
    assert str(plan_of(base, num_gpus=8).setup) == "DDP over 8 ranks"


def test_checkpoints_that_would_fill_the_disk_are_refused(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = plan_of(base).checkpoint_bytes * (base.run.keep_last + base.run.keep_best + 1)
    for free, fits in ((needed, True), (needed - 1, False)):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if fits:
            plan_of(base).check()
        else:
            with pytest.raises(UserError, match=r"checkpoints must fit the free .* of the disk, got .*run.keep_last"):
                plan_of(base).check()


def test_the_command_says_it_and_runs_nothing(base: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--training", "drafter.yaml", "--gpus", "4", *overrides(with_run(base, deepspeed="zero2"))]
    assert plan_command.main(argv) == 0
    plan = plan_of(with_run(base, deepspeed="zero2"), num_gpus=4)
    said = capsys.readouterr().out
    assert said == f"{plan}\n"
    assert f"plan: {plan.num_samples} samples of {plan.num_tokens} tokens" in said
    assert f"memory of each GPU: {plan.memory.total / GIB:.1f} GiB" in said
    assert re.search(r"time: 0:00:00 of steps if H200s reach 60% of their limit, as heads", said)
    assert not Path(base.run.dir).exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--training", "drafter.yaml", "--gpus", "0", "--gpu", "TPU"],
            r"at least 1, got 0\n  --gpu must be one of H200",
        ),
        (["--training", "drafter.yaml", "--prompts", "p.jsonl"], r"--prompts and --config must go with an extraction"),
        (["--training", "drafter.yaml", "--config", "demo.yaml"], r"--prompts and --config must go with an extraction"),
        (["--gpus", "4"], r"--gpus and --gpu must come with --training"),
        (["--training", "none.yaml"], r"--training must be a file, got 'none.yaml'"),
        (["--training", "drafter.yaml", "data.path=live.yaml"], r"must have a store to be planned, got data.path=live"),
    ],
)
def test_what_cannot_be_planned_is_said(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_command.main(argv)
