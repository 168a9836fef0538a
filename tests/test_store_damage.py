"""Damage that leaves a file readable: a store is refused by name, or is what was written, never something else."""

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_packs import bf16_samples, write_samples
from tiny_stores import HIDDEN, MANIFEST, VOCAB, assert_same, make_sample, write_store

from eagle3.config import UserError
from eagle3.features.index import verify_store
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_no_flipped_byte_of_a_header_changes_what_is_read(tmp_path: Path) -> None:
    write_store(tmp_path, range(1), samples_per_shard=1)
    entries = FeatureStore(tmp_path).entries
    (tmp_path / "index.jsonl").unlink()  # which would notice most of it
    shard, chosen = tmp_path / "shard-00000.safetensors", random.Random(0)
    whole = shard.read_bytes()
    # What a number, a name or a bracket may turn into and still be JSON; and any byte.
    likely = b'-.0123456789eFI_"[]{},'
    num_noticed = 0
    for place in range(8 + int.from_bytes(whole[:8], "little")):
        flipped = bytearray(whole)
        flipped[place] = chosen.choice(likely) if chosen.random() < 0.7 else whole[place] ^ chosen.randrange(1, 256)
        shard.write_bytes(flipped)
        problems = verify_store(tmp_path)
        try:
            store = FeatureStore(tmp_path)
            sample = store[0]
        except UserError:
            assert problems, place
            num_noticed += 1
            continue
        assert problems == [], (place, problems)
        assert store.entries == entries, place
        assert_same(sample, make_sample(0))
    assert num_noticed > 700


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b'"input_ids": {"dtype": "I32"',
            b'"input_ids": {"dtype": "F32"',
            "input_ids F32 rows of 1 where I32 rows of 1",
        ),
        (b'"last_rows"', b'"last_cows"', "an unknown column 'last_cows'"),
        (b'\\"num_supervised\\": 2', b'\\"num_supervised\\": 3', "must have 3 supervised tokens, as its .* got 2 "),
        (b'\\"offset\\": 4', b'\\"offset\\": 3', "must lie one behind the other, got 'sample-1 .*' at rows 3 and 2"),
        (b'\\"num_last\\": 3', b'\\"num_last\\": 2', "5 rows of last_rows for samples with 4"),
        (b'\\"num_tokens\\": 5', b'\\"num_tokens\\": -5', "a shard's header must list its samples, got ValueError"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    write_store(tmp_path, range(2))
    (tmp_path / "index.jsonl").unlink()
    shard = tmp_path / "shard-00000.safetensors"
    content = shard.read_bytes().replace(old, new, 1)
    header_bytes = int.from_bytes(content[:8], "little") + len(new) - len(old)
    shard.write_bytes(header_bytes.to_bytes(8, "little") + content[8:])
    assert any(re.search(message, problem) for problem in verify_store(tmp_path)), verify_store(tmp_path)

    def read() -> None:
        store = FeatureStore(tmp_path)
        for index in range(2):
            _ = store[index]

    with pytest.raises(UserError, match=message):
        read()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f'"hidden_size": {HIDDEN}', '"hidden_size": 4', "aux_hidden_states BF16 rows of 24 where BF16 rows of 12"),
        ('"codec": "bf16"', '"codec": "int8"', "no aux_scales; .*; aux_hidden_states BF16 .* where I8 rows of 24 is"),
        ("    5\n", "    5,\n    6\n", "aux_hidden_states BF16 rows of 24 where BF16 rows of 32 is wanted"),
    ],
)
def test_a_manifest_that_does_not_fit_its_shards_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_store(tmp_path, range(2))
    change(tmp_path / "manifest.json", old.encode(), new.encode())
    (problem,) = verify_store(tmp_path)
    assert re.search(rf"a shard must have the columns of its .*{message}.*restore manifest\.json", problem), problem
    with pytest.raises(UserError, match=message):
        _ = FeatureStore(tmp_path)[0]


def test_a_shard_of_another_codec_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / "exact", "bf16", bf16_samples()[:2])
    write_samples(tmp_path / "coded", "int8", bf16_samples()[2:])
    shutil.copy(tmp_path / "coded" / "shard-00000.safetensors", tmp_path / "exact" / "shard-00007.safetensors")
    problems = verify_store(tmp_path / "exact")
    assert any("shard-00007.safetensors); restore manifest.json if" in problem for problem in problems), problems


def test_an_index_that_is_wrong_of_a_length_does_not_cost_the_shard(tmp_path: Path) -> None:
    write_store(tmp_path, range(4))
    size = (tmp_path / "shard-00001.safetensors").stat().st_size
    change(tmp_path / "index.jsonl", f'"shard": 1, "num_bytes": {size}'.encode(), b'"shard": 1, "num_bytes": 7')
    message = rf"index\.jsonl must say how long its shards are, got 7 bytes for a whole one of {size} .*delete index\*"
    with pytest.raises(UserError, match=message):
        FeatureStore(tmp_path)
    (tmp_path / "index.jsonl").unlink()
    assert verify_store(tmp_path) == []


def negative(sample_ids: list[int]) -> list[int]:
    return [-1, *sample_ids[1:]]


def beyond(sample_ids: list[int]) -> list[int]:
    return [*sample_ids[:-1], VOCAB]


@pytest.mark.parametrize("change_ids", [negative, beyond])
def test_token_ids_beyond_the_vocabulary_are_not_counted(
    tmp_path: Path, change_ids: Callable[[list[int]], list[int]]
) -> None:
    sample = make_sample(0)
    ids = sample.input_ids.new_tensor(change_ids(sample.input_ids.tolist()))
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        writer.write(replace(sample, input_ids=ids))
    with pytest.raises(UserError, match=rf"within the target's vocabulary of {VOCAB}, got .* \(sample 'sample-0 "):
        FeatureStore(tmp_path).token_counts([0])


def test_an_id_that_is_no_text_is_refused_before_it_is_buffered(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, MANIFEST, shard_bytes=2**30) as writer:
        writer.write(make_sample(0))
        with pytest.raises(UnicodeEncodeError):
            writer.write(replace(make_sample(1), sample_id="\ud800"))
    assert len(FeatureStore(tmp_path)) == 1
