"""A run that was killed or stopped ends as an undisturbed one, and one that cannot go on says so."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from training_runs import (
    LAUNCH,
    LOSS_TOLERANCE,
    ROOT,
    STEPS,
    WORKER,
    assert_same_bits,
    launch,
    metrics_of,
    six_steps,
    state_of,
    with_run,
)

from eagle3.config import TrainConfig, UserError, config_to_dict
from eagle3.tracking import lock_run
from eagle3.training import checkpoints, saves, stopping, trainer
from eagle3.training.batches import StepBatch
from eagle3.training.checkpoints import TrainState, newest_checkpoint, save_checkpoint
from eagle3.training.engine import Engine
from eagle3.training.optimizer_step import StepResult, take_step
from eagle3.training.trainer import train
from eagle3.training.validation import Validation, validate


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return six_steps(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def undisturbed(base: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with one large batch a step."""
    return train(with_run(base, dir=str(tmp_path_factory.mktemp("one") / "run")))


def tau_of(line: dict[str, Any]) -> float:
    return float(line["held_out/tau"])


def validate_when_stopped(*arguments: Any, **settings: Any) -> Validation | None:
    """Stands for a validation that SIGTERM comes before."""
    os.kill(os.getpid(), signal.SIGTERM)
    return validate(*arguments, **settings)


def test_a_complete_run_is_not_trained_again(
    base: TrainConfig, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    with caplog.at_level(logging.INFO):
        assert train(with_run(base, dir=str(undisturbed), resume="auto")) == undisturbed
    assert "is complete: 6 of 6 steps" in caplog.text
    best = max((line for line in metrics_of(undisturbed) if line.get("held_out/tau") and line["step"]), key=tau_of)
    assert f"{undisturbed}/drafter is the drafter of step {best['step']}, with the best held-out tau" in caplog.text
    assert f"Next: python evaluate.py drafter={undisturbed}/drafter target.path={base.target.path}" in caplog.text
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_a_run_is_trained_by_one_command_at_a_time(base: TrainConfig, undisturbed: Path) -> None:
    config = with_run(base, dir=str(undisturbed), resume="auto")
    with lock_run(undisturbed), pytest.raises(UserError) as error:
        train(config)
    said = f"a run must be trained by one command at a time, got a second one while process {os.getpid()} trains it"
    assert str(error.value).startswith(f"{said} ({undisturbed}); ")
    assert train(config) == undisturbed  # the lock is gone with its holder


def test_a_training_stops_with_a_launcher_that_passes_no_signal_on(base: TrainConfig, tmp_path: Path) -> None:
    config = with_run(base, dir=str(tmp_path / "run"), max_steps=None, epochs=100_000, save_every=100_000)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(config)))
    command = [*LAUNCH, "--cpu", "--num_processes", "1", "train.py", "--config", str(path)]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    # The line of a step, not of the validation before: until then a stop has nothing to save.
    wait_for(
        lambda: (metrics := tmp_path / "run" / "metrics.jsonl").exists() and '"learning_rate"' in metrics.read_text()
    )
    launcher.terminate()
    launcher.wait()
    wait_for(lambda: "stopped (SIGTERM): saved" in (tmp_path / "log").read_text())
    wait_for(lambda: list((tmp_path / "run").glob("step-*/state.json")) != [])


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_other_maths_are_not_resumed(base: TrainConfig, undisturbed: Path) -> None:
    changed = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, learning_rate=3e-3))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate must be 0\.01, got 0\.003"):
        train(with_run(changed, resume=str(undisturbed)))


def test_a_run_without_a_checkpoint_is_begun_anew_beside_it(
    base: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_run(base, dir=str(tmp_path / "run"), max_steps=1)
    first = train(config)
    shutil.rmtree(first / "step-000001")
    with caplog.at_level(logging.INFO):
        assert train(with_run(config, resume="auto")) == tmp_path / "run-2"
    assert f"new run in {tmp_path / 'run-2'}: {first} has no whole checkpoint to go on from" in caplog.text


def test_a_killed_run_ends_bit_for_bit_as_an_undisturbed_one(
    base: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    config = with_run(base, dir=str(tmp_path / "run"))
    arguments = ["CONFIG", str(tmp_path), "--send", str(int(signal.SIGKILL)), "0", "5"]
    killed = launch([sys.executable, str(WORKER)], config, tmp_path, *arguments)
    assert killed.returncode == -signal.SIGKILL
    assert max(line["step"] for line in metrics_of(tmp_path / "run")) == 4  # one step past the checkpoint
    resumed = train(with_run(config, resume="auto"))
    assert resumed == tmp_path / "run"
    for step in (3, STEPS):
        state, wanted = state_of(resumed, step), state_of(undisturbed, step)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted), step
    assert (resumed / "drafter/model.safetensors").read_bytes() == (
        undisturbed / "drafter/model.safetensors"
    ).read_bytes()
    lines, wanted_lines = metrics_of(resumed), metrics_of(undisturbed)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted_lines]
    for line, wanted_line in zip(lines, wanted_lines, strict=True):
        assert line.get("loss", 0) == pytest.approx(wanted_line.get("loss", 0), rel=LOSS_TOLERANCE)
    assert len(json.loads((resumed / "run.json").read_text())["sessions"]) == 2


def test_a_run_goes_on_after_its_time_was_up(
    base: TrainConfig,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = [0.0]

    def take_minute_step(*arguments: Any, **settings: Any) -> StepResult:
        seconds[0] += 60
        return take_step(*arguments, **settings)

    config = with_run(base, dir=str(tmp_path / "run"), resume="auto", log_every=100)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(trainer, "take_step", take_minute_step)
        patch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
        run_dir = train(with_run(config, stop_after=3.5))
    # After four steps it is up, which the fifth one tells all ranks.
    assert f"stopped (run.stop_after=3.5 minutes): saved {run_dir / 'step-000005'}" in caplog.text
    assert_same_bits(train(config), undisturbed)
    # Lines of the first step of each session and of the last one, which count the tokens of all.
    assert [line["step"] for line in metrics_of(run_dir) if "loss" in line] == [1, 5, 6]
    numbers = [sum(line.get("num_tokens", 0) for line in metrics_of(each)) for each in (run_dir, undisturbed)]
    assert numbers[0] == numbers[1]


def test_a_session_takes_a_step_however_little_time_it_has(
    base: TrainConfig, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_run(base, dir=str(tmp_path / "run"), resume="auto", stop_after=1e-9)
    for step in range(1, STEPS + 1):
        run_dir = train(config)
        newest = newest_checkpoint(run_dir)
        assert newest is not None
        assert newest.state.step == step
    with caplog.at_level(logging.INFO):
        train(config)  # the last step's validation
    assert "held-out tau" in caplog.text
    assert [line["step"] for line in metrics_of(run_dir)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert_same_bits(run_dir, undisturbed)


def test_a_run_that_is_stopped_in_its_first_validation_leaves_no_checkpoint(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer, "validate", validate_when_stopped)
    with caplog.at_level(logging.INFO):
        run_dir = train(with_run(base, dir=str(tmp_path / "run")))
    assert "stopped (SIGTERM) before the first step" in caplog.text
    assert not list(run_dir.glob("step-*"))
    assert not (run_dir / "metrics.jsonl").read_text()


def test_a_run_stopped_in_a_validation_keeps_the_checkpoint_it_began_with(
    base: TrainConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to no step, and saves the one that it had once more: on a disk that is full by then."""

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "state.safetensors")

    config = with_run(base, dir=str(tmp_path / "run"))
    run_dir = train(with_run(config, validate_every=100))
    shutil.rmtree(run_dir / f"step-{STEPS:06d}")
    state = newest_checkpoint(run_dir)
    assert state is not None
    record = json.loads((run_dir / "step-000003" / "state.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", fail)
        patch.setattr(trainer, "validate", validate_when_stopped)
        train(with_run(config, resume="auto"))
    assert newest_checkpoint(run_dir) == state
    assert json.loads((run_dir / "step-000003" / "state.json").read_text()) == record
    assert_same_bits(train(with_run(config, resume="auto")), undisturbed)


def test_a_run_that_is_stopped_at_its_last_step_is_validated_when_it_is_resumed(
    base: TrainConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_step_and_stop(engine: Engine, batch: StepBatch, **settings: Any) -> StepResult:
        num_taken.append(1)
        return dataclasses.replace(take_step(engine, batch, **settings), stop_requested=len(num_taken) == STEPS)

    num_taken: list[int] = []
    config = with_run(base, dir=str(tmp_path / "run"), validate_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "take_step", take_step_and_stop)
        run_dir = train(config)
    assert not (run_dir / "drafter").exists()
    for _ in range(2):  # the second time it is complete
        assert train(with_run(config, resume="auto")) == run_dir
        assert [line["step"] for line in metrics_of(run_dir)] == [0, 1, 2, 3, 4, 5, 6, 6]
        assert metrics_of(run_dir)[-1]["held_out/tau"] == metrics_of(undisturbed)[-1]["held_out/tau"]
        assert (run_dir / "drafter" / "model.safetensors").is_file()


def test_a_signal_in_a_save_lets_it_end(
    base: TrainConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_signal(run_dir: Path, tensors: dict[str, Tensor], state: TrainState) -> Path:
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return save_checkpoint(run_dir, tensors, state)

    monkeypatch.setattr(saves, "save_checkpoint", save_and_signal)
    config = with_run(base, dir=str(tmp_path / "run"))
    run_dir = train(config)
    assert state_of(run_dir, 3).keys() == state_of(undisturbed, 3).keys()
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    assert 3 < newest.state.step < STEPS  # the steps went on while it was written
    assert not list(run_dir.glob(".*"))
    assert_same_bits(train(with_run(config, resume="auto")), undisturbed)
