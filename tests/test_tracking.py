"""Numbers are always on disk, runs never share a directory, and a resume leaves no line twice."""

import json
import logging
import time
from pathlib import Path

import pytest
import wandb

from eagle3.config import RunConfig, TrackingConfig, UserError
from eagle3.tracking import METRICS_NAME, Tracker, git_state, new_run_dir, run_dir_to_resume, write_provenance

OFF = TrackingConfig(wandb="disabled")


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / METRICS_NAME).read_text().splitlines()]


def test_a_taken_name_gets_the_next_number(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "a"
    names = [new_run_dir(base).name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]


def test_auto_resumes_the_newest_run_of_that_name(tmp_path: Path) -> None:
    base = tmp_path / "a"
    config = RunConfig(dir=str(base), resume="auto")
    assert run_dir_to_resume(config) is None
    for number in range(11):
        write_provenance(new_run_dir(base), {"number": number})
    (tmp_path / "a-12").mkdir()  # no run: it has no run.json
    write_provenance(new_run_dir(tmp_path / "a-b"), {})
    assert run_dir_to_resume(config) == tmp_path / "a-11"
    assert run_dir_to_resume(RunConfig(dir=str(base), resume="never")) is None
    assert run_dir_to_resume(RunConfig(dir="x", resume=str(tmp_path / "a-3"))) == tmp_path / "a-3"


def test_a_run_that_is_none_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.resume must be never, auto or a run's directory, got '.*nowhere'"):
        run_dir_to_resume(RunConfig(resume=str(tmp_path / "nowhere")))


def test_provenance_says_what_ran_where(tmp_path: Path) -> None:
    write_provenance(tmp_path, {"seeds": {"run": 7}})
    write_provenance(tmp_path, {"seeds": {"run": 7}, "from_step": 5})
    first, second = json.loads((tmp_path / "run.json").read_text())["sessions"]
    assert first["seeds"] == {"run": 7}
    assert first["versions"]["torch"]
    assert first["hardware"]["num_cpus"] >= 1
    assert set(first["git"]) == {"commit", "dirty"}
    assert first["argv"]
    assert second["from_step"] == 5


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sessions": 5}'])
def test_another_run_json_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(
        UserError, match=r"run.json must be JSON with a list of sessions, got .*run.json\); move it away"
    ):
        write_provenance(tmp_path, {})
    assert (tmp_path / "run.json").read_text() == text


def test_git_state_is_that_of_this_code() -> None:
    state = git_state()
    assert state["commit"] is None or len(state["commit"]) == 40
    assert (state["dirty"] is None) == (state["commit"] is None)


def test_a_resume_drops_the_lines_after_its_step(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}, step=0) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"loss": step / 10})
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"step": 8, "lo')  # a kill in mid-line
    with Tracker(tmp_path, OFF, {}, step=5) as tracker:
        tracker.log(6, {"loss": 0.66, "top1": [0.5, None]})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[-1] == {"step": 6, "loss": 0.66, "top1": [0.5, None]}


def test_wandb_runs_offline_without_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = new_run_dir(tmp_path / "run")
    with caplog.at_level(logging.INFO), Tracker(run_dir, TrackingConfig(tags=["t"]), {"a": 1}, step=0) as tracker:
        tracker.log(3, {"loss": 0.5, "top1": [0.25, None, 0.75]})
        assert wandb.run is not None
        assert wandb.run.name == "run"
        first_id = wandb.run.id
    assert "W&B: offline in" in caplog.text
    (recorded,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # W&B's own process writes it, some time after the run has ended
    while b"top1/2" not in recorded.read_bytes():  # a curve for each draft position
        assert time.monotonic() < deadline, recorded.read_bytes()
        time.sleep(0.05)
    assert (run_dir / "wandb-id").read_text() == first_id
    assert lines(run_dir) == [{"step": 3, "loss": 0.5, "top1": [0.25, None, 0.75]}]


def test_wandb_online_without_a_login_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"tracking\.wandb must be a mode that W&B can start in, got 'online': no API"):
        Tracker(tmp_path, TrackingConfig(wandb="online"), {}, step=0)
