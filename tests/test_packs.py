"""What is read side by side is what joining decoded samples gives, whatever the codec, the threads and the cache."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from conftest import random_sample
from tiny_stores import MANIFEST

from eagle3.config import UserError
from eagle3.draft.ttt import PackedSequences, pack
from eagle3.features.codec import Codec
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.features.stored import decode_sample, encode_sample
from eagle3.features.writer import FeatureWriter
from eagle3.training.packs import CodedPack, PackReader, on_device

MASKS = [[0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0] * 4]
CPU = torch.device("cpu")


def write_samples(path: Path, codec: Codec, samples: list[FeatureSample]) -> FeatureStore:
    manifest = replace(MANIFEST, codec=codec, hidden_size=64, vocab_size=320)
    with FeatureWriter(path, manifest, shard_bytes=2000) as writer:
        for sample in samples:
            writer.write(sample)
    return FeatureStore(path)


def bf16_samples(*, with_logz: bool = True) -> list[FeatureSample]:
    samples = [random_sample(f"s{i}", mask, seed=i) for i, mask in enumerate(MASKS)]
    return [
        replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.bfloat16(),
            last_hidden_states=sample.last_hidden_states.bfloat16(),
            target_logz=torch.randn(sample.last_rows.numel()) if with_logz else None,
        )
        for sample in samples
    ]


def assert_same_pack(seen: PackedSequences, wanted: PackedSequences) -> None:
    for field in fields(PackedSequences):
        left, right = getattr(seen, field.name), getattr(wanted, field.name)
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("num_threads", "cache_bytes"), [(1, 0), (3, 0), (2, 10**6), (1, 1500)])
def test_reading_side_by_side_is_joining_samples(
    tmp_path: Path, codec: Codec, num_threads: int, cache_bytes: int
) -> None:
    store = write_samples(tmp_path, codec, bf16_samples())
    cached = FeatureStore(tmp_path, cache_bytes)
    reader = PackReader(cached, num_threads, pin=False)
    for indices in ([2, 0, 3, 1], [1], [3], [0, 2]):
        wanted = pack([store[index] for index in indices])
        (seen,) = on_device([reader.read(indices)], CPU)
        assert_same_pack(seen, wanted)


def test_a_full_cache_reads_no_file_again(tmp_path: Path) -> None:
    store = write_samples(tmp_path, "int8", bf16_samples())
    cached = FeatureStore(tmp_path, cache_bytes=10**6)
    first = [cached[index] for index in range(4)]
    for path in tmp_path.glob("shard-*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    for index, sample in enumerate(first):
        assert torch.equal(cached[index].aux_hidden_states, sample.aux_hidden_states)
    with pytest.raises(UserError, match="a shard must be a whole safetensors file"):
        store[0]


def test_a_cache_keeps_within_its_bytes(tmp_path: Path) -> None:
    write_samples(tmp_path, "bf16", bf16_samples())
    for cache_bytes in (0, 3000, 10**6):
        cached = FeatureStore(tmp_path, cache_bytes)
        sizes = [cached.read_stored(index).num_bytes for index in range(4)]
        assert sum(sizes[index] for index in cached._cache) <= cache_bytes
        assert len(cached._cache) == {0: 0, 3000: 1, 10**6: 4}[cache_bytes] or cache_bytes == 3000


def test_a_column_that_only_some_samples_have_is_left_out(tmp_path: Path) -> None:
    samples = bf16_samples()
    samples[2] = replace(samples[2], target_logz=None)
    store = write_samples(tmp_path, "bf16", samples)
    (mixed,) = on_device([PackReader(store, 1, pin=False).read([0, 2])], CPU)
    assert_same_pack(mixed, pack([store[0], store[2]]))
    assert mixed.target_logz is None


def test_a_flipped_byte_is_noticed_in_a_pack(tmp_path: Path) -> None:
    store = write_samples(tmp_path, "int8", bf16_samples())
    shard = tmp_path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"sample 's\d' must have the checksum \w+, got \w+ .*shard-00000"):
        PackReader(store, 2, pin=False).read([0, 1, 2, 3])


def test_a_shard_that_shrinks_under_a_reader_is_named(tmp_path: Path) -> None:
    store = write_samples(tmp_path, "bf16", bf16_samples())
    store.loss_mask(0)  # the header is known by now
    shard = tmp_path / "shard-00000.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 3)
    with pytest.raises(UserError, match=r"a shard must be a whole file, got .* \(.*shard-00000.safetensors\); restore"):
        PackReader(store, 1, pin=False).read([0, 1])


def test_a_sample_without_a_needed_row_is_refused(tmp_path: Path) -> None:
    (sample, *_) = bf16_samples()
    lacking = replace(
        sample,
        last_rows=sample.last_rows[1:],
        last_hidden_states=sample.last_hidden_states[1:],
        target_logz=None,
    )
    store = write_samples(tmp_path, "bf16", [lacking])
    with pytest.raises(
        UserError, match=r"last_rows must hold the row before every supervised token, got none for row 1"
    ):
        PackReader(store, 1, pin=False).read([0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
def test_packs_that_a_gpu_decodes_are_those_that_the_cpu_decodes(tmp_path: Path, codec: Codec) -> None:
    store = write_samples(tmp_path, codec, bf16_samples())
    members = [[0, 1], [2], [3, 0], [1, 2, 3], [0]] * 4
    wanted = [pack([store[index] for index in indices]) for indices in members]
    reader = PackReader(store, 2, pin=True)
    coded = [reader.read(indices) for indices in members]
    assert all(one.is_pinned() for pack_ in coded for one in pack_.tensors())
    device = torch.device("cuda")
    for seen, own in zip(on_device(coded, device), wanted, strict=True):
        busy = torch.randn(1000, 1000, device=device)
        for _ in range(20):  # work that the next copy runs beside
            busy = busy @ busy / 30
        moved = replace(seen, **{n: getattr(seen, n).cpu() for n in ("input_ids", "positions", "aux_hidden_states")})
        moved = replace(moved, last_hidden_states=seen.last_hidden_states.cpu())
        assert_same_pack(replace(moved, target_logz=None if seen.target_logz is None else seen.target_logz.cpu()), own)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_gpu_codes_as_the_cpu_does(codec: Codec) -> None:
    (sample, *_) = bf16_samples()
    there = decode_sample(encode_sample(sample, 64, codec, torch.device("cuda")), 64, torch.bfloat16)
    here = decode_sample(encode_sample(sample, 64, codec), 64, torch.bfloat16)
    # Of equal numbers either may be kept apart, so that single numbers differ by their rounding.
    limit = {"int8": 0.01, "fp8": 0.04}[codec]
    for seen in (here, there):
        error = (seen.aux_hidden_states.float() - sample.aux_hidden_states.float()).norm()
        assert error / sample.aux_hidden_states.float().norm() < limit
    assert torch.equal(there.input_ids, here.input_ids)


def test_a_pack_of_exact_states_comes_back_as_it_was() -> None:
    wanted = pack(bf16_samples())
    assert_same_pack(CodedPack.of(wanted).to(CPU).decoded(), wanted)
    assert len(CodedPack.of(wanted).tensors()) == 5
