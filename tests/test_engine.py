"""Masters are fp32, states come and go whole, and a gradient that is not finite changes nothing."""

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.progress import Progress
from tiny_training import tiny_config, write_target_and_store

from eagle3.config import DataConfig, TrainConfig, UserError
from eagle3.draft.layer import finish
from eagle3.features.store import FeatureStore
from eagle3.training.batches import Batches, Position, StepBatch
from eagle3.training.distributed import World, start
from eagle3.training.engine import Engine, TTTModule
from eagle3.training.inputs import Inputs, load_inputs
from eagle3.training.memory import MemoryPlan
from eagle3.training.normalisers import add_normalisers
from eagle3.training.optimizer_step import count_attended, take_step
from eagle3.training.packs import CodedPack, PackReader
from eagle3.training.sequence_split import Ranks
from eagle3.training.stopping import StopSignal
from eagle3.training.validation import Validation, validate
from eagle3.training.watch import Watch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    directory = tmp_path_factory.mktemp("engine")
    target, store = write_target_and_store(directory)
    return tiny_config(store, target, directory / "run")


def make_engine(config: TrainConfig, *, bf16: bool = False) -> tuple[Engine, Inputs, StepBatch]:
    inputs = load_inputs(config)
    accelerator, world = start(config)
    add_normalisers(inputs.store, inputs.train_indices + inputs.held_out_indices, inputs.target, world, torch.float32)
    target = inputs.target.to(world.device, torch.bfloat16 if bf16 else torch.float32)
    engine = Engine(config, accelerator, world, TTTModule(inputs.drafter, target, config.objective, bf16))
    batch = Batches(inputs.store, inputs.train_indices, config.data, Ranks(0, 1, None), 3).load(Position())
    return engine, inputs, batch


@pytest.mark.parametrize("bf16", [False, True])
def test_masters_and_moments_are_fp32(base: TrainConfig, bf16: bool) -> None:
    engine, _, batch = make_engine(base, bf16=bf16)
    result = take_step(engine, batch, learning_rate=1e-3)
    assert math.isfinite(result.grad_norm)
    state = engine.read_state()
    names = [name for name, _ in engine.module.drafter.named_parameters()]
    assert sorted(state) == sorted(f"{kind}.{name}" for kind in ("master", "exp_avg", "exp_avg_sq") for name in names)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_masters_in_bf16_are_refused(base: TrainConfig) -> None:
    inputs = load_inputs(base)
    accelerator, world = start(base)
    module = TTTModule(inputs.drafter.bfloat16(), inputs.target, base.objective, bf16=True)
    with pytest.raises(AssertionError, match=r"master weights must be fp32, got \{torch\.bfloat16\}"):
        Engine(base, accelerator, world, module)


@pytest.mark.parametrize("drop_rejected", [False, True])
@pytest.mark.parametrize("has_room", [True, False])
def test_what_is_made_again_is_the_same(
    base: TrainConfig, has_room: bool, drop_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plan finds no room, gate and up of every step come from a product that is multiplied twice."""
    objective = dataclasses.replace(base.objective, drop_rejected=drop_rejected)
    config = dataclasses.replace(base, objective=objective)
    products: list[bool] = []
    losses, states = [], []

    def noted(*args: Any, recompute: bool) -> Any:
        products.append(recompute)
        return finish(*args, recompute=recompute)

    monkeypatch.setattr("eagle3.draft.ttt.finish", noted)
    for is_planned in (False, True):
        engine, inputs, batch = make_engine(config)
        if is_planned:
            steps = objective.ttt_steps
            capacity = 2**40 if has_room else 0
            plan = MemoryPlan(inputs.drafter.config, engine.setup, steps, target_bytes=0, capacity=capacity)
            engine.module.memory_plan = plan
        products.clear()
        losses.append(take_step(engine, batch, learning_rate=1e-3).sums.loss(objective))
        states.append(engine.read_state())
    assert set(products) == {not has_room}
    assert losses[0] == losses[1]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("are_right", [True, False])
def test_rows_that_leave_attend_to_nothing(base: TrainConfig, are_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the work that is logged would be that of all rows."""
    monkeypatch.setattr(
        "eagle3.draft.objective._is_right", lambda chosen, recorded: torch.full_like(chosen, are_right).bool()
    )
    steps = base.objective.ttt_steps
    engine, _, batch = make_engine(
        dataclasses.replace(base, objective=dataclasses.replace(base.objective, drop_rejected=True))
    )
    attended = count_attended([each.tokens for each in batch.packs], steps)
    assert attended[1] > 0
    result = take_step(engine, batch, learning_rate=1e-3)
    assert result.num_attended == float(attended.sum() if are_right else attended[0])


def test_held_out_rows_stay_whatever_the_objective(base: TrainConfig) -> None:
    """So that runs can be compared by them."""
    found = []
    for drop_rejected in (False, True):
        objective = dataclasses.replace(base.objective, drop_rejected=drop_rejected)
        engine, _, batch = make_engine(dataclasses.replace(base, objective=objective))
        with torch.no_grad():
            _, sums = engine.module(batch.packs[0].decoded())
        found.append(sums)
    assert found[0][1, 1] > 0  # rows that are counted at the second step
    assert torch.equal(*found)


def test_small_updates_do_not_vanish_under_autocast(base: TrainConfig) -> None:
    engine, inputs, batch = make_engine(base, bf16=True)
    before = inputs.drafter.lm_head.weight.clone()
    take_step(engine, batch, learning_rate=1e-6)  # far below a bf16 step of weights near 0.1
    changed = inputs.drafter.lm_head.weight != before
    assert changed.float().mean() > 0.5


def test_a_state_goes_into_another_engine_bit_for_bit(base: TrainConfig) -> None:
    first, _, batch = make_engine(base)
    for _ in range(2):
        take_step(first, batch, learning_rate=1e-3)
    state = first.read_state()
    second, _, _ = make_engine(dataclasses.replace(base, run=dataclasses.replace(base.run, seed=5)))
    second.load_state(state.__getitem__, num_steps=2)
    for engine in (first, second):
        take_step(engine, batch, learning_rate=1e-3)
    ours, theirs = first.read_state(), second.read_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_gradient_that_is_not_finite_changes_nothing(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inputs, batch = make_engine(base)
    take_step(engine, batch, learning_rate=1e-3)
    before = engine.read_state()
    # A loss that is finite over a gradient that is not: only the head's gradient is spoilt.
    inputs.drafter.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(FloatingPointError, match=r"the gradient must be finite, got a norm of (nan|inf) though every"):
        take_step(engine, batch, learning_rate=1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.read_state().items())


def test_an_average_of_the_weights_takes_their_place_and_gives_it_back(base: TrainConfig) -> None:
    config = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, ema_decay=0.3))
    engine, inputs, batch = make_engine(config)
    plain, _, _ = make_engine(base)
    weight = inputs.drafter.lm_head.weight
    average = weight.detach().clone()
    for step in range(1, 8):
        for each in (engine, plain):
            take_step(each, batch, learning_rate=1e-2)
        kept = min(0.3, (1 + step) / (10 + step))
        average = kept * average + (1 - kept) * weight.detach()
    weights = weight.detach().clone()
    assert torch.equal(weights, plain.read_state()["master.lm_head.weight"])  # it does not change the training
    with engine.averaged_weights():
        torch.testing.assert_close(weight.detach(), average, rtol=1e-6, atol=1e-7)  # fp32, other order of operations
        assert not torch.equal(weight, weights)
    assert torch.equal(weight, weights)
    state = engine.read_state()
    assert 4 * sum(tensor.numel() for tensor in state.values()) == engine.state_bytes
    again, _, _ = make_engine(config)
    again.load_state(state.__getitem__, num_steps=7)
    for each in (engine, again):
        take_step(each, batch, learning_rate=1e-2)
    ours, theirs = engine.read_state(), again.read_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_optimizer_without_room_says_so(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, batch = make_engine(base)

    def fail(learning_rate: float) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine, "update", fail)
    with pytest.raises(UserError, match=r"the optimizer's state must fit the GPU, got CUDA out of memory.*zero2"):
        take_step(engine, batch, learning_rate=1e-3)


def validated(
    engine: Engine, inputs: Inputs, data: DataConfig, *, batch_tokens: int, step: int = 0
) -> Validation | None:
    return validate(
        engine, inputs.store, inputs.held_out_indices, data=dataclasses.replace(data, batch_tokens=batch_tokens),
        bars=Progress(disable=True), stop=StopSignal(), watch=Watch(engine.world, timeout=1.0), step=step,
    )  # fmt: skip


def test_a_validation_reads_with_as_many_threads_as_a_training(
    base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, inputs, _ = make_engine(base)
    threads: set[int] = set()
    read_into = FeatureStore.read_into

    def noted(*arguments: Any) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.01)  # so that the next sample needs another thread, if there may be one
        read_into(*arguments)

    monkeypatch.setattr(FeatureStore, "read_into", noted)
    validated(engine, inputs, dataclasses.replace(base.data, read_threads=1), batch_tokens=1000)
    assert len(threads) == 1


def test_a_validation_without_room_names_its_samples(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inputs, _ = make_engine(base)

    def fail(packed: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine.module, "forward", fail)
    with pytest.raises(UserError, match=r"in a validation a micro-batch must fit .*, got \d+ tokens .*'s\d+'"):
        validated(engine, inputs, base.data, batch_tokens=1000)


def test_a_held_out_sample_that_is_not_finite_gives_no_tau(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choices would be those among scores that cannot be compared, and the best checkpoint that by such a tau."""
    engine, inputs, _ = make_engine(base)
    victim = inputs.held_out_indices[1]
    read = PackReader.read

    def read_damaged(reader: PackReader, indices: Sequence[int]) -> CodedPack:
        pack = read(reader, indices)
        if victim in indices:
            pack.aux.codes[: pack.tokens.document_lengths[0]] = torch.nan
        return pack

    monkeypatch.setattr(PackReader, "read", read_damaged)
    name = inputs.store.entries[victim].sample_id
    with pytest.raises(FloatingPointError, match=rf"held-out loss must be finite, .* at step 7 \(samples '{name}'\);"):
        validated(engine, inputs, base.data, batch_tokens=20, step=7)


def test_ranks_begin_as_many_parts_of_a_validation(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the one with fewer samples would be taken for the one behind, whoever hangs later."""
    engine, inputs, _ = make_engine(base)
    indices = inputs.held_out_indices[:3]
    numbers = []
    for rank in range(2):
        monkeypatch.setattr(engine, "world", World(rank, 2, engine.world.device))
        begun: list[str] = []
        watch = Watch(engine.world, timeout=1.0)
        monkeypatch.setattr(watch, "at", lambda part, step, begun=begun: begun.append(part))
        validate(
            engine, inputs.store, indices, data=dataclasses.replace(base.data, batch_tokens=20),
            bars=Progress(disable=True), stop=StopSignal(), watch=watch, step=0,
        )  # fmt: skip
        numbers.append(len(begun))
    assert numbers == [2, 2]


def test_gradients_are_clipped_by_their_global_norm(base: TrainConfig) -> None:
    clipped = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, max_grad_norm=1e-3))
    norms, moments = [], []
    for config in (base, clipped):
        engine, _, batch = make_engine(config)
        norms.append(take_step(engine, batch, learning_rate=1e-3).grad_norm)
        state = engine.read_state()
        moments.append(math.sqrt(sum(float(t.square().sum()) for n, t in state.items() if n.startswith("exp_avg."))))
    assert norms[0] == norms[1] > 1  # what is logged is the norm before clipping
    # After one step the first moment is 0.1 of the clipped gradient. rtol: torch clips to max_norm / (norm + 1e-6).
    assert moments == pytest.approx([0.1, 0.1 * 1e-3], rel=1e-4)


def test_held_out_tau_does_not_depend_on_how_samples_are_packed(base: TrainConfig) -> None:
    engine, inputs, batch = make_engine(base)
    for _ in range(4):
        take_step(engine, batch, learning_rate=1e-2)
    found = []
    for batch_tokens in (20, 1000):
        validation = validated(engine, inputs, base.data, batch_tokens=batch_tokens)
        assert validation is not None
        found.append(validation)
    assert found[0].acceptance == found[1].acceptance
    assert found[0].acceptance.tau > 1.0
    # fp64 sums of fp32 rows that other kernels made of other shapes
    torch.testing.assert_close(found[0].sums.step_loss, found[1].sums.step_loss, rtol=1e-6, atol=0)
    assert torch.equal(found[0].sums.num_counted, found[1].sums.num_counted)
