"""Which target tokens the drafter can propose (d2t, t2d).

Draft token i is target token `i + d2t[i]`: d2t holds offsets, which is what SGLang adds to, and not target ids.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import DraftConfig, UserError
from eagle3.draft.acceptance import expected_rounds

logger = logging.getLogger(__name__)

SIZE_MULTIPLE = 128  # a size that kernels like, at most this much above the one that is needed


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
    kept = _kept(must_keep, vocab_size)
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


def draft_vocab_size(draft: DraftConfig, token_counts: Tensor, must_keep: Sequence[int]) -> int:
    """Returns W: draft.draft_vocab_size, or the smallest that covers draft.draft_vocab_coverage of the counts (V,).

    Raises:
        UserError: the coverage is no share, or an id of `must_keep` is no target token.
    """
    if draft.draft_vocab_coverage is None:
        return draft.draft_vocab_size
    if not 0 < draft.draft_vocab_coverage <= 1:
        raise UserError(
            f"draft.draft_vocab_coverage must be above 0 and at most 1, got {draft.draft_vocab_coverage}; change it"
        )
    kept = torch.tensor(_kept(must_keep, token_counts.numel()), dtype=torch.int64)
    others = token_counts.long().clone()  # (V,)
    others[kept] = 0
    covered = int(token_counts[kept].sum()) + others.sort(descending=True).values.cumsum(0)  # (V,)
    # Rounded up: a share of 1 must not be lost to the last digit.
    wanted = -int(-draft.draft_vocab_coverage * int(token_counts.sum()) // 1)
    num_others = int((covered < wanted).sum()) + 1 if int(token_counts[kept].sum()) < wanted else 0
    size = -(-max(1, kept.numel() + num_others) // SIZE_MULTIPLE) * SIZE_MULTIPLE
    return min(size, token_counts.numel())


def _kept(must_keep: Sequence[int], vocab_size: int) -> list[int]:
    kept = sorted(set(must_keep))
    strangers = [token for token in kept if not 0 <= token < vocab_size]
    if strangers:
        raise UserError(
            f"tokens to keep must be target tokens, 0..{vocab_size - 1}, got {strangers}; "
            f"the tokenizer must be the one of the target"
        )
    return kept


@dataclass(frozen=True)
class Ceiling:
    """The acceptance length of a drafter that is right wherever its vocabulary lets it be."""

    tau: float  # sum N / sum R
    full_tau: float  # the same with all target tokens in the vocabulary

    @property
    def lost(self) -> float:
        """The share of tau that the vocabulary costs; a drafter that errs anyway loses less."""
        return 1 - self.tau / self.full_tau


def tau_ceiling(vocab: DraftVocab, answers: Sequence[Tensor], num_draft_tokens: int) -> Ceiling:
    """Follows the rounds over answers, each the ids (N,) of one run of supervised tokens.

    Raises:
        UserError: no answer has two tokens, so that no token of them is drafted.
    """
    answers = [answer for answer in answers if answer.numel() > 1]
    if not answers:
        raise UserError("the ceiling of tau must be taken over answers of two tokens or more, got none; give others")
    num_tokens = sum(answer.numel() for answer in answers)
    rounds = full_rounds = 0.0
    for answer in answers:
        right = vocab.t2d[answer.long()]  # (N,)
        # Anchor a drafts at position i the token a + i + 1; what lies past the end has no effect.
        padded = torch.cat([right[1:], right.new_ones(num_draft_tokens)])
        accepted = padded.unfold(0, num_draft_tokens, 1)[: answer.numel() - 1]  # (N-1, K)
        rounds += expected_rounds(accepted)
        full_rounds += expected_rounds(torch.ones_like(accepted))
    return Ceiling(tau=num_tokens / rounds, full_tau=num_tokens / full_rounds)


def coverage_by_domain(vocab: DraftVocab, counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the share of each domain's tokens, counted (V,), that the drafter can propose; the worst first."""
    shares = {domain: vocab.coverage(token_counts) for domain, token_counts in counts.items()}
    return dict(sorted(shares.items(), key=lambda item: (item[1], item[0])))
