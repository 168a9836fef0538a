"""A writer survives kill -9 at every point, full disks and quotas, and refuses what does not belong in its store."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
from tiny_stores import HIDDEN, MANIFEST, assert_same, contents, make_sample, write_all, write_store

from eagle3.config import UserError
from eagle3.features import shard as shard_module
from eagle3.features import writer as writer_module
from eagle3.features.shard import IndexEntry, shard_path, sync_shard, write_shard
from eagle3.features.store import FeatureStore
from eagle3.features.stored import StoredSample
from eagle3.features.writer import SHARDS_BEHIND, FeatureWriter, QuotaReached


def test_a_shard_is_sent_to_the_disk_in_blocks_while_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(shard_module, "DISK_BLOCK", 200)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, count, advice: sent.append((offset, count)))
    write_store(tmp_path, range(7), samples_per_shard=7)
    ends = [0, *(offset + count for offset, count in sent)]
    assert [offset for offset, _ in sent] == ends[:-1]
    assert len(sent) > 10
    assert all(count >= 200 for _, count in sent)
    assert shard_path(tmp_path, 0).stat().st_size - ends[-1] < 200
    monkeypatch.undo()
    assert FeatureStore(tmp_path).verify() == []


def test_shards_are_filled_while_those_before_them_are_on_their_way_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, waited = Event(), []

    def wait_for_the_next(path: Path) -> None:
        waited.append(filled.wait(timeout=20))
        sync_shard(path)

    def fill(path: Path, samples: list[StoredSample], checksums: list[str]) -> list[IndexEntry]:
        entries = write_shard(path, samples, checksums)
        if samples[0].sample_id == make_sample(SHARDS_BEHIND).sample_id:
            filled.set()
        return entries

    monkeypatch.setattr(writer_module, "sync_shard", wait_for_the_next)
    monkeypatch.setattr(writer_module, "write_shard", fill)
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=1) as writer:
        write_all(writer, range(4))
    assert waited == [True] * 4
    monkeypatch.undo()
    store = FeatureStore(tmp_path)
    assert [entry.sample_id for entry in store.entries] == [make_sample(number).sample_id for number in range(4)]
    assert store.verify() == []


class KillPoint(NamedTuple):
    """Where the writer is killed, and how many of six samples are whole by then (four are flushed before it)."""

    phase: str
    num_stored: int


KILL_POINTS = [
    KillPoint("buffered", 4),
    KillPoint("writing", 4),
    KillPoint("renaming", 4),
    KillPoint("indexing", 6),
    KillPoint("appending", 6),
]
# Each phase dies in a child of its own; the third shard is the one that is under way.
KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from eagle3.features import index, shard, writer as writers
from tiny_stores import MANIFEST, make_sample

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half_a_line(path, number, record):
    with (path / index.INDEX_NAME).open("a") as file:
        file.write(index._line(record)[:100])
    die()

for phase in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    writer = writers.FeatureWriter(Path(sys.argv[1]) / phase, MANIFEST, shard_bytes=2**30)
    for number in range(6):
        if number == 5 and phase == "buffered":
            die()
        writer.write(make_sample(number))
        if number == 5:
            if phase == "writing":
                calls = iter(range(5))
                whole = shard.bytes_of
                shard.bytes_of = lambda tensor: whole(tensor) if next(calls, None) is not None else die()
            if phase == "renaming":
                os.link = die
            if phase == "indexing":
                writers.append_to_index = die
            if phase == "appending":
                writers.append_to_index = half_a_line
        if number % 2:
            writer.flush()
"""


@pytest.fixture(scope="module")
def killed_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    phases = [point.phase for point in KILL_POINTS]
    subprocess.run([sys.executable, "-c", KILLED_WRITER, str(root), *phases], env=environment, check=True)
    return root


@pytest.mark.parametrize("point", KILL_POINTS, ids=lambda point: point.phase)
def test_kill_loses_only_what_was_buffered_and_doubles_nothing(
    killed_stores: Path, tmp_path: Path, point: KillPoint
) -> None:
    path = tmp_path / "store"
    shutil.copytree(killed_stores / point.phase, path)
    assert len(list(path.glob("shard-0-*.tmp"))) == (point.phase in ("writing", "renaming"))
    stored = {make_sample(number).sample_id for number in range(point.num_stored)}
    # A reader sees the whole shards before any writer has tidied up.
    assert set(contents(FeatureStore(path))) == stored
    with FeatureWriter(path, MANIFEST, shard_bytes=2**30) as writer:
        assert list(path.glob("*.tmp")) == []
        assert writer.stored_ids == stored
        for number in range(9):
            if make_sample(number).sample_id not in writer.stored_ids:
                writer.write(make_sample(number))
    store = FeatureStore(path)
    assert len(store) == 9
    assert store.verify() == []
    for number in range(9):
        assert_same(contents(store)[make_sample(number).sample_id], make_sample(number))


def test_a_writer_that_is_left_by_an_exception_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupted() -> None:
        with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
            writer.write(make_sample(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(FeatureStore(tmp_path)) == 1


def test_an_interrupt_once_a_shard_is_on_its_way_stores_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FeatureWriter(tmp_path, MANIFEST, shard_bytes=1)
    submit = writer._filler.submit

    def submit_and_interrupt(*arguments: Any) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer._filler, "submit", submit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.write(make_sample(0))
    writer.write(make_sample(1))
    writer.close()
    assert sorted(contents(FeatureStore(tmp_path))) == sorted([make_sample(0).sample_id, make_sample(1).sample_id])


def test_a_stored_sample_is_not_stored_again(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    with (
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer,
        pytest.raises(AssertionError, match=r"'sample-1 .*' is stored already"),
    ):
        writer.write(make_sample(1))


def test_a_sample_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    sample = make_sample(0)
    wide = replace(sample, aux_hidden_states=torch.zeros(4, 2 * HIDDEN, dtype=torch.bfloat16))
    exact = replace(sample, last_hidden_states=sample.last_hidden_states.float())
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        with pytest.raises(AssertionError, match=r"aux_hidden_states must be \(\(4, 24\), .* got \(\(4, 16\)"):
            writer.write(wide)
        with pytest.raises(AssertionError, match=r"last_hidden_states must be .*bfloat16\), got .*float32"):
            writer.write(exact)


def test_a_second_writer_is_refused_and_the_lock_goes_with_the_first(tmp_path: Path) -> None:
    message = (
        rf"one writer at a time under each number, got a second one while process {os.getpid()} writes as number 0"
    )
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30), pytest.raises(UserError, match=message):
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
    FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30).close()


def test_the_quota_is_never_passed_and_what_fits_is_kept(tmp_path: Path) -> None:
    def write_many() -> None:
        with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, quota_bytes=9000) as writer:
            for number in range(100):
                writer.write(make_sample(number))

    with pytest.raises(QuotaReached, match=r"must stay within store.quota_bytes=9000, got \d+ bytes"):
        write_many()
    num_stored = len(FeatureStore(tmp_path))
    assert 0 < num_stored < 100
    assert sum(each.stat().st_size for each in tmp_path.glob("shard-*")) <= 9000
    # Resumed with room, it goes on where it stopped.
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30, quota_bytes=2**20) as writer:
        writer.write(make_sample(num_stored))
    assert len(FeatureStore(tmp_path)) == num_stored + 1


def full_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(path: Path, *_: object) -> None:
        path.write_bytes(b"half a shard")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module, "write_shard", write_some)


def full_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize(
    ("fill", "seen"), [(full_on_write, "No space left on device"), (full_before, "got 10 bytes free")]
)
def test_a_full_disk_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Callable[[pytest.MonkeyPatch], None], seen: str
) -> None:
    write_store(tmp_path, range(2))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.name != "lock"}
    writer = FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
    writer.write(make_sample(2))
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(UserError, match=rf"the disk must take the next shard of \d+ bytes, .*{seen}"):
            writer.flush()
        writer.close()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.name != "lock"} == before
    write_store(tmp_path, range(2, 4))
    assert FeatureStore(tmp_path).verify() == []


def test_a_shard_that_the_disk_does_not_take_ends_those_after_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, range(2))

    failed: list[Path] = []

    def fail_once(path: Path) -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        sync_shard(path)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "sync_shard", fail_once)
        writer = FeatureWriter(tmp_path, MANIFEST, shard_bytes=1)
        with pytest.raises(UserError, match=r"the disk must take the next shard of \d+ bytes, .*quota exceeded"):
            write_all(writer, range(2, 6))
        writer.close()
    assert list(tmp_path.glob("*.tmp")) == []
    assert set(contents(FeatureStore(tmp_path))) == {make_sample(number).sample_id for number in range(2)}
    write_store(tmp_path, range(2, 4))
    assert FeatureStore(tmp_path).verify() == []


def test_other_errors_of_the_disk_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
    writer.write(make_sample(0))
    monkeypatch.setattr(writer_module, "write_shard", fail)
    with pytest.raises(OSError, match="Input/output error"):
        writer.close()


def test_a_store_of_other_settings_is_refused_with_both_values_of_each(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    other = replace(MANIFEST, capture_layers=(1, 4, 5), prompts_digest="p1", generation={"temperature": 0.7, "seed": 0})
    with pytest.raises(UserError) as caught:
        FeatureWriter(tmp_path, other, shard_bytes=2**30)
    message = str(caught.value)
    assert "  capture_layers must be (2, 4, 5), as stored, got (1, 4, 5)\n" in message
    assert "  generation.temperature must be 0.0, as stored, got 0.7\n" in message
    assert "  prompts_digest must be 'p0', as stored, got 'p1'\n" in message
    assert message.count("as stored") == 3
    assert str(tmp_path) in message
    assert message.endswith("\nuse the stored settings, or another store.path")
    # Another commit alone is no other capture.
    FeatureWriter(tmp_path, replace(MANIFEST, git_commit="def"), shard_bytes=2**30).close()
    assert FeatureStore(tmp_path).manifest.git_commit == "abc"


def test_a_store_that_was_only_begun_may_be_deleted(tmp_path: Path) -> None:
    """As a failed gate leaves it; not if the target has answered, which may have taken days."""
    FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30).close()
    (tmp_path / "answers.jsonl").touch()
    other = replace(MANIFEST, prompts_digest="p1")
    with pytest.raises(UserError, match=f"delete {tmp_path}, which holds no sample and no answer yet, or use the"):
        FeatureWriter(tmp_path, other, shard_bytes=2**30)
    side = tmp_path / "writer-1"
    side.mkdir()
    (side / "answers.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"use the stored settings, or another store\.path"):
        FeatureWriter(tmp_path, other, shard_bytes=2**30)


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"directory of a new store must be empty, got thesis.tex in it"):
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)
