"""Codecs err as little as one byte allows, nowhere more than elsewhere, and say how many bytes they take."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import random_sample
from tiny_stores import MANIFEST
from torch import Tensor

from eagle3.config import StoreConfig
from eagle3.features.codec import (
    Codec,
    CodecName,
    CodedStates,
    codec_named,
    decode,
    encode,
    group_size,
    name_of,
    num_outliers,
    rounding_steps,
    state_bytes,
)
from eagle3.features.store import FeatureStore
from eagle3.features.stored import encode_sample
from eagle3.features.writer import FeatureWriter
from eagle3.plan import SampleSize, plan_extraction

HIDDEN = 192  # two groups of 96


def states_with_a_sink(num_rows: int = 6, num_states: int = 3, seed: int = 0) -> Tensor:  # (N, S*D) bf16
    """Random states; channel 7 is always large, and row 0 has two numbers a thousand times larger than the rest."""
    states = torch.randn(num_rows, num_states, HIDDEN, generator=torch.Generator().manual_seed(seed))
    states[:, :, 7] *= 100
    states[0, :, [3, 100]] = torch.tensor([25000.0, -900.0])
    return states.flatten(1).bfloat16()


def lengths(states: Tensor) -> Tensor:
    return states.float().square().mean(dim=-1).sqrt()


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_exact_codecs_keep_every_bit(codec: Codec, dtype: torch.dtype) -> None:
    states = states_with_a_sink().to(dtype)
    coded = encode(states, HIDDEN, codec)
    assert coded.scales is None
    assert torch.equal(decode(coded, HIDDEN, dtype), states)


def loop_decode(coded: CodedStates, hidden_size: int) -> np.ndarray:
    """Decodes number by number in fp64."""
    assert coded.scales is not None
    assert coded.outliers is not None
    assert coded.outlier_columns is not None
    codes, scales = coded.codes.double().numpy(), coded.scales.double().numpy()
    outliers, columns = coded.outliers.double().numpy(), coded.outlier_columns.numpy()
    num_rows, width = codes.shape
    group, kept = width // scales.shape[1], outliers.shape[1] * hidden_size // width
    states = np.zeros((num_rows, width))
    for row in range(num_rows):
        for column in range(width):
            states[row, column] = codes[row, column] * scales[row, column // group]
        for i in range(outliers.shape[1]):
            states[row, i // kept * hidden_size + columns[row, i]] = outliers[row, i]
    return states


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_is_codes_times_scales_with_outliers_put_back(codec: Codec, dtype: torch.dtype) -> None:
    coded = encode(states_with_a_sink().to(dtype), HIDDEN, codec)
    seen = decode(coded, HIDDEN, dtype)
    assert seen.dtype == dtype
    # The product is rounded once to the dtype: half of bf16's spacing at most, nothing in fp32.
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-7
    np.testing.assert_allclose(seen.double().numpy(), loop_decode(coded, HIDDEN), rtol=tolerance, atol=0)


def test_int8_errs_by_half_a_step_of_its_own_group_at_most() -> None:
    states = states_with_a_sink().float()
    coded = encode(states, HIDDEN, "int8")
    error = np.abs(loop_decode(coded, HIDDEN) - states.double().numpy()).reshape(6, -1, 96)
    assert coded.scales is not None
    outlier_error = 2.0**-8 * 25000  # bf16's of the largest one
    is_outlier = coded.codes.view(6, -1, 96).numpy() == 0
    limit = 0.51 * coded.scales.double().numpy()[:, :, None] + is_outlier * outlier_error
    assert (error <= limit).all(), float((error - limit).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_rounding_steps_hold_what_a_codec_errs_and_are_no_wider(codec: Codec, dtype: torch.dtype) -> None:
    states = states_with_a_sink(num_rows=40).to(dtype)
    coded = encode(states, HIDDEN, codec)
    error = (decode(coded, HIDDEN, dtype).double() - states.double()).abs()
    steps = rounding_steps(coded, HIDDEN).double()
    # Half a step, and a little since the scale is rounded; what is decoded to bf16 is rounded twice.
    limit = 0.51 if dtype == torch.float32 else 0.51 * 2**0.5
    assert (error <= limit * steps).all(), float((error / steps).max())
    kept = coded.codes.float() != 0
    # Evenly spread within a step, an error's deviation is 1 / sqrt(12) = 0.29 of it; bf16's own rounding widens steps.
    assert 0.2 < float((error / steps)[kept].square().mean().sqrt()) < 0.3


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rows_of_coded_states_are_the_coded_rows(codec: Codec) -> None:
    states, rows = states_with_a_sink().float(), torch.tensor([1, 4, 5], dtype=torch.int32)
    seen, wanted = encode(states, HIDDEN, codec).at(rows), encode(states[rows], HIDDEN, codec)
    for name, tensor in vars(wanted).items():
        assert getattr(seen, name) is None if tensor is None else torch.equal(getattr(seen, name), tensor), name


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.01), ("fp8", 0.04)])
def test_a_sink_and_a_loud_channel_cost_the_other_numbers_nothing(codec: Codec, share: float) -> None:
    states = states_with_a_sink(num_rows=40)
    error = decode(encode(states, HIDDEN, codec), HIDDEN, torch.bfloat16).float() - states.float()
    quiet = torch.ones(HIDDEN, dtype=torch.bool)
    quiet[[3, 7, 100]] = False
    # The quiet channels have a spread of 1, in the sink's row as in the others.
    of_rows = lengths(error.view(40, 3, HIDDEN)[:, :, quiet])  # (N, S)
    assert of_rows.max() < share, of_rows.max()
    assert of_rows[0].max() < 1.5 * of_rows[1:].mean()
    loud = lengths(error.view(40, 3, HIDDEN)[:, :, [3, 7, 100]]) / lengths(
        states.view(40, 3, HIDDEN)[:, :, [3, 7, 100]]
    )
    assert loud[0].max() < 2.0**-8


def test_a_state_is_coded_alone() -> None:
    states = states_with_a_sink(num_rows=5000)
    whole = encode(states, HIDDEN, "int8")  # more than one chunk
    alone = encode(states[4321:4322, HIDDEN : 2 * HIDDEN], HIDDEN, "int8")
    assert torch.equal(whole.codes[4321:4322, HIDDEN : 2 * HIDDEN], alone.codes)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_zeros_small_numbers_and_no_rows_are_coded(codec: Codec) -> None:
    for states in (torch.zeros(2, HIDDEN), torch.full((2, HIDDEN), 1e-38), torch.zeros(0, HIDDEN)):
        coded = encode(states.bfloat16(), HIDDEN, codec)
        seen = decode(coded, HIDDEN, torch.bfloat16)
        assert seen.shape == states.shape
        assert (seen.float() - states).abs().sum() <= 1e-37 * states.numel()


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("hidden_size", [64, 576, 2880, 4096, 7168])
def test_bytes_of_a_state_are_those_that_it_takes(codec: Codec, hidden_size: int) -> None:
    coded = encode(torch.randn(1, hidden_size).bfloat16(), hidden_size, codec)
    parts = [coded.codes, coded.scales, coded.outlier_columns, coded.outliers]
    assert state_bytes(codec, hidden_size) == sum(part.nbytes for part in parts if part is not None)
    assert hidden_size % group_size(hidden_size) == 0
    assert num_outliers(hidden_size) <= 16


def test_people_choose_by_one_name_whatever_the_dtype() -> None:
    assert get_args(CodecName) == get_args(get_type_hints(StoreConfig)["codec"])
    for dtype, exact in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        assert [codec_named(name, dtype) for name in get_args(CodecName)] == [exact, "int8", "fp8"]
        assert [name_of(codec_named(name, dtype)) for name in get_args(CodecName)] == list(get_args(CodecName))


def test_groups_divide_the_state() -> None:
    assert [group_size(size) for size in (8, 64, 576, 2880, 4096, 7168)] == [8, 64, 96, 120, 128, 128]


@pytest.mark.parametrize(("codec", "most"), [("bf16", 50_200), ("int8", 26_000), ("fp8", 26_000)])
def test_bytes_per_token_of_a_large_target(tmp_path: Path, codec: Codec, most: int) -> None:
    sample = random_sample("a", [0] * 50 + [1] * 50, hidden_size=7168)
    stored = encode_sample(
        type(sample)(
            **{
                **vars(sample),
                "aux_hidden_states": sample.aux_hidden_states.bfloat16(),
                "last_hidden_states": sample.last_hidden_states.bfloat16(),
                "target_logz": torch.zeros(50),
            }
        ),
        7168,
        codec,
    )
    assert stored.num_bytes / 100 <= most
    config = StoreConfig(path=str(tmp_path))
    sizes = [SampleSize(num_tokens=700, num_supervised=350)] * 1000
    plan = plan_extraction(sizes, config, hidden_size=7168, num_aux=3, codec=codec, is_bound=False)
    assert plan.num_bytes / plan.num_tokens <= most


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_store_keeps_the_coded_states_and_gives_them_decoded(tmp_path: Path, codec: Codec) -> None:
    manifest = replace(MANIFEST, codec=codec, hidden_size=64, vocab_size=320)
    samples = [random_sample(f"s{i}", [0, 0, 1, 1, 0, 1], seed=i) for i in range(5)]
    samples = [
        replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.bfloat16(),
            last_hidden_states=sample.last_hidden_states.bfloat16(),
        )
        for sample in samples
    ]
    with FeatureWriter(tmp_path, manifest, shard_bytes=3000) as writer:
        for sample in samples:
            writer.write(sample)
    store = FeatureStore(tmp_path)
    assert len(store._records) > 1
    assert store.verify() == []
    for index, sample in enumerate(samples):
        for name in ("aux_hidden_states", "last_hidden_states"):
            wanted = decode(encode(getattr(sample, name), 64, codec), 64, torch.bfloat16)
            assert torch.equal(getattr(store[index], name), wanted), name
        assert torch.equal(store[index].input_ids, sample.input_ids)


def test_states_that_are_not_finite_are_not_coded() -> None:
    sample = random_sample("a", [0, 1, 1, 1])
    sample.aux_hidden_states[2, 5] = float("inf")
    with pytest.raises(FloatingPointError, match=r"aux_hidden_states must be finite, got inf \(sample 'a'\)"):
        encode_sample(sample, 64, "int8")
    sample.aux_hidden_states[2, 5] = float("nan")
    with pytest.raises(FloatingPointError, match=r"aux_hidden_states must be finite, got nan"):
        encode_sample(sample, 64, "fp8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_gpu_codes_without_a_wait_and_as_the_cpu_does(codec: Codec) -> None:
    # More than one chunk; fp32, so that no two numbers are equal, of which one would be kept as an outlier.
    states = torch.randn(5000, HIDDEN, generator=torch.Generator().manual_seed(0))
    there = states.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        coded = encode(there, HIDDEN, codec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A scale that lies between two of bf16 may become the other one: a division is rounded in another way there.
    for name, wanted in vars(encode(states, HIDDEN, codec)).items():
        differs = getattr(coded, name).cpu().view(torch.uint8) != wanted.view(torch.uint8)
        assert differs.float().mean() < 1e-3, (name, int(differs.sum()))
    coded = coded.to("cpu")
    error = (decode(coded, HIDDEN, torch.float32) - states).abs()
    assert (error <= 0.51 * rounding_steps(coded, HIDDEN)).all()
