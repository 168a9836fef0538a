"""A store of what a tiny target is said to have put out."""

import dataclasses
from pathlib import Path
from typing import Any

from eagle3.features.manifest import Manifest, digest_target_config, digest_target_weights
from eagle3.features.record import FeatureSample
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest

LAYERS = (2, 4, 5)


def write_target_store(
    path: Path, target: Path, samples: list[FeatureSample], *, shard_bytes: int = 2**20, **changes: Any
) -> Path:
    """Writes a store of a tiny target's features; `changes` replace entries of its manifest."""
    manifest = Manifest(
        target_path=str(target),
        target_config_digest=digest_target_config(target),
        target_revision=digest_target_weights(target),
        target_quantization=None,
        engine="transformers",
        engine_version="5",
        capture_layers=LAYERS,
        dtype="float32",
        codec="fp32",
        hidden_size=64,
        vocab_size=320,
        tokenizer_digest=tokenizer_digest(load_tokenizer(str(target), trust_remote_code=False)),
        chat_template_digest="0",
        prompts_digest="0",
        last_rows="supervised",
    )
    with FeatureWriter(path, dataclasses.replace(manifest, **changes), shard_bytes=shard_bytes) as writer:
        for sample in samples:
            writer.write(sample)
    return path
