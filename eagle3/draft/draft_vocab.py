"""Which target tokens the drafter can propose (d2t, t2d).

Draft token i is target token `i + d2t[i]`: d2t holds offsets, which is what SGLang adds to, and not target ids.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftVocab:
    """A choice of W target tokens, in ascending order."""

    d2t: Tensor  # (W,) int64 offsets
    t2d: Tensor  # (V,) bool, True for the W tokens

    @property
    def target_ids(self) -> Tensor:
        """The target token (W,) int64 of each draft token."""
        return self.d2t + torch.arange(self.d2t.numel())

    def coverage(self, token_counts: Tensor) -> float:
        """Returns the share of the occurrences (V,) that the drafter can propose; 1.0 where there are none."""
        num_tokens = int(token_counts.sum())
        return int(token_counts[self.t2d].sum()) / num_tokens if num_tokens else 1.0


def build_draft_vocab(token_counts: Tensor, size: int, must_keep: Sequence[int]) -> DraftVocab:
    """Keeps the `size` most frequent target tokens and those of `must_keep`, in target order.

    `token_counts` is (V,), occurrences under the loss mask; ties go to the smaller id. `must_keep` are the tokens
    that end a turn and the like, wanted whatever their count. Where fewer tokens occur than are wanted, the lowest ids
    that are left fill up: merges of a BPE vocabulary are numbered by frequency, so these occur elsewhere. (300 answers
    of 128 tokens, SmolLM2: W = 8,192 covers 84.7 % of other answers with the tokens that occur, 87.3 % filled up.)

    Raises:
        UserError: `size` is not within the vocabulary, or too small for `must_keep`, or an id of that is none.

    Source: EAGLE-3, arXiv 2503.01840; the offset form of d2t is what SGLang loads.
    """
    vocab_size = token_counts.numel()
    kept = sorted(set(must_keep))
    strangers = [token for token in kept if not 0 <= token < vocab_size]
    if strangers:
        raise UserError(
            f"tokens to keep must be target tokens, 0..{vocab_size - 1}, got {strangers}; "
            f"the tokenizer must be the one of the target"
        )
    if not max(1, len(kept)) <= size <= vocab_size:
        raise UserError(
            f"draft.draft_vocab_size must be between {max(1, len(kept))} (tokens that are always kept) and "
            f"{vocab_size} (the target's vocabulary), got {size}; change it"
        )
    rank = token_counts.long().clone()  # (V,)
    rank[kept] = torch.iinfo(torch.int64).max
    # Stable: of equal counts, zeros among them, the smaller id comes first.
    chosen = rank.sort(descending=True, stable=True).indices[:size].sort().values  # (W,)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    vocab = DraftVocab(d2t=chosen - torch.arange(size), t2d=t2d)
    wanted = token_counts > 0
    wanted[kept] = True
    logger.info(
        "draft vocabulary: %d of %d target tokens, %d of them filled up with the lowest ids; "
        "covers %.2f %% of %d supervised tokens (%d distinct)",
        size, vocab_size, int((t2d & ~wanted).sum()), 100 * vocab.coverage(token_counts),
        int(token_counts.sum()), int((token_counts > 0).sum()),
    )  # fmt: skip
    return vocab
