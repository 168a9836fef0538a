"""What a run says: fixed digits, the same numbers in metrics, and time left from the time of steps alone."""

import dataclasses
import io
import json
import logging
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from draft_oracle import tiny_drafter
from tiny_training import tiny_config
from torch import Tensor

from eagle3.board import Board, Identity
from eagle3.config import ObjectiveConfig, TrackingConfig
from eagle3.draft.acceptance import Acceptance
from eagle3.tracking import METRICS_NAME, Tracker
from eagle3.training import progress
from eagle3.training.batches import Position, StepBatch
from eagle3.training.distributed import World
from eagle3.training.optimizer_step import MetricSums, StepResult
from eagle3.training.progress import RankFacts, StepLog, progress_bars
from eagle3.training.timing import Mark, StepMarks, StepSeconds
from eagle3.training.validation import Validation

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(
    tiny_config(Path("store"), Path("target"), Path("run")), objective=ObjectiveConfig(ttt_steps=2, ttt_decay=0.5)
)
BATCH = StepBatch(
    packs=[], has_filler=False, sample_ids=[["a"]], num_tokens=300, num_supervised=100, next_position=Position()
)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def result_now() -> StepResult:
    """A step of no time."""
    marks = StepMarks(Mark(CPU), Mark(CPU), None, Mark(CPU), Mark(CPU))
    sums = MetricSums(f64(40, 10), f64(20, 10), f64(10, 2), f64(5, 1))
    return StepResult(sums, grad_norm=1.25, stop_requested=False, num_attended=100.0, marks=marks)


def new_log(tracker: Tracker | None, *, num_steps: int, num_ranks: int = 1) -> StepLog:
    world = World(0, num_ranks, CPU)
    return StepLog(CONFIG, tiny_drafter().config, world, tracker, num_steps=num_steps, steps_per_epoch=4)


def test_a_line_averages_the_steps_since_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = Board(tmp_path, TrackingConfig(backend="none"), Identity("a", "a", "a", "train"), {})
    with caplog.at_level(logging.INFO), Tracker(tmp_path, board, step=0) as tracker:
        log = new_log(tracker, num_steps=10, num_ranks=2)
        for step in (1, 2):
            with log.clock():
                with log.data_clock():
                    time.sleep(0.005)
                time.sleep(0.01)
            log.add(result_now(), BATCH)
            if step == 2:
                log.write(step, learning_rate=5e-4)
        time.sleep(0.2)  # a validation: no time of steps
        with log.clock():
            time.sleep(0.01)
        log.add(result_now(), BATCH)
        log.write(3, learning_rate=4e-4)
    pattern = (
        r"step 000002/000010  loss 2\.2500  top1 0\.500 0\.200  acceptance 0\.250 0\.100  grad 1\.2500  lr 5\.00e-04  "
        r"\d+ tokens/s \(\d+ supervised\)  data \d+\.\d% forward 0\.\d% backward 0\.\d% exchange 0\.0% update 0\.\d%  "
        r"\d+\.\d GiB  0:00:00 left"
    )
    assert re.fullmatch(pattern, caplog.messages[0])
    first, second = (json.loads(line) for line in (tmp_path / METRICS_NAME).read_text().splitlines())
    assert first["loss"] == second["loss"] == 2.25  # (40 + 0.5 * 10) / 20
    assert (first["top1"], first["acceptance"]) == ([0.5, 0.2], [0.25, 0.1])
    assert (first["epoch"], second["epoch"]) == (0.5, 0.75)
    assert (first["num_tokens"], second["num_tokens"]) == (600, 300)
    assert 0.1 < first["time/data"] < 0.6
    assert second["time/data"] == 0.0
    assert first["memory_bytes"] > 2**20
    assert "share_of_limit" not in first  # nobody says what this machine could do
    assert 2 * 0.21 < second["device_seconds"] < 2 * 2  # two devices, and the validation counts
    assert first["tokens_per_second"] == pytest.approx(3 * first["supervised_tokens_per_second"])
    assert 300 / 0.1 < second["tokens_per_second"] <= 300 / 0.01


def test_a_rank_without_a_tracker_writes_the_log_line_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = new_log(None, num_steps=1)
    with log.clock():
        time.sleep(0.001)
    log.add(result_now(), BATCH)
    log.write(1, learning_rate=0.0)
    (message,) = caplog.messages
    assert message.startswith("step 000001/000001  loss ")


def test_bars_are_shown_in_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars(shown=True) as bars:
        task = bars.add_task("steps", total=10, completed=4)
        bars.advance(task)
        assert bars.tasks[0].completed == 5
    assert capsys.readouterr().err == ""


def test_log_lines_go_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    logging.getLogger().addHandler(handler)
    try:
        with progress_bars(shown=True) as bars:
            bars.add_task("steps", total=10, completed=4)
            bars.refresh()
            assert handler.stream is not terminal
            logging.getLogger("eagle3").error("a line")
        assert handler.stream is terminal
    finally:
        logging.getLogger().removeHandler(handler)
    shown = terminal.getvalue()
    assert "steps" in shown
    assert "a line\n" in shown
    assert "4/10" in shown


def test_the_last_held_out_tau_is_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    acceptance = Acceptance(2.34567, 2.3, 2.4, 2.2, 2.3, 4, 10, 5.0, [0.5, 0.4])
    log = new_log(None, num_steps=9)
    log.write_validation(3, Validation(acceptance, result_now().sums, []), is_best=True)
    with log.clock():
        time.sleep(0.001)
    log.add(result_now(), BATCH)
    log.write(4, learning_rate=0.0)
    assert "  loss 2.2500  tau 2.346 at 3  top1 " in caplog.messages[-1]


def test_a_rank_that_is_slow_at_its_own_work_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def others(mine: RankFacts) -> list[RankFacts]:
        return [RankFacts(f"node{rank}", StepSeconds(forward=seconds), 2**30) for rank, seconds in enumerate((1, 2, 1))]

    monkeypatch.setattr(progress, "gather", others)
    caplog.set_level(logging.WARNING)
    log = new_log(None, num_steps=9, num_ranks=3)
    with log.clock():
        time.sleep(0.001)
    log.add(result_now(), BATCH)
    log.write(1, learning_rate=0.0)
    assert caplog.messages == [
        "step 000001/000009  straggler: rank 1 on node1 took 2.00 times the median rank's time for its own work"
    ]
