"""Any checkpoint of a run can be exported; that of the best step is the drafter that training exported itself."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_target
from safetensors.torch import load_file
from training_runs import STEPS, six_steps, state_of, with_run

from eagle3.commands.export import main
from eagle3.config import TrainConfig, UserError
from eagle3.draft.export import FILE_NAMES
from eagle3.training.checkpoints import newest_checkpoint
from eagle3.training.exporting import export_checkpoint
from eagle3.training.trainer import train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return six_steps(tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("ema_decay", [None, 0.6])
def test_the_best_steps_checkpoint_is_the_drafter_that_training_exported(
    base: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, ema_decay: float | None
) -> None:
    config = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, ema_decay=ema_decay))
    run_dir = train(with_run(config, dir=str(tmp_path / "run")))
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    best = newest.state.best_step
    caplog.set_level("INFO")
    for step in (3, STEPS):
        out = tmp_path / f"step-{step}"
        assert main([str(run_dir / f"step-{step:06d}"), "--out", str(out)]) == 0
        assert sorted(path.name for path in out.iterdir()) == sorted(FILE_NAMES)
        assert (out / "config.json").read_bytes() == (run_dir / "drafter" / "config.json").read_bytes()
        same = (out / "model.safetensors").read_bytes() == (run_dir / "drafter" / "model.safetensors").read_bytes()
        assert same == (step == best)
        kind = "master" if ema_decay is None else "ema"
        wanted = state_of(run_dir, step)[f"{kind}.fc.weight"].bfloat16()
        assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], wanted)
        assert f"{out}: the drafter of step {step}, with a held-out tau of " in caplog.text


def test_what_cannot_be_exported_is_said(base: TrainConfig, tmp_path: Path) -> None:
    run_dir = train(with_run(base, dir=str(tmp_path / "run")))
    checkpoint = run_dir / f"step-{STEPS:06d}"
    with pytest.raises(UserError, match=r"--out must leave the best drafter where it is"):
        export_checkpoint(checkpoint, run_dir / "drafter")
    other = write_tiny_target(tmp_path / "other", num_hidden_layers=5)
    with pytest.raises(UserError, match="layers"):
        export_checkpoint(checkpoint, tmp_path / "out", other)
    wrong = "a checkpoint must be a directory RUN/step-NNNNNN, got '.*%s'; %s"
    with pytest.raises(UserError, match=wrong % ("step-000099", "correct the path")):
        export_checkpoint(run_dir / "step-000099", tmp_path / "out")
    with pytest.raises(UserError, match=wrong % (run_dir.name, rf"name one of .*{checkpoint.name} in it")):
        export_checkpoint(run_dir, tmp_path / "out")
    tensors = checkpoint / "state.safetensors"
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(damaged)
    with pytest.raises(UserError, match=r"must be whole, got .* in state\.safetensors are not what was written"):
        export_checkpoint(checkpoint, tmp_path / "out")
    shutil.rmtree(run_dir / "drafter")
    with pytest.raises(UserError, match=r"validated once, got .* without .*drafter; let the training go on"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
