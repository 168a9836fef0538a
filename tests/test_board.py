"""A run of each kind, written by W&B's client and read back with W&B's own reader; other boards get the scalars."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import wandb

from eagle3 import board
from eagle3.board import Board, Files, Identity, check_backend, curves, feature_store
from eagle3.capture.extraction import run_extraction
from eagle3.config import (
    DataConfig,
    EvaluateConfig,
    ExtractConfig,
    RunConfig,
    StoreConfig,
    TargetConfig,
    TrackingConfig,
    TrainConfig,
    UserError,
)
from eagle3.evaluation.run import evaluate
from eagle3.training.trainer import train

IDENTITY = Identity("abcd1234", "a name", "a group", "train", ["feed0001"])
SETTINGS = {"optimizer": {"learning_rate": 0.5}, "provenance": {"seeds": {"run": 7}}}


def inspect(directory: Path, *options: str) -> str:
    """Reads W&B's files with the reader that W&B ships."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def records(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in inspect(directory, "--json").splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B as it is where nobody has logged in."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> Files:
    (tmp_path / "store").mkdir()
    names = ["manifest.json", "index.jsonl", "shard-00000.safetensors"]
    for name in names:
        (tmp_path / "store" / name).write_text(name)
    return feature_store(tmp_path / "store", names, "0123456789abcdef", {"engine": "sglang"})


@pytest.mark.usefixtures("offline")
def test_an_offline_run_can_be_synced(tmp_path: Path, store: Files, caplog: pytest.LogCaptureFixture) -> None:
    config = TrackingConfig(project="p", tags=["t"])
    with caplog.at_level(logging.INFO), Board(tmp_path, config, IDENTITY, SETTINGS) as board:
        for step, (loss, tau) in enumerate([(3.0, 1.1), (1.0, 1.4), (2.0, 1.3)]):
            board.log(step, {"loss": loss, "held_out/tau": tau, "top1": [0.25, None, 0.75]})
        board.table("questions", ["sample_id", "num_tokens"], [["q1", 5], ["q2", 7]])
        board.scatter("charts/tau against loss", ("loss", "tau"), [(3.0, 1.1), (1.0, 1.4)])
        board.bars("charts/acceptance per position", ("position", "accepted"), [("1", 0.5), ("2", 0.25)])
        board.summarise({"best_step": 1})
        board.reads(store)
        board.makes(store)
    assert "W&B: offline in" in caplog.text
    (run_dir,) = (tmp_path / "wandb").glob("offline-run-*")
    assert run_dir.name.endswith("-abcd1234")

    run = json.loads(inspect(run_dir, "--summary", "--json"))
    assert (run["run_id"], run["name"], run["project"], run["tags"]) == ("abcd1234", "a name", "p", ["t"])
    assert (run["state"], run["config"]) == ("finished", SETTINGS)
    summary = run["summary"]
    assert summary["held_out/tau"] == {"max": 1.4}  # the best, not the last
    assert summary["loss"] == {"min": 1.0}
    assert (summary["top1/2"], summary["best_step"]) == (0.75, 1)
    (written,) = records(run_dir, "run")
    assert (written["run_group"], written["job_type"]) == ("a group", "train")
    history = records(run_dir, "history")
    assert [(line["item"]["loss"], line["item"]["held_out/tau"]) for line in history] == [(3, 1.1), (1, 1.4), (2, 1.3)]
    assert "top1/1" not in history[0]["item"]

    table = json.loads((run_dir / "files" / summary["questions"]["path"]).read_text())
    assert table == {"columns": ["sample_id", "num_tokens"], "data": [["q1", 5], ["q2", 7]]}
    charts = [name for each in records(run_dir, "config") for name in each["update"] if "visualize" in name]
    assert sorted(charts) == [
        "_wandb.visualize.charts/acceptance per position", "_wandb.visualize.charts/tau against loss",
    ]  # fmt: skip
    (artifact,) = [each for each in records(run_dir, "artifact") if each["type"] == "feature-store"]
    assert artifact["name"] == "features-0123456789ab"
    contents = {each["path"]: each for each in artifact["manifest"]["contents"]}
    assert sorted(contents) == ["manifest.json", "shard-00000.safetensors"]
    assert contents["shard-00000.safetensors"]["ref"] == (tmp_path / "store" / "shard-00000.safetensors").as_uri()
    assert "ref" not in contents["manifest.json"]


@pytest.mark.usefixtures("offline")
def test_a_run_that_was_resumed_or_failed_is_the_same_one(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Board(tmp_path, TrackingConfig(), IDENTITY, {}) as board:
        board.log(0, {"loss": 1 / 0})
    with Board(tmp_path, TrackingConfig(), IDENTITY, {}):
        pass
    states = [json.loads(inspect(path, "--summary", "--json")) for path in sorted(tmp_path.glob("wandb/offline-run-*"))]
    assert [(each["run_id"], each["state"]) for each in states] == [("abcd1234", "failed"), ("abcd1234", "finished")]


def test_features_are_uploaded_only_when_asked(tmp_path: Path, store: Files) -> None:
    for upload, references in ((False, ["shard-00000.safetensors"]), (True, [])):
        run = mock.create_autospec(wandb.Run, instance=True, offline=False)
        with mock.patch.object(wandb, "init", return_value=run), mock.patch.object(wandb, "login", return_value=True):
            Board(tmp_path, TrackingConfig(upload=upload), IDENTITY, {}).reads(store)
        (artifact,) = run.use_artifact.call_args.args  # online, so that W&B draws the lineage
        assert sorted(artifact.manifest.entries) == ["manifest.json", "shard-00000.safetensors"]
        assert sorted(name for name, entry in artifact.manifest.entries.items() if entry.ref) == references


def test_of_a_store_behind_a_url_wandb_gets_a_list(tmp_path: Path) -> None:
    run = mock.create_autospec(wandb.Run, instance=True, offline=False)
    with mock.patch.object(wandb, "init", return_value=run), mock.patch.object(wandb, "login", return_value=True):
        Board(tmp_path, TrackingConfig(upload=True), IDENTITY, {}).reads(
            feature_store("s3://bucket/store", ["manifest.json", "shard-00000.safetensors"], "0123", {})
        )
    (artifact,) = run.use_artifact.call_args.args
    (entry,) = artifact.manifest.entries.values()
    names = ["s3://bucket/store/manifest.json", "s3://bucket/store/shard-00000.safetensors"]
    assert Path(entry.local_path).read_text().splitlines() == names


def test_an_online_run_is_asked_for_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    with mock.patch.object(wandb, "init") as init, mock.patch.object(wandb, "login", return_value=True):
        Board(tmp_path, TrackingConfig(), IDENTITY, SETTINGS).close()
    asked = init.call_args.kwargs
    assert (asked["id"], asked["resume"], asked["mode"]) == ("abcd1234", "allow", "online")
    assert (asked["group"], asked["job_type"], asked["config"]) == ("a group", "train", SETTINGS)


def test_wandb_that_cannot_start_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"tracking\.backend must be able to start, got 'wandb' and from it: no API"):
        Board(tmp_path, TrackingConfig(), IDENTITY, {})


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.backend must be an installed package, got 'trackio'; pip install"):
        check_backend(TrackingConfig(backend="trackio"))
    check_backend(TrackingConfig(backend="none"))


def test_a_backend_that_is_not_installed_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extraction shows itself when it is done, a training when it has loaded everything."""
    monkeypatch.setattr(board, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    tracking, target = TrackingConfig(backend="trackio"), TargetConfig(str(tmp_path / "target"))
    run = RunConfig(dir=str(tmp_path / "run"))
    for command in (
        lambda: run_extraction(ExtractConfig(target, StoreConfig(str(tmp_path / "store")), tracking=tracking)),
        lambda: train(TrainConfig(target, DataConfig(str(tmp_path / "store")), run=run, tracking=tracking)),
        lambda: evaluate(EvaluateConfig("drafter", target, out=str(tmp_path / "out"), tracking=tracking)),
    ):
        with pytest.raises(UserError, match=r"tracking\.backend must be an installed package, got 'trackio'"):
            command()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_scalars(tmp_path: Path, store: Files) -> None:
    pytest.importorskip("tensorboard", reason="tracking.backend=tensorboard needs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Board(tmp_path, TrackingConfig(backend="tensorboard"), IDENTITY, SETTINGS) as board:
        board.log(1, {"loss": 3.0, "top1": [0.25, None]})
        board.log(2, {"loss": 2.0})
        board.table("questions", ["a"], [[1]])
        board.makes(store)
    (directory,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(directory)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0)]
    assert events.Scalars("top1/0")[0].value == 0.25


def test_trackio_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="tracking.backend=trackio needs it")
    code = (
        "from eagle3.board import *\n"
        "config, identity = TrackingConfig(backend='trackio', project='p'), Identity('i', 'n', 'g', 'train')\n"
        "with Board(Path('.'), config, identity, {}) as b:\n"
        "    b.log(1, {'loss': 3.0, 'top1': [0.25, None]})\n"
    )
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=120)
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("n-i", 1, {"loss": 3.0, "top1/0": 0.25})
    ]


def test_without_a_board_nothing_is_written(tmp_path: Path, store: Files) -> None:
    before = sorted(tmp_path.rglob("*"))
    with Board(tmp_path, TrackingConfig(backend="none"), IDENTITY, SETTINGS) as board:
        board.log(1, {"loss": 3.0})
        board.summarise({"a": 1})
        board.table("t", ["a"], [[1]])
        board.scatter("s", ("a", "b"), [(1, 2)])
        board.bars("b", ("a", "b"), [("1", 2)])
        board.reads(store)
        board.makes(store)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_list_is_one_curve_per_position() -> None:
    assert curves({"loss": 0.5, "top1": [0.25, None, 0.75]}) == {"loss": 0.5, "top1/0": 0.25, "top1/2": 0.75}


def test_importing_the_board_starts_nothing() -> None:
    code = "import eagle3.board, wandb; assert wandb.run is None"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
