"""A store is read from any file system with the same results, and looked into as a `datasets` object."""

import os
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pytest
import torch
from test_packs import bf16_samples, write_samples
from tiny_stores import assert_same, contents

from eagle3.commands.features import main
from eagle3.config import UserError
from eagle3.features.location import Location, Piece
from eagle3.features.store import FeatureStore
from eagle3.features.view import as_dataset, as_table
from eagle3.features.writer import FeatureWriter
from eagle3.training.packs import PackReader, on_device


def upload(path: Path, name: str) -> str:
    """Copies a store to a file system in memory and returns its URL."""
    url = f"memory://{name}"
    remote = fsspec.filesystem("memory")
    for file in path.iterdir():
        remote.pipe_file(f"/{name}/{file.name}", file.read_bytes())
    return url


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_store_behind_a_url_is_the_same_store(tmp_path: Path, codec: str) -> None:
    local = write_samples(tmp_path, "int8" if codec == "int8" else "bf16", bf16_samples())
    remote = FeatureStore(upload(tmp_path, f"same-{codec}"), cache_bytes=10**6)
    assert remote.manifest == local.manifest
    assert remote.entries == local.entries
    assert remote.verify() == []
    for index in range(len(local)):
        assert_same(remote[index], local[index])
    (ours,), (theirs,) = (
        on_device([PackReader(store, 2, pin=False).read([2, 0, 1])], torch.device("cpu")) for store in (local, remote)
    )
    assert torch.equal(ours.aux_hidden_states, theirs.aux_hidden_states)
    assert torch.equal(ours.input_ids, theirs.input_ids)


def test_damage_behind_a_url_is_named_as_it_is_on_a_disk(tmp_path: Path) -> None:
    write_samples(tmp_path, "bf16", bf16_samples())
    url = upload(tmp_path, "damaged")
    remote = fsspec.filesystem("memory")
    name = "/damaged/shard-00000.safetensors"
    content = bytearray(remote.cat_file(name))
    content[-1] ^= 1
    remote.pipe_file(name, bytes(content))
    (problem,) = FeatureStore(url).verify()
    assert "must have the checksum" in problem
    assert name in problem
    remote.pipe_file(name, bytes(content[:-10]))
    with pytest.raises(UserError, match=r"a header for \d+ bytes in a file of \d+'\) \(/damaged/shard-"):
        FeatureStore(url)
    with pytest.raises(
        UserError, match=r"a feature store must hold manifest\.json, got a path without one \(memory://no"
    ):
        FeatureStore("memory://nowhere")


def test_a_url_that_nothing_reads_is_named() -> None:
    with pytest.raises(
        UserError, match=r"must be one that fsspec reads, got 'gopher://x'.*; install the package for it"
    ):
        Location("gopher://x")


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_ends_early_says_so(tmp_path: Path, remote: bool) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    location = Location(upload(tmp_path, "short") if remote else tmp_path)
    into = bytearray(4)
    location.read_into("file", [Piece(1, memoryview(into))])
    assert bytes(into) == b"2345"
    with pytest.raises(EOFError, match="of 4 bytes at 3"):
        location.read_into("file", [Piece(3, memoryview(into))])


def test_reading_opens_no_file_for_good(tmp_path: Path) -> None:
    store = write_samples(tmp_path, "bf16", bf16_samples())
    before = len(os.listdir("/proc/self/fd"))
    for index in range(len(store)):
        store[index]
    assert len(os.listdir("/proc/self/fd")) == before


def test_masks_and_ids_take_one_read_of_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "small", "bf16", bf16_samples())
    merge = ["merge", str(tmp_path / "small"), str(tmp_path / "store"), "--shard-bytes", "8000"]
    assert main(merge) == 0
    store = FeatureStore(tmp_path / "store")
    num_shards = len({entry.shard for entry in store.entries})
    assert 1 < num_shards < len(store)
    url = FeatureStore(upload(tmp_path / "store", "masks"))
    masks = {store.entries[index].sample_id: store[index].loss_mask for index in range(len(store))}
    reads: list[str] = []
    real = Location.read_into

    def read_into(location: Location, name: str, pieces: Sequence[Piece]) -> None:
        reads.append(name)
        real(location, name, pieces)

    for number in {entry.shard for entry in url.entries}:
        url.shard(number)  # with its header
    monkeypatch.setattr(Location, "read_into", read_into)
    for index, entry in enumerate(url.entries):
        assert torch.equal(url.loss_mask(index), masks[entry.sample_id])
    assert len(reads) == num_shards
    url.token_counts(list(range(len(url))))
    assert len(reads) <= 3 * num_shards


@pytest.mark.filterwarnings("ignore")
def test_a_store_is_a_data_set_of_its_samples(tmp_path: Path) -> None:
    store = write_samples(tmp_path, "int8", bf16_samples())
    rows = {row["sample_id"]: row for row in as_dataset(tmp_path)}
    for name, sample in contents(store).items():
        row = rows[name]
        assert row["input_ids"] == sample.input_ids.tolist()
        assert row["loss_mask"] == sample.loss_mask.tolist()
        assert torch.equal(torch.tensor(row["aux_hidden_states"]), sample.aux_hidden_states.float())
        assert row["last_rows"] == sample.last_rows.tolist()
    table = as_table(tmp_path)
    assert table["sample_id"][:] == [entry.sample_id for entry in store.entries]
    assert table.sort("num_tokens")["num_tokens"][0] == min(entry.num_tokens for entry in store.entries)
    with FeatureWriter(tmp_path / "empty", store.manifest, shard_bytes=4000):
        pass
    assert as_table(tmp_path / "empty").features == table.features
    assert list(as_dataset(tmp_path / "empty")) == []
