"""What does not fit is named with what to try; a loss that jumps is noticed, and noise is not."""

import json
import logging
from pathlib import Path

import pytest
import torch
from conftest import random_sample
from draft_oracle import tiny_drafter

from eagle3.draft.ttt import pack
from eagle3.training.batches import Position, StepBatch
from eagle3.training.distributed import Setup
from eagle3.training.faults import (
    SPIKES_NAME,
    STOPPED_NAME,
    LossSpikes,
    keep_stopped,
    out_of_memory_message,
    tokens_to_try,
)
from eagle3.training.memory import MemoryPlan
from eagle3.training.packs import CodedPack

BATCH = StepBatch(
    packs=[], has_filler=False, sample_ids=[["a"], ["b", "c"]], num_tokens=9, num_supervised=5, next_position=Position()
)
PACK = CodedPack.of(pack([random_sample(name, [0] * 10 + [1] * 20) for name in ("a", "b")]))
REASON = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


def plan(capacity: int) -> MemoryPlan:
    return MemoryPlan(tiny_drafter().config, Setup(None, 1), ttt_steps=3, target_bytes=1000, capacity=capacity)


def test_what_does_not_fit_is_named_with_a_size_to_try() -> None:
    message = out_of_memory_message(PACK, None, 100, REASON)
    assert "got 60 tokens in 2 documents that do not, no estimate here" in message
    assert "(samples 'a', 'b'; CUDA out of memory. Tried to allocate 2.00 GiB.)" in message
    assert message.endswith("go on from the last checkpoint with run.resume=auto and data.batch_tokens=45")


def test_the_estimate_is_in_the_message() -> None:
    enough = plan(2**33)
    message = out_of_memory_message(PACK, enough, 100, REASON)
    assert f"estimated at {enough.estimate(60, 40)} of 8.0 GiB" in message


def test_a_sample_of_its_own_is_split_rather_than_made_smaller() -> None:
    long = CodedPack.of(pack([random_sample("a", [0] * 10 + [1] * 20)]))
    message = out_of_memory_message(long, None, 20, REASON)
    assert "use more GPUs and data.split_sequences=true" in message
    assert "batch_tokens=" not in message


def test_the_size_to_try_is_one_that_the_estimate_finds_room_for() -> None:
    capacity = plan(0).estimate(20, 14, num_recomputed=3).total
    tried = tokens_to_try(60, 40, plan(capacity))
    assert tried in (18, 19)  # three quarters of three quarters of ... 60
    assert tokens_to_try(60, 40, plan(2**40)) == 45
    assert tokens_to_try(60, 40, plan(1)) == 1  # nothing fits


def test_the_step_that_stopped_a_run_is_kept(tmp_path: Path) -> None:
    keep_stopped(tmp_path, 12, BATCH, FloatingPointError("the loss"))
    record = json.loads((tmp_path / STOPPED_NAME).read_text())
    assert record == {"step": 12, "error": "the loss", "sample_ids": [["a"], ["b", "c"]]}


def test_a_loss_that_jumps_is_noticed_with_its_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spikes = LossSpikes(tmp_path)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, generator=generator).tolist()
    falling = [8.0 * 0.98**step + 0.1 * each for step, each in enumerate(noise)]
    assert not any(spikes.add(step, loss, BATCH) for step, loss in enumerate(falling))
    assert not (tmp_path / SPIKES_NAME).exists()
    with caplog.at_level(logging.WARNING):
        assert spikes.add(200, 5.0, BATCH)
    assert "step 000200  the loss is 5.0000" in caplog.text
    (line,) = (tmp_path / SPIKES_NAME).read_text().splitlines()
    assert json.loads(line)["sample_ids"] == [["a"], ["b", "c"]]
    assert not spikes.add(201, falling[-1], BATCH)  # the spike is not what others are compared with


def test_the_first_steps_are_compared_with_nothing(tmp_path: Path) -> None:
    spikes = LossSpikes(tmp_path)
    assert not any(spikes.add(step, 100.0**step, BATCH) for step in range(10))
