"""Whole checkpoints or none, and refusals that name what differs."""

import dataclasses
import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_training import tiny_config, write_target_and_store

from eagle3.config import DeepSpeedFile, OptimizerConfig, RunConfig, TrainConfig, UserError
from eagle3.features.store import FeatureStore, digest_store
from eagle3.training import checkpoints
from eagle3.training.batches import Position
from eagle3.training.checkpoints import (
    STATE_NAME,
    TENSORS_NAME,
    TrainState,
    check_same_run,
    initial_state,
    maths_of,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

CONFIG = tiny_config(Path("store"), Path("target"), Path("run"))
STATE = TrainState(maths=maths_of(CONFIG), store_digest="d0", step=100, position=Position(2, 15), best_tau=1.0 / 3)
TENSORS = {"master.fc.weight": torch.arange(6.0).view(2, 3), "exp_avg.fc.weight": torch.full((2, 3), 1e-20)}


def at(step: int) -> TrainState:
    return dataclasses.replace(STATE, step=step)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, TENSORS, STATE)
    assert path == tmp_path / "step-000100"
    assert [each.name for each in tmp_path.iterdir()] == ["step-000100"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == STATE
    with found.open_tensors() as tensors:
        assert all(torch.equal(tensors.get_tensor(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("damage", ["cut tensors", "no tensors", "cut state", "no state", "temporary"])
def test_a_half_written_checkpoint_is_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, TENSORS, at(100))
    path = save_checkpoint(tmp_path, TENSORS, at(200))
    name = TENSORS_NAME if "tensors" in damage else STATE_NAME
    if damage.startswith("cut"):
        (path / name).write_bytes((path / name).read_bytes()[:-10])
    elif damage == "temporary":
        path.rename(tmp_path / ".step-000200.tmp")
    else:
        (path / name).unlink()
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 100
    assert damage == "temporary" or "step-000200 is passed over, it is not whole" in caplog.text
    save_checkpoint(tmp_path, TENSORS, at(200))  # the step is reached again
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 200
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000100", "step-000200"]


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        (TENSORS_NAME, "exp_avg.fc.weight in state.safetensors are not what was written"),
        (STATE_NAME, "state.json is not"),
    ],
)
def test_a_flipped_byte_is_refused_by_name(
    tmp_path: Path, name: str, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, TENSORS, at(100))
    path = save_checkpoint(tmp_path, TENSORS, at(200)) / name
    content = bytearray(path.read_bytes())
    # The tensors lie in the order of their names, the state's step is one of its digits.
    place = content.index(b"200") if name == STATE_NAME else len(content) - 25
    content[place] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 100
    assert f"step-000200 is passed over, it is not whole: {damaged}" in caplog.text


def test_tensors_that_are_not_those_of_the_state_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_checkpoint(tmp_path, TENSORS, STATE)
    save_file({"master.fc.weight": TENSORS["master.fc.weight"]}, path / TENSORS_NAME)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) is None
    assert "state.safetensors does not hold the tensors that were written" in caplog.text


def test_what_killed_saves_left_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".step-000300.tmp").mkdir()
    save_checkpoint(tmp_path, TENSORS, STATE)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000100"]


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    taus = {5: 1.5, 10: 1.7, 15: 1.6, 20: 1.7, 1_000_000: None}
    for step, tau in taus.items():
        # At 20 the tau is that of a step before.
        state = dataclasses.replace(at(step), tau=tau, validated_step=step if step != 20 else 18)
        save_checkpoint(tmp_path, TENSORS, state)
    (tmp_path / "step-000015" / STATE_NAME).write_text("{")  # no tau, but a name
    prune_checkpoints(tmp_path, 1_000_000, keep_last=2, keep_best=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000010", "step-000020", "step-1000000"]
    assert newest_checkpoint(tmp_path) is not None


def test_a_damaged_checkpoint_that_was_passed_over_takes_no_place(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, TENSORS, dataclasses.replace(at(step), tau=2.0, validated_step=step))
    (tmp_path / "step-000010" / TENSORS_NAME).write_bytes(b"")
    save_checkpoint(tmp_path, TENSORS, dataclasses.replace(at(7), tau=1.0, validated_step=7))
    prune_checkpoints(tmp_path, 7, keep_last=1, keep_best=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000005", "step-000007", "step-000010"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 7
    for step in (10, 11):  # it is written again, and counts
        save_checkpoint(tmp_path, TENSORS, at(step))
    prune_checkpoints(tmp_path, 11, keep_last=2, keep_best=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000005", "step-000010", "step-000011"]


def test_a_step_that_is_saved_again_is_never_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stop before its validation: with a full disk, or a kill, the checkpoint is still there."""

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = save_checkpoint(tmp_path, TENSORS, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", fail)
        assert save_checkpoint(tmp_path, TENSORS, dataclasses.replace(STATE, tau=1.9)) == path
        found = newest_checkpoint(tmp_path)
        assert found is not None
        assert found.state.tau == 1.9
        others = {name: tensor + 1 for name, tensor in TENSORS.items()}
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, others, STATE)
        assert newest_checkpoint(tmp_path) == found
    save_checkpoint(tmp_path, others, STATE)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    with found.open_tensors() as tensors:
        assert torch.equal(tensors.get_tensor("master.fc.weight"), others["master.fc.weight"])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def resumed_with(config: TrainConfig, tmp_path: Path, store_digest: str = "d0") -> None:
    save_checkpoint(tmp_path, TENSORS, STATE)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    check_same_run(found, TrainState(maths=maths_of(config), store_digest=store_digest))


def test_other_maths_are_refused_by_name(tmp_path: Path) -> None:
    changed = dataclasses.replace(
        CONFIG,
        optimizer=OptimizerConfig(learning_rate=3e-4, weight_decay=0.01),
        data=dataclasses.replace(CONFIG.data, samples_per_step=6),
    )
    with pytest.raises(UserError) as caught:
        resumed_with(changed, tmp_path)
    message = str(caught.value)
    assert "optimizer.learning_rate must be 0.01, got 0.0003" in message
    assert "data.samples_per_step must be 5, got 6" in message
    assert "run.resume=never" in message
    assert "weight_decay" not in message


def test_another_store_is_refused_by_digest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the store's digest must be d0, got d1"):
        resumed_with(CONFIG, tmp_path, store_digest="d1")


def test_what_does_not_change_the_maths_may_change(tmp_path: Path) -> None:
    run = RunConfig(
        dir="elsewhere", resume="auto", epochs=10, max_steps=10, save_every=1, validate_every=2, log_every=3,
        keep_last=4, keep_best=2, patience=3, stop_after=1.0, mixed_precision="no", deepspeed=DeepSpeedFile("zero2"),
        deterministic=True,
    )  # fmt: skip
    data = dataclasses.replace(CONFIG.data, path="moved", batch_tokens=17)
    target = dataclasses.replace(CONFIG.target, path="moved", device="auto", capture_layers=None)
    resumed_with(dataclasses.replace(CONFIG, run=run, data=data, target=target), tmp_path)


def test_another_dtype_of_the_target_is_refused(tmp_path: Path) -> None:
    """Its head makes what the drafter is scored against."""
    target = dataclasses.replace(CONFIG.target, dtype="bfloat16")
    with pytest.raises(UserError, match=r"target\.dtype must be 'float32', got 'bfloat16'"):
        resumed_with(dataclasses.replace(CONFIG, target=target), tmp_path)


def test_a_store_has_another_digest_once_it_grows(tmp_path: Path) -> None:
    target, path = write_target_and_store(tmp_path)
    store = FeatureStore(path)
    digest = digest_store(store)
    assert initial_state(tiny_config(path, target, tmp_path / "run"), store).store_digest == digest
    assert digest_store(FeatureStore(path)) == digest
    store.entries = store.entries[:-1]
    assert digest_store(store) != digest


def test_state_is_readable_json(tmp_path: Path) -> None:
    values = json.loads((save_checkpoint(tmp_path, TENSORS, STATE) / STATE_NAME).read_text())
    assert values["step"] == 100
    assert values["position"] == {"epoch": 2, "num_taken": 15}
    assert values["maths"]["optimizer.learning_rate"] == 0.01
