"""What a training is said to take is what it then has, and reads, and writes."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors import safe_open
from tiny_training import overrides
from training_runs import six_steps, with_run

from eagle3.commands import plan as plan_command
from eagle3.config import TrainConfig, UserError
from eagle3.features.store import FeatureStore
from eagle3.training import planning
from eagle3.training.batches import Batches, Position
from eagle3.training.checkpoints import prune_checkpoints
from eagle3.training.inputs import load_inputs
from eagle3.training.memory import GIB
from eagle3.training.planning import TrainingPlan, read_training_plan
from eagle3.training.sequence_split import Ranks
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
    num_rows = inputs.drafter.lm_head.weight.shape[0] + (0 if embeddings == "host" else 320)  # of head and embedding
    plan = plan_of(config)
    assert plan.memory.target == 4 * (num_rows + 1) * inputs.drafter.config.hidden_size  # fp32, with the norm
    assert plan.memory.total < plan.all_supervised.total
    assert plan.least_memory.total <= plan.all_supervised.total


@pytest.mark.parametrize(("num_gpus", "batch_tokens"), [(1, 1000), (2, 20), (4, 16), (8, 1000)])
def test_time_is_that_of_the_rank_that_has_most_in_each_step(
    base: TrainConfig, num_gpus: int, batch_tokens: int
) -> None:
    data = dataclasses.replace(base.data, batch_tokens=batch_tokens)
    config = dataclasses.replace(base, data=data)
    inputs = load_inputs(config)
    ranks = [
        Batches(inputs.store, inputs.train_indices, data, Ranks(rank, num_gpus, None), base.objective.ttt_steps)
        for rank in range(num_gpus)
    ]
    most = total = 0
    for position in itertools.islice(ranks[0].positions(Position()), ranks[0].steps_per_epoch):
        batches = [each.load(position) for each in ranks]
        packs = [batch.packs[: len(batch.packs) - batch.has_filler] for batch in batches]
        most += max(sum(pack.tokens.loss_mask.numel() for pack in own) for own in packs)
        total += batches[0].num_tokens
    plan = plan_of(config, num_gpus)
    assert plan.slowest == pytest.approx(most * num_gpus / total)
    assert plan.seconds == pytest.approx(plan.flops * most / total / (0.6 * 989e12))


def test_samples_that_are_split_leave_nobody_waiting(base: TrainConfig) -> None:
    data = dataclasses.replace(base.data, batch_tokens=5, split_sequences=True)
    assert plan_of(dataclasses.replace(base, data=data), num_gpus=2).slowest == pytest.approx(1)


def test_ranks_share_what_zero_shards(base: TrainConfig) -> None:
    sharded = with_run(base, deepspeed="zero1")
    alone, eight = plan_of(sharded), plan_of(sharded, num_gpus=8)
    assert eight.memory.optimizer == alone.memory.optimizer // 8
    assert str(eight.setup) == "DeepSpeed ZeRO-1 over 8 ranks"
    assert str(plan_of(base, num_gpus=8).setup) == "DDP over 8 ranks"


@pytest.mark.parametrize(("steps", "save_every"), [(1, 3), (6, 3), (6, 1)])
def test_a_run_has_at_most_what_the_disk_is_asked_for(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, save_every: int
) -> None:
    config = with_run(base, dir=str(tmp_path / "run"), max_steps=steps, save_every=save_every, keep_last=1, keep_best=1)
    plan = plan_of(config)
    seen = []  # bytes in the run's directory, whenever a checkpoint has its name and the oldest is still there

    def weigh_and_prune(run_dir: Path, *arguments: Any) -> None:
        seen.append(sum(path.stat().st_size for path in run_dir.rglob("*.safetensors")))
        prune_checkpoints(run_dir, *arguments)

    monkeypatch.setattr("eagle3.training.saves.prune_checkpoints", weigh_and_prune)
    train(config)
    assert len(seen) >= -(-steps // save_every)
    # Headers of files, and the drafter's map of tokens, are much of so small ones.
    assert max(seen) <= plan.disk_bytes + 20_000 * (plan.num_checkpoints + 1)
    for free, fits in ((plan.disk_bytes, True), (plan.disk_bytes - 1, False)):
        usage = shutil.disk_usage("/")._replace(free=free)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            planned = plan_of(config)
        if fits:
            planned.check()
        else:
            with pytest.raises(UserError, match=r"checkpoints must fit the free .* of the disk, got .*run.keep_last"):
                planned.check()


def test_the_command_says_it_and_runs_nothing(base: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--training", "drafter.yaml", "--gpus", "4", *overrides(with_run(base, deepspeed="zero2"))]
    assert plan_command.main(argv) == 0
    plan = plan_of(with_run(base, deepspeed="zero2"), num_gpus=4)
    said = capsys.readouterr().out
    assert said == f"{plan}\n"
    assert f"plan: {plan.num_samples} samples of {plan.num_tokens} tokens" in said
    assert f"memory of each GPU: {plan.memory.total / GIB:.1f} GiB" in said
    assert "time: at least 0:00:00 of steps, if H200 reaches 60% of its limit, as heads" in said
    assert not Path(base.run.dir).exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--training", "drafter.yaml", "--gpus", "0", "--gpu", "TPU"],
            r"--gpus must be from 1 to 4096, got 0\n  --gpu must have one of H200, .* in its name, got 'TPU'",
        ),
        (["--training", "drafter.yaml", "--prompts", "p.jsonl"], r"--prompts and --config must go with an extraction"),
        (["--training", "drafter.yaml", "--config", "demo.yaml"], r"--prompts and --config must go with an extraction"),
        (
            ["--training", "drafter.yaml", "run.dir=README.md/run"],
            r"run.dir must be in a directory that can be written",
        ),
        (["--training", "drafter.yaml", "--gpu", ""], r"--gpu must have one of .*, got ''"),
        (["--gpus", "4"], r"--gpus and --gpu must come with --training"),
        (["--training", "none.yaml"], r"--training must be a file, got 'none.yaml'"),
        (["--training", "drafter.yaml", "data.path=live.yaml"], r"data.path must be a store, got live.yaml"),
    ],
)
def test_what_cannot_be_planned_is_said(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_command.main(argv)
