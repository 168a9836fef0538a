"""The recursion counts the rounds of a decoder that is walked literally."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from eagle3.config import UserError
from eagle3.draft.acceptance import AnswerRounds, answer_rounds, expected_rounds, summarise
from eagle3.draft.ttt import ChainMatches, PackedSequences, pack
from eagle3.features.record import FeatureSample

MakeSample = Callable[..., FeatureSample]


@dataclass
class Walk:
    """What a decoder counted."""

    rounds: int
    reached: list[int]
    accepted: list[int]


def walk_answer(right: torch.Tensor, num_tokens: int) -> Walk:
    """Decodes an answer of tokens 0..num_tokens-1 round by round; right (N-1, K) says which drafts are its tokens.

    Token 0 comes from prefill. A round that starts after token a drafts tokens a+1.., keeps the right ones up to the
    first wrong one, and adds the target's own next token.
    """
    num_steps = right.shape[1]
    walk = Walk(0, [0] * num_steps, [0] * num_steps)
    emitted = 1
    while emitted < num_tokens:
        walk.rounds += 1
        start = emitted - 1  # the anchor: one before the last token that was emitted, counted from p-1
        for step in range(num_steps):
            if emitted >= num_tokens:  # the end token was drafted and accepted
                break
            walk.reached[step] += 1
            if not right[start, step]:
                break
            walk.accepted[step] += 1
            emitted += 1
        emitted += 1  # the bonus token
    return walk


def random_right(num_tokens: int, num_steps: int, share: float, seed: int) -> torch.Tensor:
    """Returns (N-1, K) bool; drafts past the answer's end are never right."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.rand(num_tokens - 1, num_steps, generator=generator) < share
    for anchor, step in itertools.product(range(num_tokens - 1), range(num_steps)):
        right[anchor, step] &= anchor + step + 1 < num_tokens
    return right


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_rounds_of_first_choices_are_those_of_the_walk(share: float, num_steps: int) -> None:
    for seed, num_tokens in enumerate([1, 2, 3, 5, 24, 60]):
        right = random_right(num_tokens, num_steps, share, seed)
        assert expected_rounds(right) == walk_answer(right, num_tokens).rounds


def test_drafter_that_is_never_right_takes_a_round_per_token_but_the_first() -> None:
    never = torch.zeros(23, 3)
    assert expected_rounds(never) == 23
    summary = summarise([AnswerRounds("a", 24, 23.0, (23.0, 0.0, 0.0), (0.0, 0.0, 0.0))], seed=0)
    assert round(summary.tau, 3) == 1.043
    assert summary.tau_without_prefill == 1.0
    assert summary.conditional == [0.0, None, None]


def test_drafter_that_is_always_right_takes_the_fewest_rounds() -> None:
    for num_tokens in range(1, 20):
        assert expected_rounds(torch.ones(num_tokens - 1, 3)) == -(-(num_tokens - 1) // 4)


def test_drafts_past_the_end_have_no_effect() -> None:
    right = random_right(12, 4, 0.8, seed=3)
    beyond = torch.tensor([[anchor + step + 1 >= 12 for step in range(4)] for anchor in range(11)])
    assert expected_rounds(right) == expected_rounds(right | beyond)


def test_probabilities_give_the_mean_over_all_outcomes() -> None:
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    expected = 0.0
    for outcome in itertools.product([False, True], repeat=8):
        right = torch.tensor(outcome).reshape(4, 2)
        weight = torch.where(right, probability, 1 - probability).prod().item()
        expected += weight * walk_answer(right, 5).rounds
    assert expected_rounds(probability) == pytest.approx(expected, rel=1e-12)  # fp64, another order


def make_chains(packed: PackedSequences, num_steps: int, share: float, seed: int) -> ChainMatches:
    """Draws random matches for the rows and steps that are counted."""
    generator = torch.Generator().manual_seed(seed)
    counted = packed.counted(num_steps)
    matches = torch.rand(counted[0].numel(), num_steps, generator=generator) < share
    for step, rows in enumerate(counted):
        matches[:, step] &= torch.isin(counted[0], rows)
    return ChainMatches(rows=counted[0], matches=matches)


def test_each_run_of_the_mask_is_an_answer(make_sample: MakeSample) -> None:
    masks = {
        "one": [0, 0, 1, 1, 1, 1, 0],
        "two turns": [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1],  # runs to its end, and the next one follows
        "single token": [0, 0, 1, 0],
        "nothing": [0, 0],
        "long": [0] + [1] * 30,
    }
    packed = pack([make_sample(name, mask) for name, mask in masks.items()])
    chains = make_chains(packed, 3, 0.6, seed=1)
    answers = answer_rounds(packed, chains)
    assert [(answer.sample_id, answer.num_tokens) for answer in answers] == [
        ("one", 4), ("two turns", 3), ("two turns", 5), ("single token", 1), ("long", 30),
    ]  # fmt: skip
    for answer, right in zip(answers, chains.matches.split([3, 2, 4, 0, 29]), strict=True):
        walk = walk_answer(right, answer.num_tokens)
        assert answer.rounds == walk.rounds
        assert list(answer.reached) == walk.reached
        assert list(answer.accepted) == walk.accepted


def test_answer_at_the_first_token_of_a_document_starts_one_later(make_sample: MakeSample) -> None:
    packed = pack([make_sample("a", [0, 1, 1]), make_sample("b", [1, 1, 1, 1]), make_sample("c", [1, 0])])
    answers = answer_rounds(packed, make_chains(packed, 2, 0.0, seed=0))
    assert [(answer.sample_id, answer.num_tokens, answer.rounds) for answer in answers] == [("a", 2, 1), ("b", 3, 2)]


def test_pack_without_answers_has_none(make_sample: MakeSample) -> None:
    for samples in ([], [make_sample("a", [0, 0, 0])]):
        packed = pack(samples)
        assert answer_rounds(packed, make_chains(packed, 2, 0.5, seed=0)) == []


def test_summary_is_a_ratio_of_sums() -> None:
    answers = [
        AnswerRounds("a", 10, 3.0, (3.0, 2.0), (2.0, 1.0)),
        AnswerRounds("a", 1, 0.0, (0.0, 0.0), (0.0, 0.0)),
        AnswerRounds("b", 5, 4.0, (4.0, 1.0), (1.0, 1.0)),
    ]
    summary = summarise(answers, seed=0)
    assert summary.tau == 16 / 7
    assert summary.tau_without_prefill == 13 / 7
    assert summary.mean_answer_tau == pytest.approx((10 / 3 + 5 / 4) / 2)
    assert (summary.num_answers, summary.num_tokens, summary.rounds) == (3, 16, 7.0)
    assert summary.conditional == [3 / 7, 2 / 3]
    assert summary.low <= summary.tau <= summary.high


def test_conditional_acceptance_is_not_the_average_over_positions(make_sample: MakeSample) -> None:
    # Right at every second anchor, and rounds start only there: they see acceptance 1, an average sees 1/2.
    packed = pack([make_sample("a", [0] + [1] * 11)])
    rows = packed.counted(1)[0]
    chains = ChainMatches(rows=rows, matches=(torch.arange(10) % 2 == 0)[:, None])
    summary = summarise(answer_rounds(packed, chains), seed=0)
    assert summary.conditional == [1.0]
    assert summary.tau == 11 / 5


def test_interval_resamples_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    rounds = (torch.rand(40, generator=generator) * 50 + 50).tolist()
    once = [AnswerRounds(f"s{i}", 128, r, (r,), (0.0,)) for i, r in enumerate(rounds)]
    summary = summarise(once, seed=1)
    assert summary.low < summary.tau < summary.high
    # The delta method's interval, from another formula; 2,000 draws of 40 skewed values are good to a tenth.
    values = torch.tensor(rounds, dtype=torch.float64)
    half = 1.96 * 128 * values.std() / values.mean() ** 2 / 40**0.5
    assert (summary.high - summary.low) / 2 == pytest.approx(float(half), rel=0.15)
    # Answers of one sample are drawn together: three copies of each say nothing new.
    assert summarise(once * 3, seed=1).low == pytest.approx(summary.low)
    assert summarise(once, seed=1) == summary
    assert summarise(once, seed=2).low != summary.low
    alone = summarise(once[:1], seed=0)
    assert alone.low == alone.tau == alone.high


def test_answers_without_rounds_have_no_tau() -> None:
    with pytest.raises(UserError, match="answers of two tokens or more, got 2 answers with 2 tokens in all"):
        summarise([AnswerRounds("a", 1, 0.0, (0.0,), (0.0,))] * 2, seed=0)
    with pytest.raises(UserError, match="got 0 answers with 0 tokens"):
        summarise([], seed=0)
