"""Four short documents with a target for them, and what the objective makes of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_sample
from torch import Tensor

from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.objective import TTTSums, ttt_sums
from eagle3.draft.target_weights import TargetWeights, log_normaliser
from eagle3.draft.ttt import PackedSequences
from eagle3.features.record import FeatureSample

# A prompt and an answer; two turns, the last one to the very end; nothing supervised; too short to count.
MASKS = [[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0], [0, 1]]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 4
DECAY = 0.7


def masked_samples() -> list[FeatureSample]:
    return [random_sample(f"s{i}", mask, seed=i, hidden_size=16, vocab_size=40) for i, mask in enumerate(MASKS)]


def random_target() -> TargetWeights:
    generator = torch.Generator().manual_seed(9)
    return TargetWeights(
        embed_tokens=torch.randn(40, 16, generator=generator),
        lm_head=torch.randn(40, 16, generator=generator),
        norm=torch.ones(16),
        rms_norm_eps=1e-5,
    )


def with_normalisers(packed: PackedSequences, target: TargetWeights) -> PackedSequences:
    return replace(packed, target_logz=log_normaliser(target, packed.last_hidden_states))


def sums_of(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, renormalise: bool = True, **changes: Any
) -> TTTSums:
    if packed.target_logz is None and packed.target_rows.numel() > 0:
        packed = with_normalisers(packed, target)
    settings: dict[str, Any] = {"ttt_steps": STEPS, "ttt_decay": DECAY, "renormalise": renormalise}
    return ttt_sums(drafter, target, packed, **(settings | changes))


def gradients(drafter: Eagle3Drafter, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in drafter.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(drafter.parameters())), strict=True))
