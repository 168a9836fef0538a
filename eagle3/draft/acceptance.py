"""Chains -> tau, by the recursion over where rounds start.

tau is tokens per verify round. Rounds start only where the one before ended, so that an average over all positions
overstates it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.ttt import ChainMatches, PackedSequences
from eagle3.words import counted

NUM_RESAMPLES = 2000  # another seed then moves an end of the 95 % interval by about 3 % of its half-width


@dataclass(frozen=True)
class AnswerRounds:
    """What speculative decoding does for one answer x[p..e], in expectation where acceptance is a probability."""

    sample_id: str
    num_tokens: int  # N = e-p+1: as SGLang's completion_tokens, with prefill's token and the end token
    rounds: float  # R, verify rounds
    reached: tuple[float, ...]  # (K,) rounds in which draft position i lies in the answer and all before it were right
    accepted: tuple[float, ...]  # (K,) those of `reached` in which position i was right as well


@dataclass(frozen=True)
class Acceptance:
    """The acceptance length of a set of answers, and what it is made of."""

    tau: float  # sum N / sum R
    low: float  # 95 % bootstrap interval of tau over samples
    high: float
    tau_without_prefill: float  # sum (N-1) / sum R
    mean_answer_tau: float  # mean of N / R over the answers that need a round
    num_answers: int
    num_tokens: int  # sum N
    rounds: float  # sum R
    conditional: list[float | None]  # (K,) accepted / reached; None where no round reached the position


def expected_rounds(accepted: Tensor) -> float:
    """Returns the expected number of verify rounds R of one answer of N tokens.

    `accepted` (N-1, K) holds, for the anchors p-1..e-2 in order, the probability that draft position i is accepted
    once all before it are: 0 or 1 where acceptance compares first choices. What it says of positions past the
    answer's end has no effect.
    """
    return float(_round_starts(_jumps(_survival(accepted[None].double()))).sum())


def answer_rounds(packed: PackedSequences, chains: ChainMatches) -> list[AnswerRounds]:
    """Follows the rounds of every answer in a pack; each run of the loss mask is an answer.

    A document's first token has no anchor before it: an answer that starts there is taken to start one token later.
    """
    answers = _answers(packed)
    lengths = [answer.last - answer.first for answer in answers]  # N-1 anchors each
    anchors = [torch.arange(answer.first - 1, answer.last - 1) for answer in answers]
    rows, device = chains.rows.cpu(), chains.matches.device
    expected_rows = torch.cat([torch.zeros(0, dtype=torch.int64), *anchors])
    assert torch.equal(rows, expected_rows), (rows.tolist(), expected_rows.tolist())
    num_steps = chains.matches.shape[1]
    num_anchors = torch.tensor(lengths, dtype=torch.int64)  # (B,)
    anchor_index = torch.arange(max(lengths, default=0), device=device)  # (A,)
    is_anchor = anchor_index < num_anchors.to(device)[:, None]  # (B, A)
    # Answers side by side, padded with anchors that accept nothing; followed on the device that drafted.
    accepted = torch.zeros(*is_anchor.shape, num_steps, dtype=torch.float64, device=device)  # (B, A, K)
    answer_of_row = torch.arange(len(answers)).repeat_interleave(num_anchors).to(device)  # (R,)
    anchor_of_row = torch.cat([expected_rows[:0], *map(torch.arange, lengths)]).to(device)  # (R,)
    accepted[answer_of_row, anchor_of_row] = chains.matches.double()
    survival = _survival(accepted)  # (B, A, K+1)
    starts = _round_starts(_jumps(survival)) * is_anchor  # (B, A)
    # Anchor a drafts at position i (both from 0) the answer's token a + i + 1, and its tokens are 0..N-1.
    last_tokens = num_anchors.to(device)[:, None, None]  # (B, 1, 1)
    in_answer = (anchor_index[:, None] + torch.arange(num_steps, device=device) + 1) <= last_tokens  # (B, A, K)
    weights = starts[..., None] * in_answer  # (B, A, K)
    reached = (weights * survival[..., :-1]).sum(1).tolist()  # (B, K)
    right = (weights * survival[..., 1:]).sum(1).tolist()
    rounds = starts.sum(1).tolist()  # (B,)
    return [
        AnswerRounds(
            sample_id=answer.sample_id,
            num_tokens=lengths[index] + 1,
            rounds=rounds[index],
            reached=tuple(reached[index]),
            accepted=tuple(right[index]),
        )
        for index, answer in enumerate(answers)
    ]


def summarise(answers: Sequence[AnswerRounds], seed: int) -> Acceptance:
    """Adds answers up to a data set's acceptance; the interval resamples whole samples, for their answers are alike.

    Raises:
        UserError: no answer needs a verify round, so that tau has no value.
    """
    num_tokens = sum(answer.num_tokens for answer in answers)
    rounds = sum(answer.rounds for answer in answers)
    if rounds == 0:
        raise UserError(
            f"acceptance must be measured on answers of two tokens or more, got "
            f"{counted(len(answers), 'answer')} with {counted(num_tokens, 'token')} in all; measure on other prompts, "
            f"or allow longer answers"
        )
    low, high = _bootstrap_interval(answers, seed)
    reached = [sum(parts) for parts in zip(*(answer.reached for answer in answers), strict=True)]
    accepted = [sum(parts) for parts in zip(*(answer.accepted for answer in answers), strict=True)]
    ratios = [answer.num_tokens / answer.rounds for answer in answers if answer.rounds > 0]
    return Acceptance(
        tau=num_tokens / rounds,
        low=low,
        high=high,
        tau_without_prefill=(num_tokens - len(answers)) / rounds,
        mean_answer_tau=sum(ratios) / len(ratios),
        num_answers=len(answers),
        num_tokens=num_tokens,
        rounds=rounds,
        conditional=[right / all_ if all_ > 0 else None for right, all_ in zip(accepted, reached, strict=True)],
    )


@dataclass(frozen=True)
class _Answer:
    """A run of the loss mask: tokens first..last of a pack's token axis."""

    sample_id: str
    first: int
    last: int


def _answers(packed: PackedSequences) -> list[_Answer]:
    lengths = torch.tensor(packed.document_lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    supervised = packed.loss_mask.index_fill(0, ends - lengths, False)  # a document's first token starts no answer
    outside = supervised.new_zeros(1)
    firsts = (supervised & ~torch.cat([outside, supervised[:-1]])).nonzero().flatten()
    lasts = (supervised & ~torch.cat([supervised[1:], outside])).nonzero().flatten()
    documents = torch.searchsorted(ends, firsts, right=True)
    return [
        _Answer(packed.sample_ids[document], first, last)
        for document, first, last in zip(documents.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
    ]


def _survival(accepted: Tensor) -> Tensor:  # (B, A, K) -> (B, A, K+1)
    """Returns the probability S_i that the first i = 0..K draft positions are accepted."""
    return torch.cat([torch.ones_like(accepted[..., :1]), accepted.cumprod(-1)], dim=-1)


def _jumps(survival: Tensor) -> Tensor:  # (B, A, K+1) -> (B, A, K+1)
    """Returns the probability that the next round starts 1..K+1 tokens further: the accepted ones and the bonus."""
    return torch.cat([survival[..., :-1] - survival[..., 1:], survival[..., -1:]], dim=-1)


def _round_starts(jumps: Tensor) -> Tensor:  # (B, A, K+1) -> (B, A)
    """Returns the probability that a round starts at each anchor; the first always has one.

    Mass that goes past the last anchor is dropped: the answer is complete there.
    """
    num_answers, num_anchors, reach = jumps.shape
    starts = jumps.new_zeros(num_answers, num_anchors + reach)
    starts[:, 0] = 1
    for anchor in range(num_anchors):
        starts[:, anchor + 1 : anchor + 1 + reach].addcmul_(starts[:, anchor : anchor + 1], jumps[:, anchor])
    return starts[:, :num_anchors]


def _bootstrap_interval(answers: Sequence[AnswerRounds], seed: int) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of sum N / sum R over samples drawn with replacement."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for answer in answers:
        sums[answer.sample_id][0] += answer.num_tokens
        sums[answer.sample_id][1] += answer.rounds
    per_sample = torch.tensor(list(sums.values()), dtype=torch.float64)  # (samples, 2)
    generator = torch.Generator().manual_seed(seed)
    totals = torch.stack(
        [per_sample[torch.randint(len(sums), (len(sums),), generator=generator)].sum(0) for _ in range(NUM_RESAMPLES)]
    )  # (NUM_RESAMPLES, 2)
    totals = totals[totals[:, 1] > 0]  # a draw of one-token answers alone says nothing of tau
    ends = (totals[:, 0] / totals[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(ends[0]), float(ends[1])
