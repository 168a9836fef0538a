"""Stores come back bit for bit, in a format that others can read, and say what they hold."""

import dataclasses
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from tiny_stores import EXACT_COLUMNS, HIDDEN, MANIFEST, VOCAB, assert_same, make_sample, write_store

from eagle3.config import UserError
from eagle3.features.record import is_held_out, supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.features.stored import COLUMNS
from eagle3.features.writer import FeatureWriter


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
    assert [store.shards_without_normalisers(indices) for indices in ([0], [1], [0, 1])] == [[], [1], [1]]


def test_no_pickle_is_read_or_written(tmp_path: Path) -> None:
    write_store(tmp_path, range(2))
    for path in tmp_path.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), path
    assert json.loads((tmp_path / "manifest.json").read_text())["capture_layers"] == [2, 4, 5]
