"""A night of kills, full disks and two writers: what was reported written is there, bit for bit and once."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_stores import MANIFEST, assert_same, make_sample, write_store

from eagle3.config import UserError
from eagle3.features import claim
from eagle3.features.index import verify_store
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

HERE = Path(__file__).resolve().parent
NUM_KILLS = 50
PHASES = ("write", "fsync", "rename", "index")

# What all the processes below share. `write_on` writes samples in order, a shard of two at a time, and reports each
# shard that is on the disk through a pipe. `signalled_at` has the process send itself a signal at a counted call.
COMMON = """
import functools, json, os, random, resource, signal, sys, time
from pathlib import Path
from eagle3.config import UserError
from eagle3.features import index, shard, writer as writers
from eagle3.features.index import verify_store
from eagle3.features.store import FeatureStore
from tiny_stores import MANIFEST, assert_same, make_sample

make_sample = functools.cache(make_sample)

def signalled_at(phase, count, number=signal.SIGKILL):
    calls = iter(range(count))
    def counted(real):
        def call(*args, **kwargs):
            if next(calls, None) is None:
                os.kill(os.getpid(), number)
            return real(*args, **kwargs)
        return call
    if phase == "write":
        shard.bytes_of = counted(shard.bytes_of)
    elif phase == "fsync":
        os.fsync = counted(os.fsync)
    elif phase == "rename":
        os.link = counted(os.link)
    elif phase == "index":
        writers.append_to_index = counted(writers.append_to_index)

def write_on(path, numbers, report=lambda number: None, writer=0):
    with writers.FeatureWriter(path, MANIFEST, shard_bytes=2**30, writer=writer) as store:
        for count, number in enumerate(numbers):
            if make_sample(number).sample_id not in store.stored_ids:
                store.write(make_sample(number))
            if count % 2:
                store.flush()
                report(number)

def check(path, numbers):
    problems = verify_store(path)
    assert problems == [], problems
    store = FeatureStore(path)
    assert len(store) <= len(numbers)
    wanted = {make_sample(number).sample_id: make_sample(number) for number in numbers}
    for index in range(len(store)):
        assert_same(store[index], wanted[store[index].sample_id])
    return {entry.sample_id for entry in store.entries}
"""

KILLS = (
    COMMON
    + """
path, num_kills, chosen = Path(sys.argv[1]), int(sys.argv[2]), random.Random(7)
numbers, hits, reported, killed = range(2000), [], set(), 0
while killed < num_kills:
    # Every other kill is at a counted call of a phase in turn, the others whenever it comes.
    phase = ("write", "fsync", "rename", "index")[killed // 2 % 4] if killed % 2 else "any"
    count, seconds = chosen.randrange(1, 4), chosen.uniform(0.0, 0.06)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        signalled_at(phase, count)
        write_on(path, numbers, report=lambda number: os.write(theirs, b"%d " % number))
        time.sleep(60 if phase == "any" else 0)  # on a fast machine it may be done before its kill comes
        os._exit(0)
    os.close(theirs)
    if phase == "any":
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (phase, count, status)
    killed += 1
    hits.append(phase)
    reported |= {int(number) for number in os.read(ours, 2**16).split()}
    os.close(ours)
    if not (path / "manifest.json").exists():
        assert not reported
        continue
    stored = check(path, numbers)
    lost = [number for number in reported if make_sample(number).sample_id not in stored]
    assert not lost, (phase, count, lost)
stored_before = len(stored)
write_on(path, range(max(reported, default=0) + 20))
stored = check(path, numbers)
temporary = [each.name for each in path.glob("*.tmp")]
print(json.dumps({"hits": hits, "stored": stored_before, "in_the_end": len(stored), "temporary": temporary}))
"""
)

FULL = (
    COMMON
    + """
def fill_and_go_on(path, how, seed):
    chosen, message = random.Random(seed), None
    write_on(path, range(4))
    ballast = path.parent / "ballast"
    if how == "tmpfs":
        usage = os.statvfs(path)
        ballast.write_bytes(b"x" * max(0, usage.f_bavail * usage.f_frsize - chosen.randrange(1, 40_000)))
    else:
        # No file may grow past this, wherever that is in a shard or an index.
        resource.setrlimit(resource.RLIMIT_FSIZE, (chosen.randrange(1, 4_000), resource.RLIM_INFINITY))
    try:
        write_on(path, range(200))
    except UserError as error:
        message = str(error)
    stored = check(path, range(200))
    if how == "tmpfs":
        ballast.unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write_on(path, range(len(stored) + 6))
    return {"message": message, "stored": len(stored), "in_the_end": len(check(path, range(200)))}

root, how, num_runs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print(json.dumps([fill_and_go_on(root / str(seed), how, seed) for seed in range(num_runs)]))
"""
)

TWO_WRITERS = (
    COMMON
    + """
path, children = Path(sys.argv[1]), []
for number in range(3):
    child = os.fork()
    if child == 0:
        write_on(path, range(number, 60, 3), writer=number)
        os._exit(0)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
print(json.dumps({"codes": codes, "stored": len(check(path, range(60)))}))
"""
)


def run(script: str, *arguments: object, prefix: Sequence[str] = ()) -> Any:
    """Runs a script in a process of its own and returns what it printed."""
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_fifty_kills_lose_nothing_that_was_reported_and_double_nothing(tmp_path: Path) -> None:
    result = run(KILLS, tmp_path / "store", NUM_KILLS)
    assert len(result["hits"]) == NUM_KILLS
    for phase in PHASES:
        assert result["hits"].count(phase) >= 6, result["hits"]
    assert result["hits"].count("any") == 25
    assert 0 < result["stored"] <= result["in_the_end"]
    assert result["temporary"] == []


def assert_refused_and_gone_on_with(results: list[dict[str, Any]], seen: str) -> None:
    for result in results:
        assert re.search(rf"the disk must take the (next shard|index) of .*, got .*{seen}", result["message"]), result
        assert 4 <= result["stored"] < 200
        assert result["in_the_end"] == result["stored"] + 6


def test_a_disk_that_fills_up_anywhere_leaves_whole_shards(tmp_path: Path) -> None:
    assert_refused_and_gone_on_with(run(FULL, tmp_path, "limit", 6), "File too large")


def test_a_full_tmpfs_leaves_whole_shards(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    shell = ["unshare", *as_root, "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*shell, mount], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs; the limit on file sizes stands in for it")
    results = run(FULL, tmp_path, "tmpfs", 3, prefix=[*shell, f'{mount} && exec "$@"', "sh"])
    assert_refused_and_gone_on_with(results, "(bytes free|No space left on device)")


def test_writers_of_one_store_take_nothing_from_each_other(tmp_path: Path) -> None:
    result = run(TWO_WRITERS, tmp_path / "store")
    assert result == {"codes": [0, 0, 0], "stored": 60}
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert {"index.jsonl", "index-1.jsonl", "index-2.jsonl"} <= names
    assert len([name for name in names if name.startswith("shard-")]) == 30


def test_a_store_is_not_opened_for_writing_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_store(tmp_path, range(6))
    with monkeypatch.context() as patch:
        patch.setattr(claim, "write_index", fail)
        with pytest.raises(
            UserError, match=r"the disk must take the index of the store, got \[Errno 28\] No space left"
        ):
            FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
    assert verify_store(tmp_path) == []
    FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30).close()  # the lock is free


def test_two_writers_need_two_numbers(tmp_path: Path) -> None:
    with (
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, writer=1),
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, writer=2),
        pytest.raises(UserError, match=r"one writer at a time under each number, got .* writes as number 1 .*store\."),
    ):
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, writer=1)


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> Callable[..., None]:
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(fcntl, "flock", fail(errno.ENOSYS))
    write_store(tmp_path, range(2))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"no file locks at {tmp_path / 'lock'} ([Errno 38] ")
    monkeypatch.setattr(fcntl, "flock", fail(errno.EIO))
    with pytest.raises(OSError, match="Errno 5"):
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)


def test_a_shard_number_that_was_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    first = FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, writer=1) as second:
        second.write(make_sample(0))
    first.write(make_sample(1))
    first.close()
    store = FeatureStore(tmp_path)
    assert [(entry.sample_id, entry.shard) for entry in store.entries] == [
        (make_sample(0).sample_id, 0),
        (make_sample(1).sample_id, 1),
    ]
    for index in range(2):
        assert_same(store[index], make_sample(index))
    assert store.verify() == []


def test_a_missing_index_is_made_again_by_the_next_writer(tmp_path: Path) -> None:
    write_store(tmp_path, range(6))
    (tmp_path / "index.jsonl").unlink()
    assert verify_store(tmp_path) == []
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        assert len(writer.stored_ids) == 6
    assert (tmp_path / "index.jsonl").read_text().count("\n") == 3


def test_a_store_of_a_later_format_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    (problem,) = verify_store(tmp_path)
    assert problem.startswith(f"format_version must be 1, got 2 ({manifest}); ")
    for opened in (FeatureStore, lambda path: FeatureWriter(path, MANIFEST, shard_bytes=2**30)):
        with pytest.raises(UserError, match=r"format_version must be 1, got 2 \(.*manifest.json\); capture the store"):
            opened(tmp_path)
