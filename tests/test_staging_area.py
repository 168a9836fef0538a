"""A run keeps to its budget, finds only its own samples, and cleans up after the dead alone."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from eagle3.capture.handover import Handover
from eagle3.capture.staging import Part, error_path, sample_path, write_json
from eagle3.capture.staging_area import SampleError, StagingArea, remove_dead_runs
from eagle3.config import UserError

LIVING_RUN = """
import sys, time
from pathlib import Path
from eagle3.capture.staging_area import StagingArea
with StagingArea(Path(sys.argv[1]), 1000, shared=sys.argv[2] == "shared") as area:
    path = area.directory / f"{area.new_request_id(7)}.safetensors"
    path.write_text("left behind")
    print(path, flush=True)
    time.sleep(60)
"""


def test_budget_is_kept_but_for_a_sample_that_is_larger(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 100, shared=False) as area:
        assert area.reserve(60)
        assert area.reserve(40)
        assert not area.reserve(1)
        area.release(60)
        area.release(40)
        assert area.reserve(500)
        assert not area.reserve(1)


def test_half_of_what_is_free_unless_told(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, None, shared=False)
    filesystem = os.statvfs(tmp_path)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    assert 0.45 * free_bytes < area.budget_bytes < 0.55 * free_bytes


def test_unusable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"staging_dir must be a directory, got '{tmp_path}/none'"):
        StagingArea(tmp_path / "none", 1, shared=False)
    with pytest.raises(UserError, match=r"staging_bytes must be at most the [0-9,]+ bytes that are free, got 1,000,0"):
        StagingArea(tmp_path, 10**18, shared=False)


def test_directory_is_private_and_goes_with_the_run(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=False) as area:
        assert stat.S_IMODE(area.directory.stat().st_mode) == 0o700
        (area.directory / "anything").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_shared_directory_loses_only_what_is_ours(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=True) as other:
        with StagingArea(tmp_path, 1, shared=True) as area:
            ours, theirs = (sample_path(tmp_path, each.new_request_id(3)) for each in (area, other))
            for path in (ours, theirs, tmp_path / "plugin-1.json"):
                path.write_text("")
        assert not ours.exists()
        assert theirs.exists()
        assert (tmp_path / "plugin-1.json").exists()


def test_sample_that_comes_after_a_run_was_stopped_is_found_by_the_next(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, 1, shared=True)
    area.__enter__()
    late = sample_path(tmp_path, area.new_request_id(3))
    area.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    late.write_text("")
    with StagingArea(tmp_path, 1, shared=True):
        assert not late.exists()
    assert list(tmp_path.iterdir()) == []


def test_sample_that_comes_after_a_killed_run_was_cleaned_up_is_found_by_the_next(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=True) as gone, StagingArea(tmp_path, 1, shared=True) as living:
        late, theirs = (sample_path(tmp_path, each.new_request_id(3)) for each in (gone, living))
        gone.__exit__(None, None, None)
        late.write_text("")
        theirs.write_text("")
        remove_dead_runs(tmp_path)
        assert not late.exists()
        assert theirs.exists()
        gone.__enter__()


def test_what_others_have_there_under_such_names_stays(tmp_path: Path) -> None:
    names = [
        "eagle3-llama-8b-drafter.safetensors", "eagle3-12-of-mine.safetensors", "eagle3-3-0123abcd-7.txt",
        "eagle3-3-0123ABCD-7.safetensors", "eagle3-3-0123abcd-x.partial",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / "eagle3-llama-8b-drafter").mkdir()
    remove_dead_runs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "eagle3-llama-8b-drafter"])


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_what_a_killed_run_left_is_found_and_a_living_one_is_left_alone(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", LIVING_RUN, str(tmp_path), kind]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        path = Path(run.stdout.readline().strip())
        remove_dead_runs(tmp_path)
        assert path.exists()
        run.send_signal(signal.SIGKILL)
    remove_dead_runs(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sample_is_read_once(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=False) as area:
        request = area.new_request_id(2)
        tensors = {
            "input_ids": torch.tensor([4, 5]),
            "last_hidden_states": torch.ones(2, 3),
            "aux_hidden_states.0": torch.zeros(2, 9),
        }
        Handover(area.directory).submit([Part(request, 2, 0, 0, 2)], tensors)
        area.wait_for(request, timeout_seconds=10)
        assert area.take(request).input_ids.tolist() == [4, 5]
        assert list(area.directory.iterdir()) == []


def test_reason_why_a_sample_does_not_come_is_passed_on(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=False) as area:
        request = area.new_request_id(2)
        started = time.monotonic()
        with pytest.raises(SampleError, match=r"answered but wrote nothing to .*\.safetensors in 0 s"):
            area.wait_for(request, timeout_seconds=0.1)
        assert time.monotonic() - started < 5
        with pytest.raises(SampleError, match=r"the server died before it wrote .*\.safetensors"):
            area.wait_for(request, timeout_seconds=10, lives=lambda: False)
        write_json(error_path(area.directory, request), {"error": "a hole"})
        with pytest.raises(SampleError, match=r"^a hole$"):
            area.wait_for(request, timeout_seconds=10)
        area.discard(request)
        assert list(area.directory.iterdir()) == []


def test_last_started_server_says_what_it_records(tmp_path: Path) -> None:
    with StagingArea(tmp_path, 1, shared=True) as area:
        assert area.recorded_boundaries() is None
        for pid, boundaries in ((900, [1, 2]), (7, [3, 4])):
            path = tmp_path / f"plugin-{pid}.json"
            write_json(path, {"boundaries": boundaries})
            os.utime(path, (1000 - pid, 1000 - pid))
        assert area.recorded_boundaries() == [3, 4]
