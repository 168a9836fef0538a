"""One large batch = micro-steps; what a run leaves behind, and what ends one; the best tau is kept."""

import dataclasses
import json
import logging
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import write_store
from training_runs import (
    assert_same_bits,
    assert_same_training,
    metrics_of,
    six_steps,
    state_of,
    with_batch_tokens,
    with_run,
)

from eagle3 import tracking
from eagle3.config import TrainConfig
from eagle3.draft.export import load_drafter
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.questions import read_questions
from eagle3.draft.target_weights import TargetWeights, load_target_config
from eagle3.features.manifest import read_manifest
from eagle3.features.store import FeatureStore
from eagle3.files import FULL
from eagle3.training import trainer
from eagle3.training.batches import StepBatch
from eagle3.training.engine import Engine, TTTModule
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


def impose_taus(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Has the validations find these held-out taus, one after the other."""
    taus = iter(values)

    def validate_as_told(*arguments: Any, **settings: Any) -> Validation:
        found = validate(*arguments, **settings)
        assert found is not None
        return dataclasses.replace(found, acceptance=dataclasses.replace(found.acceptance, tau=next(taus)))

    monkeypatch.setattr(trainer, "validate", validate_as_told)


def test_a_run_leaves_everything_behind(base: TrainConfig, undisturbed: Path) -> None:
    names = {path.name for path in undisturbed.iterdir() if path.suffix != ".patch"}  # code that is not committed
    assert names == {"drafter", "lock", "metrics.jsonl", "questions.jsonl", "run.json", "step-000003", "step-000006"}
    lines = metrics_of(undisturbed)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert lines[0]["tau_untrained"] == lines[0]["held_out/tau"]
    assert lines[-2]["loss"] < 0.5 * lines[1]["loss"]
    assert len(lines[1]["top1"]) == len(lines[1]["acceptance"]) == base.objective.ttt_steps
    (session,) = json.loads((undisturbed / "run.json").read_text())["sessions"]
    assert session["setup"] == "one process"
    assert (session["run"]["job_type"], session["num_devices"]) == ("train", 1)
    assert session["seeds"] == {"run": 0, "data": 0}
    assert session["config"]["optimizer"]["learning_rate"] == 1e-2
    assert session["store"]["manifest"]["engine"] == "transformers"


def test_the_best_validations_questions_add_up_to_its_tau(base: TrainConfig, undisturbed: Path) -> None:
    validations = [line for line in metrics_of(undisturbed) if line.get("held_out/tau") and line["step"] > 0]
    best = max(line["held_out/tau"] for line in validations)
    (answers,) = read_questions(undisturbed / "questions.jsonl").values()
    assert sum(each.answer.num_tokens for each in answers) / sum(each.answer.rounds for each in answers) == best
    store = FeatureStore(Path(base.data.path))
    held_out = {store.entries[index].sample_id for index in store.split(base.data.held_out_share)[1]}
    assert {each.answer.sample_id for each in answers} == held_out
    assert all(line["device_seconds"] > 0 for line in metrics_of(undisturbed) if "loss" in line)


def test_the_exported_drafter_is_the_best_one(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impose_taus(monkeypatch, [9.0, 1.5, 1.7, 1.6, 1.7, 1.2, 1.1])  # of steps 0 to 6; first the untrained drafter's
    run_dir = train(with_run(base, dir=str(tmp_path / "run"), validate_every=1, save_every=6, keep_last=1))
    assert sorted(path.name for path in run_dir.glob("step-*")) == ["step-000002", "step-000006"]
    state = json.loads((run_dir / "step-000006" / "state.json").read_text())
    assert (state["best_tau"], state["best_step"], state["tau_untrained"]) == (1.7, 2, 9.0)
    best = state_of(run_dir, 2)
    exported = dict(load_drafter(run_dir / "drafter", load_target_config(Path(base.target.path))).named_parameters())
    for name, parameter in exported.items():
        assert torch.equal(parameter, best[f"ema.{name}"].bfloat16().float()), name
    manifest = read_manifest(Path(base.data.path))
    record = json.loads((run_dir / "drafter" / "config.json").read_text())["eagle3"]
    assert record["capture_layers"] == list(manifest.capture_layers)
    assert record["chat_template_digest"] == manifest.chat_template_digest
    card = (run_dir / "drafter" / "README.md").read_text()
    assert "**1.700**" in card
    assert "The untrained drafter has 9.000." in card
    assert '"learning_rate": 0.01' in card


def test_one_large_batch_equals_five_micro_steps(base: TrainConfig, undisturbed: Path, tmp_path: Path) -> None:
    many = with_batch_tokens(with_run(base, dir=str(tmp_path / "run")), 20)
    assert_same_training(train(many), undisturbed)


def test_embeddings_of_the_host_are_those_of_the_device(base: TrainConfig, undisturbed: Path, tmp_path: Path) -> None:
    data = dataclasses.replace(base.data, embeddings="host")
    run_dir = train(dataclasses.replace(with_run(base, dir=str(tmp_path / "run")), data=data))
    assert_same_bits(run_dir, undisturbed)


def test_a_device_with_the_drafted_rows_alone_trains_the_same(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(tmp_path / "store", Path(base.target.path), with_normalisers=True)
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, path=str(store)))
    held: list[int] = []

    def make_noted(drafter: Eagle3Drafter, target: TargetWeights, *others: Any, **settings: Any) -> TTTModule:
        held.append(target.lm_head.shape[0])
        return TTTModule(drafter, target, *others, **settings)

    monkeypatch.setattr(trainer, "TTTModule", make_noted)
    run_dir = train(with_run(config, dir=str(tmp_path / "run")))
    monkeypatch.setattr(trainer, "device_weights", lambda target, target_ids, embeddings: target)
    assert_same_bits(run_dir, train(with_run(config, dir=str(tmp_path / "whole"))))
    assert held == [48, 320]


def test_patience_ends_a_run_that_is_no_better(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impose_taus(monkeypatch, [9.0, 1.5, 1.7, 1.6, 1.7])  # of steps 0 to 4: an equal one is no better
    config = with_run(base, dir=str(tmp_path / "run"), validate_every=1, save_every=6, keep_last=1, patience=2)
    with caplog.at_level(logging.INFO):
        run_dir = train(config)
    assert "no better tau in 2 validations: training ends (run.patience)" in caplog.text
    assert sorted(path.name for path in run_dir.glob("step-*")) == ["step-000002", "step-000004"]
    with caplog.at_level(logging.INFO):
        train(with_run(config, resume="auto"))
    assert "is complete: 4 of 6 steps" in caplog.text


def test_a_loss_that_is_not_finite_stops_before_the_update(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Engine] = []

    def take_poisoned_step(engine: Engine, batch: StepBatch, **settings: Any) -> StepResult:
        seen.append(engine)
        if len(seen) == 4:
            batch.packs[1].aux.codes[3] = math.nan
        return take_step(engine, batch, **settings)

    monkeypatch.setattr(trainer, "take_step", take_poisoned_step)
    with pytest.raises(FloatingPointError) as caught:
        train(with_batch_tokens(with_run(base, dir=str(tmp_path / "run")), 20))
    message = str(caught.value)
    assert "the loss must be finite, got nan in 1 of 5 micro-batches; no update was made" in message
    poisoned = [name for name in message.split("'")[1::2] if name.startswith("s")]
    assert len(poisoned) == 1
    record = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert (record["step"], record["error"]) == (4, message)
    assert poisoned in record["sample_ids"]
    saved = state_of(tmp_path / "run", 3)
    assert all(torch.equal(saved[name], tensor) for name, tensor in seen[0].read_state().items())


@pytest.mark.parametrize(("num_bytes", "name"), [(20_000, "model.safetensors"), (300_000, "state.safetensors")])
def test_a_file_that_has_no_room_ends_the_run(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, name: str
) -> None:
    """A limit on the size of files says what a full disk does; the drafter is smaller than the optimizer's state."""
    monkeypatch.setattr(tracking, "_git", lambda *arguments: None)  # the patch of a checkout may be larger than both
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error_info:
            train(with_run(base, dir=str(tmp_path / "run")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Path(error_info.value.filename).name == name
    assert error_info.value.errno in FULL
    assert not list((tmp_path / "run").glob("step-*"))
