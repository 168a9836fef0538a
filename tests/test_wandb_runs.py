"""Runs are read from what W&B's client wrote and from its API, or named as the user's mistake."""

import dataclasses
import json
import time
from pathlib import Path
from unittest import mock

import pytest
import wandb
from tiny_experiment import STEPS, run_experiment, run_of

from eagle3.board import Board, Identity
from eagle3.config import TrackingConfig, UserError, by_dotted_name
from eagle3.draft.questions import COLUMNS
from eagle3.evaluation.compare import read
from eagle3.evaluation.runs import Run
from eagle3.evaluation.wandb_runs import read_remote, read_wandb_files, wandb_files


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(tmp_path_factory.mktemp("experiment"), tiny_target)


def test_the_runs_of_an_experiment_are_linked(base: Path) -> None:
    groups = set()
    for directory in (base / "features", *(base / name / kind for name in STEPS for kind in ("train", "evaluation"))):
        (files,) = [wandb_files(directory / "wandb")]
        summary = json.loads((directory / "run.json").read_text())["sessions"][-1]["run"]
        groups.add(summary["group"])
        assert files[0].parent.name.endswith(summary["id"])
    assert len(groups) == 1
    trained = run_of(base, "long", "train").identity
    assert run_of(base, "long", "evaluation").identity.inputs == [trained.id]
    store = json.loads((base / "features" / "run.json").read_text())["sessions"][-1]
    assert trained.inputs == [store["run"]["id"]]
    assert set(store["digests"]) == {"prompts", "target"}


def test_directories_and_wandb_files_say_the_same(base: Path) -> None:
    for name in STEPS:
        for kind in ("train", "evaluation"):
            local = run_of(base, name, kind)
            (remote,) = read_wandb_files(wandb_files(base / name / kind / "wandb"))
            assert remote.identity == local.identity
            assert by_dotted_name(remote.config) == by_dotted_name(local.config)  # W&B keeps no empty mapping
            assert remote.questions == local.questions
            assert by_dotted_name(remote.provenance) == by_dotted_name(local.provenance)
            for metric in ("loss", "held_out/tau", "held_out/loss", "top1/0", "device_seconds", "tau_trained"):
                assert remote.curve(metric) == local.curve(metric), (name, kind, metric)
            assert remote.num_draft_tokens == local.num_draft_tokens == 3


def test_the_files_of_a_resumed_run_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    identity = Identity("abcd1234", "a", "g", "train")
    some = {"some": "thing"}  # W&B keeps no empty mapping
    said = {"git": some, "versions": some, "hardware": some, "store": some, "device": "cpu", "num_parameters": 1}
    provenance = {"run": dataclasses.asdict(identity), "num_draft_tokens": 3, **said}
    settings = {"data": {"seed": 0}, "provenance": provenance}
    for steps, loss in ((range(1, 5), 4.0), (range(3, 7), 2.0)):  # killed after step 4, its last checkpoint was step 2
        with Board(tmp_path, TrackingConfig(), identity, settings) as board:
            for step in steps:
                board.log(step, {"loss": loss})
            board.table("questions", COLUMNS, [["held_out", "q", "p", None, 5, loss, [loss], [0.0]]])
        time.sleep(1.1)  # W&B names directories by the second
    killed = tmp_path / "wandb" / "offline-run-20991231_000000-abcd1234" / "run-abcd1234.wandb"  # at its very start
    killed.parent.mkdir()
    killed.write_bytes(bytes.fromhex("3a572642e1be00"))  # as such a kill left it
    (run,) = read(str(tmp_path / "wandb"))
    assert f"{killed} is left out: its process was killed before" in caplog.text
    assert run.identity == identity
    assert run.curve("loss") == {1: 4.0, 2: 4.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0}
    assert [each.answer.rounds for each in run.questions["held_out"]] == [2.0]
    for path in (tmp_path / "wandb").rglob("questions*.table.json"):
        path.write_text("{")
    with pytest.raises(UserError, match=r"the table of questions must be JSON beside its \.wandb file, got none or"):
        read(str(tmp_path / "wandb"))


def remote_run(run: Run, directory: Path) -> mock.Mock:
    """Stands in for W&B's servers, which tests cannot reach: what its API returns of a run that was synced."""
    (file,) = wandb_files(Path(run.source) / "wandb")
    table = next(file.parent.glob("files/media/table/questions_*.json"))
    remote = mock.create_autospec(wandb.apis.public.Run, instance=True)
    provenance = run.provenance | {"run": dataclasses.asdict(run.identity)}
    remote.config = run.config | {"provenance": provenance}
    remote.path, remote.job_type = ["me", "eagle3", run.identity.id], run.identity.job_type
    remote.summary = {"questions": {"_type": "table-file", "path": f"media/table/{table.name}"}}
    remote.scan_history.return_value = [
        {"_step": line["step"], **{name: value for name, value in line.items() if name != "step"}} for line in run.lines
    ]
    remote.file.return_value.download.side_effect = lambda root, replace: table.open()
    return remote


def test_runs_come_from_wandbs_api_by_name_and_by_filter(base: Path, tmp_path: Path) -> None:
    local = [run_of(base, "long", kind) for kind in ("train", "evaluation")]
    remotes = [remote_run(run, tmp_path) for run in local]
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.return_value, api.runs.return_value = remotes[0], remotes
    (run,) = read_remote(f"me/eagle3/{local[0].identity.id}", api)
    api.run.assert_called_once_with(f"me/eagle3/{local[0].identity.id}")
    assert dataclasses.replace(run, source=local[0].source) == local[0]
    both = read_remote("me/eagle3?group=g&tag=t&job_type=train", api)
    assert [each.questions for each in both] == [each.questions for each in local]
    assert api.runs.call_args.kwargs["filters"] == {"group": "g", "tags": "t", "jobType": "train"}


def test_what_wandb_does_not_have_is_the_users_mistake() -> None:
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.side_effect = wandb.errors.CommError("not found")
    with pytest.raises(UserError, match=r"a run in W&B must be one that this login can read, got 'a/b/c' .*not found"):
        read_remote("a/b/c", api)
    api.runs.return_value = []
    with pytest.raises(UserError, match=r"a filter must leave a training or an evaluation, got none of 0 runs"):
        read_remote("a/b?group=g", api)
    with pytest.raises(UserError, match=r"a filter of runs must be NAME=VALUE with & between, .* got 'colour=red'"):
        read_remote("a/b?colour=red", api)
    foreign = mock.create_autospec(wandb.apis.public.Run, instance=True)
    foreign.config, foreign.summary, foreign.path, foreign.job_type = {"lr": 1}, {}, ["a", "b", "c"], None
    foreign.scan_history.return_value = []
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.return_value = foreign
    with pytest.raises(UserError, match=r"a run in W&B must have been written by this package, got one without prov"):
        read_remote("a/b/c", api)


def test_a_file_that_wandb_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").write_bytes(b"no log at all")
    with pytest.raises(UserError, match=r"a \.wandb file must be one that `wandb leet inspect` reads, got .*x\.wandb"):
        read(str(tmp_path / "x.wandb"))


def test_wandb_files_without_a_run_are_an_error(base: Path) -> None:
    with pytest.raises(UserError, match=r"W&B's files must hold a training or an evaluation, got none in .*features"):
        read(str(base / "features" / "wandb"))
