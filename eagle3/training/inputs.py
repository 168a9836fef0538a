"""What training starts from: store, target and config, checked against each other.

Everything here is done before the ranks meet: reading a large store takes longer than a collective waits.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.config import DataConfig, TrainConfig, UserError
from eagle3.draft.draft_vocab import DraftVocab, build_draft_vocab, draft_vocab_size, tau_ceiling
from eagle3.draft.initial import drafter_config_from_target, init_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.serving_config import to_serving_config
from eagle3.draft.target_weights import (
    TargetWeights,
    check_capture_layers,
    default_capture_layers,
    load_target_config,
    load_target_weights,
)
from eagle3.features.manifest import check_same_target
from eagle3.features.samples import Samples
from eagle3.features.store import FeatureStore
from eagle3.prompts.tokenizers import kept_token_ids, load_tokenizer, tokenizer_digest
from eagle3.training.batches import usable_samples
from eagle3.training.settings import check_settings
from eagle3.words import counted

logger = logging.getLogger(__name__)

FEW_HELD_OUT = 10  # of 60 samples a tau's 95 % interval is 0.08 wide in the demo, of ten 2.4 times that
CEILING_SAMPLES = 500  # enough for two digits of tau, in a second


@dataclass(frozen=True)
class Basis:
    """Samples, and what a drafter for them looks like, of which no weight is made yet."""

    store: Samples
    train_indices: list[int]
    held_out_indices: list[int]
    target: TargetWeights
    target_config: dict[str, Any]
    token_counts: Tensor  # (V,) of the supervised tokens to train on
    draft_vocab: DraftVocab
    drafter_config: DrafterConfig


@dataclass(frozen=True)
class Inputs(Basis):
    """Samples, the drafter to train on them, and what the losses need of the target; all on the CPU."""

    drafter: Eagle3Drafter


def load_inputs(config: TrainConfig, samples: Samples | None = None) -> Inputs:
    """Opens the store, unless `samples` are given, and makes the untrained drafter.

    Raises:
        UserError: as `read_basis`.
    """
    basis = read_basis(config, samples)
    drafter = Eagle3Drafter(basis.drafter_config)
    _log_ceiling(
        basis.draft_vocab, basis.store, basis.held_out_indices or basis.train_indices, config.objective.ttt_steps
    )
    init_drafter(
        drafter, basis.target, basis.draft_vocab, seed=config.run.seed, init_from_target=config.draft.init_from_target
    )
    return Inputs(**vars(basis), drafter=drafter)


def read_basis(config: TrainConfig, samples: Samples | None = None) -> Basis:
    """Opens the store, unless `samples` are given, and compares it with target and config.

    Raises:
        UserError: a setting makes no sense, store, target and config do not belong together, nothing is left to train
            or to validate on, or the drafter could not be exported later.
    """
    check_settings(config)
    store = FeatureStore(config.data.path, config.data.cache_bytes) if samples is None else samples
    target_path = Path(config.target.path)
    target_config = load_target_config(target_path)
    capture_layers = config.target.capture_layers
    if capture_layers is None:
        capture_layers = default_capture_layers(target_config["num_hidden_layers"])
    check_capture_layers(capture_layers, target_config["num_hidden_layers"])
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    check_same_target(
        store.manifest,
        store.path,
        target_path,
        expected={"capture_layers": tuple(capture_layers), "tokenizer_digest": tokenizer_digest(tokenizer)},
        advice="change target.path or target.capture_layers, or capture a new store",
    )
    train_indices, held_out_indices = split_samples(store, config.data)

    target = load_target_weights(target_path)
    token_counts, must_keep = store.token_counts(train_indices), kept_token_ids(target_path, tokenizer)
    draft = replace(config.draft, draft_vocab_size=draft_vocab_size(config.draft, token_counts, must_keep))
    drafter_config = drafter_config_from_target(target_config, draft, capture_layers)
    to_serving_config(drafter_config, target_config, torch.bfloat16)
    return Basis(
        store=store,
        train_indices=train_indices,
        held_out_indices=held_out_indices,
        target=target,
        target_config=target_config,
        token_counts=token_counts,
        draft_vocab=build_draft_vocab(token_counts, draft.draft_vocab_size, must_keep),
        drafter_config=drafter_config,
    )


def device_weights(
    target: TargetWeights,
    target_ids: Tensor,  # (W,)
    embeddings: Literal["device", "host"],
) -> TargetWeights:
    """Returns what every device must hold of the target: of its head the drafted rows, since packs have normalisers.

    With embeddings on the host the table is empty. Nothing is copied but those rows.
    """
    if embeddings == "host":
        target = replace(target, embed_tokens=target.embed_tokens[:0])
    return target.drafted(target_ids)


def _log_ceiling(vocab: DraftVocab, store: Samples, indices: list[int], num_draft_tokens: int) -> None:
    """Says what the draft vocabulary costs, on answers that it was not counted on where there are any."""
    answers = [answer for index in indices[:CEILING_SAMPLES] for answer in store.answers(index)]
    if any(answer.numel() > 1 for answer in answers):
        ceiling = tau_ceiling(vocab, answers, num_draft_tokens)
        logger.info(
            "a drafter that is right wherever its vocabulary lets it be: tau %.2f of %.2f with chains of %d, %.1f %% "
            "lost to the rest (%s)",
            ceiling.tau, ceiling.full_tau, num_draft_tokens, 100 * ceiling.lost, counted(len(answers), "answer"),
        )  # fmt: skip


def split_samples(store: Samples, data: DataConfig) -> tuple[list[int], list[int]]:
    """Returns the indices to train on and to validate on; the samples left out are counted in the log.

    Raises:
        UserError: one of the two is empty.
    """
    names = ("training", "held-out")
    usable = {
        name: usable_samples(store, indices, data.max_tokens)
        for name, indices in zip(names, store.split(data.held_out_share), strict=True)
    }
    for name, samples in usable.items():
        logger.info(
            "%s samples: %d; left out: %d longer than data.max_tokens=%d, %d without two supervised tokens in a row",
            name, len(samples.indices), samples.num_too_long, data.max_tokens, samples.num_uncounted,
        )  # fmt: skip
        if not samples.indices:
            raise UserError(
                f"the store must leave {name} samples, got none of its {len(store)} with "
                f"data.held_out_share={data.held_out_share} and data.max_tokens={data.max_tokens} ({store.path}); "
                f"change these, or capture more samples"
            )
    num_held_out = len(usable["held-out"].indices)
    if num_held_out < FEW_HELD_OUT:
        logger.warning(
            "%s can hardly tell one checkpoint from another: raise data.held_out_share, or capture more",
            counted(num_held_out, "held-out sample"),
        )
    return usable["training"].indices, usable["held-out"].indices


def largest_micro_batch(
    store: Samples, indices: Sequence[int], data: DataConfig, num_sharing: int = 1
) -> tuple[int, float]:
    """Returns the tokens of the largest micro-batch, and the share of tokens that are supervised in the store.

    `num_sharing` ranks split a sample that is longer than a micro-batch.
    A store may keep last states of other tokens, too; all of those count here.
    """
    entries = [store.entries[index] for index in indices]
    lengths = sorted(entry.num_tokens for entry in entries)
    share = sum(entry.num_last for entry in entries) / sum(lengths)
    of_a_step = sum(lengths[-data.samples_per_step :])  # the longest ones together
    return max(min(data.batch_tokens, of_a_step), -(-lengths[-1] // num_sharing)), share
