"""The index says what the shards hold, or is refused; verify finds what is damaged, and where."""

import os
import re
import shutil
from pathlib import Path

import pytest
from tiny_stores import MANIFEST, assert_same, make_sample, write_store

from eagle3.config import UserError
from eagle3.features.index import verify_store
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter


def test_index_rebuilt_from_the_shards_equals_the_one_that_was_written(tmp_path: Path) -> None:
    write_store(tmp_path, range(7))
    index = tmp_path / "index.jsonl"
    written, entries = index.read_text(), FeatureStore(tmp_path).entries
    index.unlink()
    assert FeatureStore(tmp_path).entries == entries
    assert not index.exists()  # a reader writes nothing
    FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30).close()
    assert index.read_text() == written


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
