"""Samples know which rows they kept, and held-out is a property of the id."""

import re

import pytest
import torch

from eagle3.features.record import FeatureSample, all_finite, is_held_out, supervised_rows


def sample_with_last_rows(last_rows: list[int]) -> FeatureSample:
    rows = torch.tensor(last_rows, dtype=torch.int32)
    return FeatureSample(
        sample_id="a",
        input_ids=torch.arange(10, dtype=torch.int32),
        loss_mask=torch.zeros(10, dtype=torch.bool),
        aux_hidden_states=torch.zeros(10, 6),
        last_hidden_states=rows[:, None].float().expand(-1, 2),  # each row says its number
        last_rows=rows,
    )


def test_supervised_rows_are_one_before_each_supervised_token() -> None:
    loss_mask = torch.tensor([False, False, True, True, False, True])
    assert supervised_rows(loss_mask).tolist() == [1, 2, 4]


def test_last_at_finds_rows_by_number_in_any_order() -> None:
    sample = sample_with_last_rows([2, 3, 7])
    assert sample.last_at(torch.tensor([7, 2])).tolist() == [[7.0, 7.0], [2.0, 2.0]]


@pytest.mark.parametrize("row", [0, 4, 9])
def test_last_at_refuses_a_row_that_was_not_kept(row: int) -> None:
    message = f"must be among the 3 that were kept, got row {row} (sample 'a')"
    with pytest.raises(ValueError, match=re.escape(message)):
        sample_with_last_rows([2, 3, 7]).last_at(torch.tensor([3, row]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_finite_finds_one_number_wherever_it_is(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    largest = torch.finfo(dtype).max
    for shape in ((0, 64), (1, 1), (3, 65), (40, 1000)):  # below, beside and above what is looked at side by side
        states = torch.randn(shape, generator=generator).to(dtype)
        if states.numel():
            states.view(-1)[0], states.view(-1)[-1] = largest, -largest
        assert all_finite(states)
        assert all_finite(states.T)
        for place in {0, states.numel() // 3, states.numel() - 1} if states.numel() else ():
            for value in (float("nan"), float("inf"), -float("inf")):
                broken = states.clone()
                broken.view(-1)[place] = value
                assert not all_finite(broken), (shape, place, value)
                assert not all_finite(broken.T), (shape, place, value)


def test_held_out_depends_on_the_id_alone_and_takes_about_the_share() -> None:
    ids = [f"conversation-{i}" for i in range(3000)]
    held_out = [is_held_out(each, 1 / 6) for each in ids]
    assert held_out == [is_held_out(each, 1 / 6) for each in ids]
    assert 430 < sum(held_out) < 570, sum(held_out)  # 500 expected, a standard deviation is 20
    # A larger share only adds samples.
    assert all(is_held_out(each, 1 / 3) for each, out in zip(ids, held_out, strict=True) if out)
    assert not any(is_held_out(each, 0.0) for each in ids)
