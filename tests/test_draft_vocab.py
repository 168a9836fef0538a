"""The draft vocabulary keeps frequent tokens, in target order, as offsets."""

import logging
from collections import Counter

import pytest
import torch

from eagle3.config import DraftConfig, UserError
from eagle3.draft.draft_vocab import build_draft_vocab, coverage_by_domain, draft_vocab_size, tau_ceiling


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_most_frequent_tokens_in_target_order() -> None:
    vocab = build_draft_vocab(counts(0, 5, 1, 9, 0, 7), 3, [])
    assert vocab.target_ids.tolist() == [1, 3, 5]
    assert vocab.d2t.tolist() == [1, 2, 3]  # offsets
    assert vocab.t2d.tolist() == [False, True, False, True, False, True]
    assert vocab.d2t.dtype == torch.int64


def test_ties_go_to_the_smaller_id() -> None:
    assert build_draft_vocab(counts(2, 3, 2, 2, 3), 3, []).target_ids.tolist() == [0, 1, 4]


def test_choice_is_that_of_a_sorted_list() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(500, (2000,), generator=generator).square() // 500
    token_counts = tokens.bincount(minlength=500)
    occurring = Counter(tokens.tolist())
    expected = sorted(sorted(range(500), key=lambda token: (-occurring[token], token))[:200])
    assert build_draft_vocab(token_counts, 200, []).target_ids.tolist() == expected


def test_tokens_to_keep_are_in_whatever_their_count() -> None:
    vocab = build_draft_vocab(counts(9, 8, 7, 0, 0), 3, [4, 4])
    assert vocab.target_ids.tolist() == [0, 1, 4]


def test_lowest_ids_fill_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        vocab = build_draft_vocab(counts(0, 0, 0, 4, 0, 1), 5, [4])
    assert vocab.target_ids.tolist() == [0, 1, 3, 4, 5]
    assert "5 of 6 target tokens, 2 of them filled up" in caplog.text
    assert "covers 100.00 % of 5 supervised tokens (2 distinct)" in caplog.text


def test_coverage_counts_occurrences() -> None:
    token_counts = counts(6, 0, 3, 1)
    assert build_draft_vocab(token_counts, 1, []).coverage(token_counts) == 0.6
    assert build_draft_vocab(token_counts, 2, []).coverage(token_counts) == 0.9
    assert build_draft_vocab(token_counts, 2, []).coverage(counts(0, 0, 0, 0)) == 1.0


def test_whole_vocabulary_has_no_offsets() -> None:
    vocab = build_draft_vocab(counts(0, 3, 0, 1), 4, [1])
    assert not vocab.d2t.any()
    assert vocab.t2d.all()


@pytest.mark.parametrize(("size", "low"), [(0, 1), (5, 1), (1, 2)])
def test_size_must_fit_the_vocabulary(size: int, low: int) -> None:
    must_keep = list(range(low)) if low > 1 else []
    with pytest.raises(UserError, match=rf"draft_vocab_size must be between {low} .* and 4 .*, got {size}"):
        build_draft_vocab(counts(1, 2, 3, 4), size, must_keep)


def test_tokens_to_keep_must_be_target_tokens() -> None:
    with pytest.raises(UserError, match=r"must be target tokens, 0\.\.3, got \[-1, 4\]"):
        build_draft_vocab(counts(1, 2, 3, 4), 2, [4, 1, -1])
    with pytest.raises(UserError, match=r"must be target tokens, 0\.\.3, got \[-1, 4\]"):
        draft_vocab_size(covering(0.9), counts(1, 2, 3, 4), [4, 1, -1])


def covering(share: float | None) -> DraftConfig:
    return DraftConfig(draft_vocab_size=7, draft_vocab_coverage=share)


def test_the_size_is_the_smallest_that_covers_the_share() -> None:
    generator = torch.Generator().manual_seed(0)
    token_counts = (torch.rand(2000, generator=generator) ** 8 * 1000).long()
    must_keep = [3, 1999, 17]
    for share in (0.5, 0.9, 0.99, 1.0):
        size = draft_vocab_size(covering(share), token_counts, must_keep)
        assert size % 128 == 0 or size == 2000
        assert build_draft_vocab(token_counts, size, must_keep).coverage(token_counts) >= share
        if size > 128:
            smaller = build_draft_vocab(token_counts, size - 128, must_keep)
            assert smaller.coverage(token_counts) < share, (share, size)


def test_without_a_share_the_size_is_the_settings() -> None:
    assert draft_vocab_size(covering(None), counts(1, 2, 3), []) == 7
    assert draft_vocab_size(covering(0.5), counts(1, 2, 3), []) == 3  # never more than there are


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_coverage_that_is_no_share_is_named(share: float) -> None:
    with pytest.raises(UserError, match=rf"draft_vocab_coverage must be above 0 and at most 1, got {share}; change it"):
        draft_vocab_size(covering(share), counts(1, 2, 3), [])


def rounds_by_decoding(answer: list[int], known: set[int], num_draft_tokens: int) -> int:
    """Counts the rounds of a drafter that is right wherever it can be, one after the other."""
    position, rounds = 0, 0
    while position < len(answer) - 1:
        right = 0
        while right < num_draft_tokens and position + 1 + right < len(answer) and answer[position + 1 + right] in known:
            right += 1
        position, rounds = position + right + 1, rounds + 1
    return rounds


def test_the_ceiling_of_tau_is_that_of_a_decoder_that_errs_only_outside_its_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    answers = [torch.randint(20, (n,), generator=generator) for n in (1, 2, 5, 40, 41, 300)]
    vocab = build_draft_vocab(torch.arange(20), 14, [])
    found = tau_ceiling(vocab, answers, 3)
    longer = [answer.tolist() for answer in answers[1:]]
    num_tokens = sum(len(answer) for answer in longer)
    known = set(vocab.target_ids.tolist())
    assert found.tau == pytest.approx(num_tokens / sum(rounds_by_decoding(answer, known, 3) for answer in longer))
    everything = set(range(20))
    full = sum(rounds_by_decoding(answer, everything, 3) for answer in longer)
    assert found.full_tau == pytest.approx(num_tokens / full)
    assert found.lost == pytest.approx(1 - found.tau / found.full_tau)
    assert 0 < found.lost < 1


def test_a_ceiling_needs_answers() -> None:
    with pytest.raises(UserError, match="must be taken over answers of two tokens or more, got none"):
        tau_ceiling(build_draft_vocab(counts(1, 1), 1, []), [torch.tensor([0])], 3)


def test_coverage_is_told_for_each_domain_the_worst_first() -> None:
    vocab = build_draft_vocab(counts(6, 0, 3, 1), 2, [])
    shares = coverage_by_domain(vocab, {"chat": counts(6, 0, 3, 1), "code": counts(0, 3, 1, 0)})
    assert list(shares.items()) == [("code", 0.25), ("chat", 0.9)]
