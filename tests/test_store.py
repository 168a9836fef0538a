"""Stores come back bit for bit, survive kill -9 at every point, and refuse what does not belong in them."""

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Literal, NamedTuple

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from eagle3.config import UserError
from eagle3.features import shard as shard_module
from eagle3.features import writer as writer_module
from eagle3.features.index import verify_store
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, is_held_out, supervised_rows
from eagle3.features.shard import IndexEntry, shard_path, sync_shard, write_shard
from eagle3.features.store import FeatureStore
from eagle3.features.stored import COLUMNS, StoredSample
from eagle3.features.writer import SHARDS_BEHIND, FeatureWriter, QuotaReached

HIDDEN, VOCAB = 8, 50
EXACT_COLUMNS = [
    "input_ids", "last_rows", "target_logprobs", "target_logz", "aux_hidden_states", "last_hidden_states", "loss_mask",
]  # fmt: skip
MANIFEST = Manifest(
    target_path="models/tiny",
    target_config_digest="c0",
    target_revision="r0",
    target_quantization=None,
    engine="transformers",
    engine_version="5.17.0",
    capture_layers=(2, 4, 5),
    dtype="bfloat16",
    codec="bf16",
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    tokenizer_digest="t0",
    chat_template_digest="m0",
    prompts_digest="p0",
    last_rows="supervised",
    generation={"temperature": 0.0, "seed": 0},
    git_commit="abc",
)


def make_sample(number: int, dtype: torch.dtype = torch.bfloat16) -> FeatureSample:
    """Sample `number` is the same in every process; its length and its optional fields' values follow from it."""
    generator = torch.Generator().manual_seed(number)
    num_tokens = 4 + number % 5
    loss_mask = torch.arange(num_tokens) >= 2
    rows = supervised_rows(loss_mask)
    return FeatureSample(
        sample_id=f"sample-{number} \u00e9\U0001f600",  # ids are escaped in the header
        input_ids=torch.randint(VOCAB, (num_tokens,), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        aux_hidden_states=torch.randn(num_tokens, 3 * HIDDEN, generator=generator).to(dtype),
        last_hidden_states=torch.randn(rows.numel(), HIDDEN, generator=generator).to(dtype),
        last_rows=rows,
        target_logz=torch.randn(rows.numel(), generator=generator),
        target_logprobs=torch.randn(num_tokens, generator=generator),
    )


def assert_same(seen: FeatureSample, wanted: FeatureSample) -> None:
    assert seen.sample_id == wanted.sample_id
    for name in EXACT_COLUMNS:
        left, right = getattr(seen, name), getattr(wanted, name)
        if right is None:
            assert left is None, name
            continue
        assert left is not None, name
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name


def write_store(path: Path, numbers: range, samples_per_shard: int = 2) -> None:
    with FeatureWriter(path, MANIFEST, shard_bytes=2**30) as writer:
        for count, number in enumerate(numbers, start=1):
            writer.write(make_sample(number))
            if count % samples_per_shard == 0:
                writer.flush()


def write_all(writer: FeatureWriter, numbers: range) -> None:
    for number in numbers:
        writer.write(make_sample(number))


def contents(store: FeatureStore) -> dict[str, FeatureSample]:
    return {store[i].sample_id: store[i] for i in range(len(store))}


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("optional", [True, False])
def test_samples_come_back_bit_for_bit(
    tmp_path: Path, codec: Literal["bf16", "fp32"], dtype: torch.dtype, optional: bool
) -> None:
    samples = [make_sample(number, dtype) for number in range(7)]
    if not optional:
        samples = [replace(sample, target_logz=None, target_logprobs=None) for sample in samples]
    with FeatureWriter(
        tmp_path, replace(MANIFEST, codec=codec, dtype=str(dtype).removeprefix("torch.")), shard_bytes=6000
    ) as writer:
        for sample in samples:
            writer.write(sample)
    store = FeatureStore(tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) > 1
    assert len(store) == 7
    assert store.num_tokens == sum(sample.input_ids.numel() for sample in samples)
    for i, sample in enumerate(samples):
        assert_same(store[i], sample)
        assert store.entries[i].num_supervised == int(sample.loss_mask.sum())
    assert store.verify() == []


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


def test_a_sample_without_supervised_rows_is_stored(tmp_path: Path) -> None:
    sample = make_sample(0)
    none = torch.zeros(0, dtype=torch.int32)
    empty = replace(
        sample,
        loss_mask=torch.zeros_like(sample.loss_mask),
        last_rows=none,
        last_hidden_states=sample.last_hidden_states[none],
        target_logz=torch.zeros(0),
    )
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        writer.write(empty)
        writer.write(make_sample(1))
    store = FeatureStore(tmp_path)
    assert_same(store[0], empty)
    assert_same(store[1], make_sample(1))


def test_shards_are_readable_with_safetensors_alone(tmp_path: Path) -> None:
    write_store(tmp_path, range(3), samples_per_shard=3)
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    samples = [make_sample(number) for number in range(3)]
    for name in EXACT_COLUMNS:
        assert torch.equal(tensors[name], torch.cat([getattr(sample, name) for sample in samples])), name


def test_the_checksum_is_xxh3_128_of_id_names_and_bytes(tmp_path: Path) -> None:
    write_store(tmp_path, range(1))
    sample, digest = make_sample(0), xxhash.xxh3_128()
    digest.update(sample.sample_id.encode())
    for name in EXACT_COLUMNS:
        digest.update(name.encode())
        digest.update(getattr(sample, name).view(torch.uint8).numpy().tobytes())
    assert FeatureStore(tmp_path).entries[0].checksum == digest.hexdigest()


def test_the_page_of_the_format_names_the_columns_in_the_order_of_the_checksum() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "STORE.md").read_text()
    (listed,) = re.findall(r"in this order: ([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", listed) == list(COLUMNS)


def test_samples_outlive_their_shard(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    sample = FeatureStore(tmp_path)[1]
    with (tmp_path / "shard-00000.safetensors").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "shard-00000.safetensors").stat().st_size)
    assert_same(sample, make_sample(1))


def test_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store"
    write_store(path, range(3))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    modes = {each.name: oct(stat.S_IMODE(each.stat().st_mode)) for each in path.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes
    assert set(modes) == {"manifest.json", "index.jsonl", "lock", "shard-00000.safetensors", "shard-00001.safetensors"}


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
from test_store import MANIFEST, make_sample

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


def test_index_rebuilt_from_the_shards_equals_the_one_that_was_written(tmp_path: Path) -> None:
    write_store(tmp_path, range(7))
    index = tmp_path / "index.jsonl"
    written, entries = index.read_text(), FeatureStore(tmp_path).entries
    index.unlink()
    assert FeatureStore(tmp_path).entries == entries
    assert not index.exists()  # a reader writes nothing
    FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30).close()
    assert index.read_text() == written


def test_a_writer_that_is_left_by_an_exception_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupted() -> None:
        with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
            writer.write(make_sample(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(FeatureStore(tmp_path)) == 1


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
    # Another commit alone is no other capture.
    FeatureWriter(tmp_path, replace(MANIFEST, git_commit="def"), shard_bytes=2**30).close()
    assert FeatureStore(tmp_path).manifest.git_commit == "abc"


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"directory of a new store must be empty, got thesis.tex in it"):
        FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30)


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold manifest.json, got a path without one"):
        FeatureStore(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:40], r"must be JSON with a format_version, got JSONDecodeError"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 7'), r"must be 1, got 7"),
        (
            lambda text: text.replace('"engine":', '"motor":'),
            r"must have the fields of format 1, got no engine, an unknown motor",
        ),
        (lambda text: text.replace('"format_version": 1', '"format_version": true'), r"must be 1, got True"),
        (lambda text: text.replace('"bfloat16"', '"float32"'), r"fp32, int8 or fp8 for states in float32, got bf16"),
        (lambda text: text.replace('"last_rows": "supervised"', '"last_rows": "some"'), r"or all, got 'some'"),
        (lambda text: text.replace('"tokenizer_digest": "t0"', '"tokenizer_digest": 5'), r"must be text, got 5"),
        (lambda text: text.replace('"git_commit": "abc"', '"git_commit": 5'), r"must be text or null, got 5"),
        (lambda text: text.replace(f'"hidden_size": {HIDDEN}', '"hidden_size": 0'), r"a positive integer, got 0"),
        (lambda text: re.sub(r'"capture_layers": \[[^]]*\]', '"capture_layers": null', text), r"integers, got None"),
        (lambda text: text.replace(f'"vocab_size": {VOCAB}', '"vocab_size": "x"'), r"vocab_size must be .* got 'x'"),
        (lambda text: re.sub(r'"generation": \{[^}]*\}', '"generation": 5', text), r"must be an object, got 5"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    write_store(tmp_path, range(2))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(UserError, match=message):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_truncated_shard_is_reported_by_open_and_verify(tmp_path: Path, with_index: bool) -> None:
    write_store(tmp_path, range(4))
    store = FeatureStore(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 10)
    message = f"must be a whole safetensors file, got ValueError('a header for {size} bytes in a file of {size - 10}')"
    if not with_index:
        (tmp_path / "index.jsonl").unlink()
    for opened in (FeatureStore, lambda path: FeatureWriter(path, MANIFEST, shard_bytes=2**30)):
        with pytest.raises(UserError, match=re.escape(message)):
            opened(tmp_path)
    (problem,) = store.verify()
    assert message in problem
    assert str(shard) in problem


def test_verify_finds_any_flipped_byte(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shard = tmp_path / "shard-00000.safetensors"
    whole = shard.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    begin = whole.index(b"sample-0")
    places = [begin, *range(8 + header_bytes, len(whole), 97), len(whole) - 1]
    store = FeatureStore(tmp_path)
    for place in places:
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert store.verify(), place
    shard.write_bytes(whole)
    assert store.verify() == []


def test_verify_names_the_sample_the_file_and_both_checksums(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shard = tmp_path / "shard-00000.safetensors"
    whole = bytearray(shard.read_bytes())
    whole[-1] ^= 1  # the last mask byte of the last sample
    shard.write_bytes(whole)
    store = FeatureStore(tmp_path)
    (problem,) = store.verify()
    assert re.search(rf"sample 'sample-1 .*must have the checksum {store.entries[1].checksum}, got \w+", problem)
    assert str(shard) in problem


def test_verify_finds_a_sample_that_is_stored_twice(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / "shard-00001.safetensors")
    problems = verify_store(tmp_path)
    assert len(problems) == 2
    assert all("must be stored once, got 'sample-" in problem for problem in problems)
    with pytest.raises(UserError, match=r"stored once, got 'sample-0 .*' in shard-00000.* and shard-00001.*move the"):
        FeatureStore(tmp_path)


def test_a_header_without_samples_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'{"samples":', b'{"simples":'))
    store = FeatureStore(tmp_path)  # the index has not noticed
    assert any("a shard's header must list its samples, got KeyError" in problem for problem in store.verify())


def test_verify_compares_the_index_with_the_headers(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    index = tmp_path / "index.jsonl"
    index.write_text(index.read_text().replace("sample-0", "sample-9"))
    (problem,) = FeatureStore(tmp_path).verify()
    assert "the index must list the samples of its shards, got others" in problem


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"offset": 0', '"offset": 3'),
        ('"offset": 0', '"offset": 99999999'),
        ('"num_supervised": 2', '"num_supervised": 3'),
    ],
)
def test_an_index_that_lies_is_refused_before_a_sample_is_read(tmp_path: Path, old: str, new: str) -> None:
    write_store(tmp_path, range(2))
    index = tmp_path / "index.jsonl"
    index.write_text(index.read_text().replace(old, new, 1))
    store = FeatureStore(tmp_path)
    for read in (lambda: store[1], lambda: store.loss_mask(0), lambda: store.token_counts([0])):
        with pytest.raises(UserError, match=r"index.jsonl must list the samples of its shards as they are, got others"):
            read()
    index.unlink()
    assert_same(FeatureStore(tmp_path)[0], make_sample(0))


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\x00\n",
        b"null\n{}\n5\n",
        b'{"shard": 0, "num_bytes": 3, "samples": [{}]}\n',
        b'{"shard": "0", "num_bytes": 3, "samples": []}\n',
        b'{"shard": [], "num_bytes": 3, "samples": []}\n',
        b'{"shard": -1, "num_bytes": 3, "samples": []}\n',
        b'{"shard": 0, "num_bytes": null, "samples": []}\n',
    ],
)
def test_lines_that_are_no_index_are_read_from_the_shards(tmp_path: Path, damage: bytes) -> None:
    write_store(tmp_path, range(2))
    (tmp_path / "index.jsonl").write_bytes(damage)
    assert_same(FeatureStore(tmp_path)[1], make_sample(1))


def test_a_flipped_byte_is_noticed_when_its_sample_is_read(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shard = tmp_path / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # in the loss mask of the last sample
    shard.write_bytes(data)
    store = FeatureStore(tmp_path)
    assert_same(store[0], make_sample(0))
    with pytest.raises(UserError, match=r"sample 'sample-1 .*' must have the checksum \w+, got \w+ \(.*shard-00000"):
        store[1]


def test_a_file_that_is_called_like_a_shard_is_named(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / "shard-00000 (copy).safetensors")
    with pytest.raises(UserError, match=r"must be named shard-NNNNN.safetensors, got shard-00000 \(copy\)"):
        FeatureStore(tmp_path)


def test_a_missing_shard_is_reported_until_the_index_is_deleted(tmp_path: Path) -> None:
    write_store(tmp_path, range(6))
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"got none of shard-00001.safetensors .* to go on without their 2 samples"):
        FeatureStore(tmp_path)
    (tmp_path / "index.jsonl").unlink()
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        writer.write(make_sample(2))
        writer.write(make_sample(3))
    store = FeatureStore(tmp_path)
    assert len(store) == 6
    assert store.verify() == []


def test_split_follows_the_ids_and_is_complete(tmp_path: Path) -> None:
    write_store(tmp_path, range(20))
    store = FeatureStore(tmp_path)
    train, held_out = store.split(1 / 3)
    assert sorted(train + held_out) == list(range(20))
    assert held_out
    assert all(is_held_out(store.entries[i].sample_id, 1 / 3) == (i in held_out) for i in range(20))


def test_answers_are_the_runs_of_supervised_tokens(tmp_path: Path) -> None:
    masks = [[0, 1, 1, 0, 0, 1], [1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    samples = [make_sample(2) for _ in masks]  # of six tokens
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        for number, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
            loss_mask = torch.tensor(mask, dtype=torch.bool)
            rows = supervised_rows(loss_mask)
            last_states = torch.zeros(len(rows), HIDDEN, dtype=torch.bfloat16)
            changes: dict[str, Any] = {"loss_mask": loss_mask, "last_rows": rows, "last_hidden_states": last_states}
            writer.write(dataclasses.replace(sample, sample_id=str(number), target_logz=None, **changes))
    store = FeatureStore(tmp_path)
    ids = samples[0].input_ids.tolist()
    expected = [[ids[1:3], ids[5:]], [ids[:1], ids[2:4]], [], [ids]]
    assert [[run.tolist() for run in store.answers(index)] for index in range(4)] == expected


def test_token_counts_are_those_of_supervised_tokens(tmp_path: Path) -> None:
    write_store(tmp_path, range(6))
    store = FeatureStore(tmp_path)
    wanted = torch.zeros(VOCAB, dtype=torch.int64)
    for number in (1, 4):
        sample = make_sample(number)
        for token, counted in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            wanted[token] += counted
    assert torch.equal(store.token_counts([1, 4]), wanted)


def test_normalisers_are_asked_for_by_sample(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        writer.write(make_sample(0))
        writer.flush()
        writer.write(replace(make_sample(1), target_logz=None))
    store = FeatureStore(tmp_path)
    assert [store.has_normalisers(indices) for indices in ([0], [1], [0, 1])] == [True, False, False]


def test_no_pickle_is_read_or_written(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    for path in tmp_path.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), path
    assert json.loads((tmp_path / "manifest.json").read_text())["capture_layers"] == [2, 4, 5]
