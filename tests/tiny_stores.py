"""Stores of tiny samples that are the same in every process."""

from pathlib import Path

import torch

from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

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
