"""A tiny store whose answers can be learned, and settings to train on it."""

import dataclasses
from pathlib import Path

import torch
from conftest import random_sample, write_tiny_target
from target_stores import LAYERS, write_target_store

from eagle3.config import (
    DataConfig,
    DraftConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TargetConfig,
    TrackingConfig,
    TrainConfig,
)
from eagle3.draft.target_weights import load_target_weights, log_normaliser
from eagle3.features.record import FeatureSample

CYCLE = 24  # distinct answer tokens
# Prompt and answer lengths of the samples, in turns; the last has a second answer.
MASKS = [[0] * 5 + [1] * 9, [0] * 3 + [1] * 14, [0] * 8 + [1] * 6, [0] * 4 + [1] * 5 + [0] * 3 + [1] * 8]


def write_store(
    path: Path, target: Path, num_samples: int = 30, *, certainty: float = 5.0, with_normalisers: bool = False
) -> Path:
    """Writes samples in which each token follows from the one before, and the target is sure of it, or less sure."""
    weights = load_target_weights(target)
    samples = [learnable_sample(number, weights.lm_head, certainty) for number in range(num_samples)]
    if with_normalisers:
        samples = [
            dataclasses.replace(sample, target_logz=log_normaliser(weights, sample.last_hidden_states))
            for sample in samples
        ]
    return write_target_store(path, target, samples)


def learnable_sample(number: int, lm_head: torch.Tensor, certainty: float = 5.0) -> FeatureSample:
    """Sample `number`: a cycle of tokens, and last hidden states along the head's row (V, D) of the next token."""
    sample = random_sample(f"s{number}", MASKS[number % len(MASKS)], seed=number)
    num_tokens = sample.input_ids.numel()
    input_ids = (3 + (number + 7 * torch.arange(num_tokens)) % CYCLE).int()
    last = certainty * lm_head[input_ids[sample.last_rows.long() + 1].long()]
    return dataclasses.replace(sample, input_ids=input_ids, last_hidden_states=last)


def tiny_config(store: Path, target: Path, run_dir: Path) -> TrainConfig:
    """Settings of 10 steps of 5 samples in fp32 on the CPU."""
    return TrainConfig(
        target=TargetConfig(path=str(target), dtype="float32", device="cpu", capture_layers=list(LAYERS)),
        data=DataConfig(path=str(store), held_out_share=0.2, samples_per_step=5, batch_tokens=1000),
        draft=DraftConfig(draft_vocab_size=48),
        objective=ObjectiveConfig(ttt_steps=3),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.01),
        run=RunConfig(
            dir=str(run_dir), epochs=10, max_steps=10, save_every=5, validate_every=5, log_every=1,
            mixed_precision="no",
        ),
        tracking=TrackingConfig(backend="none"),
    )  # fmt: skip


def write_target_and_store(directory: Path) -> tuple[Path, Path]:
    """Writes both; returns their paths."""
    target = write_tiny_target(directory / "target")
    return target, write_store(directory / "store", target)


def overrides(config: TrainConfig) -> list[str]:
    """Returns the settings as they are given on a command line."""
    lines = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for each in dataclasses.fields(values):
            value = getattr(values, each.name)
            lines.append(f"{section.name}.{each.name}={'null' if value is None else value}")
    return lines
