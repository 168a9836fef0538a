"""The draft vocabulary keeps frequent tokens, in target order, as offsets."""

import logging
from collections import Counter

import pytest
import torch

from eagle3.config import UserError
from eagle3.draft.draft_vocab import build_draft_vocab


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
