"""Numbers are always on disk, runs never share a directory, and a resume leaves no line twice."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import xxhash

from eagle3 import tracking
from eagle3.board import Board, Identity
from eagle3.config import RunConfig, TrackingConfig, UserError
from eagle3.tracking import (
    METRICS_NAME,
    Tracker,
    digest_file,
    git_state,
    identify,
    new_run_dir,
    read_provenance,
    run_dir_to_resume,
    write_provenance,
)

OFF = TrackingConfig(backend="none")
IDENTITY = Identity("id0", "run", "group", "train")


def note(run_dir: Path, **facts: object) -> None:
    write_provenance(run_dir, IDENTITY, RunConfig(), facts)


def open_tracker(run_dir: Path, step: int) -> Tracker:
    return Tracker(run_dir, Board(run_dir, OFF, IDENTITY, {}), step=step)


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
        note(new_run_dir(base), number=number)
    (tmp_path / "a-12").mkdir()  # no run: it has no run.json
    note(new_run_dir(tmp_path / "a-b"))
    assert run_dir_to_resume(config) == tmp_path / "a-11"
    assert run_dir_to_resume(RunConfig(dir=str(base), resume="never")) is None
    assert run_dir_to_resume(RunConfig(dir="x", resume=str(tmp_path / "a-3"))) == tmp_path / "a-3"


def test_a_run_that_is_none_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.resume must be never, auto or a run's directory, got '.*nowhere'"):
        run_dir_to_resume(RunConfig(resume=str(tmp_path / "nowhere")))


def test_provenance_says_what_ran_where(tmp_path: Path) -> None:
    note(tmp_path, seeds={"run": 7})
    note(tmp_path, seeds={"run": 7}, from_step=5)
    first, second = json.loads((tmp_path / "run.json").read_text())["sessions"]
    assert first["seeds"] == {"run": 7}
    assert first["versions"]["torch"]
    assert first["hardware"]["num_cpus"] >= 1
    assert {"commit", "dirty"} <= set(first["git"])
    assert first["config"]["log_every"] == 10
    assert first["run"]["group"] == "group"
    assert first["argv"]
    assert second["from_step"] == 5


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sessions": 5}', '{"sessions": [{}]}'])
def test_another_run_json_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(
        UserError, match=r"run.json must be JSON with a list of sessions, got .*run.json\); move it away"
    ):
        note(tmp_path)
    assert (tmp_path / "run.json").read_text() == text


@pytest.mark.parametrize("name", [".", "/", ".."])
def test_a_run_needs_a_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"run\.dir must end in a name for the run, got '{re.escape(name)}'"):
        new_run_dir(Path(name))


def test_looking_at_a_checkout_writes_nothing_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git would note what it found in the index, behind a lock that refuses a commit, and stays if git is killed."""
    file = tmp_path / "a.txt"
    file.write_text("a")
    for arguments in (["init"], ["add", "a.txt"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-m", "a"], check=True, capture_output=True)
    os.utime(file, (1, 1))  # as the index does not know it
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(tracking, "REPOSITORY", tmp_path)
    assert git_state()["dirty"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == index


def test_git_state_is_that_of_this_code() -> None:
    state = git_state()
    assert state["commit"] is None or len(state["commit"]) == 40
    assert (state["dirty"] is None) == (state["commit"] is None)


def test_a_resume_drops_the_lines_after_its_step(tmp_path: Path) -> None:
    with open_tracker(tmp_path, 0) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"loss": step / 10})
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"step": 8, "lo')  # a kill in mid-line
    with open_tracker(tmp_path, 5) as tracker:
        tracker.log(6, {"loss": 0.66, "top1": [0.5, None]})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[-1] == {"step": 6, "loss": 0.66, "top1": [0.5, None]}
    with open_tracker(tmp_path, 6) as tracker:
        assert tracker.lines() == lines(tmp_path)


def test_what_reads_a_run_belongs_to_its_experiment(tmp_path: Path) -> None:
    config = TrackingConfig()
    store, run, other = tmp_path / "store", tmp_path / "run", tmp_path / "foreign"
    for path in (store, run, other):
        path.mkdir()
    extracted = identify(store, config, "extract")
    assert extracted.group == f"store-{extracted.id}"
    write_provenance(store, extracted, RunConfig(), {})
    trained = identify(run, config, "train", inputs=[other, store])
    assert (trained.group, trained.inputs, trained.name) == (extracted.group, [extracted.id], "run")
    write_provenance(run, trained, RunConfig(), {})
    assert identify(run, config, "train", inputs=[store], resumes=True) == trained
    again = identify(run, config, "train", inputs=[store])
    assert (again.group, again.id == trained.id) == (trained.group, False)
    named = identify(run, TrackingConfig(name="n", group="g"), "evaluate", inputs=[run])
    assert (named.name, named.group, named.inputs) == ("n", "g", [trained.id])


def test_the_agent_of_a_sweep_chooses_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "chosen01")
    assert identify(tmp_path, TrackingConfig(), "train").id == "chosen01"
    note(tmp_path)
    assert identify(tmp_path, TrackingConfig(), "train", resumes=True).id == IDENTITY.id


def test_changes_that_are_not_committed_are_kept_as_a_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, run, clone = tmp_path / "code", tmp_path / "run", tmp_path / "clone"
    code.mkdir()
    run.mkdir()

    def git(directory: Path, *arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)

    git(code, "init")
    (code / "a.txt").write_text("one\ntwo\n\n")
    git(code, "add", "a.txt")
    git(code, "commit", "-m", "first")
    monkeypatch.setattr(tracking, "REPOSITORY", code)
    note(run)
    assert "patch" not in read_provenance(run)["sessions"][-1]["git"]
    (code / "a.txt").write_text("one\n2\n\n")
    (code / "b.txt").write_text("new")
    note(run)
    state = read_provenance(run)["sessions"][-1]["git"]
    assert (state["dirty"], state["untracked"]) == (True, ["b.txt"])
    git(tmp_path, "clone", str(code), str(clone))
    git(clone, "checkout", state["commit"])
    git(clone, "apply", str(run / state["patch"]))
    assert (clone / "a.txt").read_text() == "one\n2\n\n"


def test_a_file_is_digested_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one block
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == xxhash.xxh3_128_hexdigest(content)


def test_a_validation_that_comes_again_is_no_line_twice(tmp_path: Path) -> None:
    """A run that was killed between a validation and its save goes on from a save before it, of the same step."""
    board = Board(tmp_path, OFF, IDENTITY, {})
    with Tracker(tmp_path, board, step=0) as tracker:
        for step in (4, 8):
            tracker.log(step, {"loss": 1.0})
            tracker.log(step, {"held_out/tau": 1.5})
    for is_validated, num_lines in ((True, 4), (False, 3)):
        with Tracker(tmp_path, board, step=8, is_validated=is_validated) as tracker:
            assert len(tracker.lines()) == num_lines
