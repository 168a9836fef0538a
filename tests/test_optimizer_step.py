"""Counts, weights and the schedule; what a step equals is in test_trainer.py and test_ranks.py."""

import dataclasses
import itertools
import math

import pytest
import torch
from conftest import random_sample
from torch import Tensor

from eagle3.config import ObjectiveConfig, OptimizerConfig
from eagle3.draft.ttt import pack
from eagle3.training.optimizer_step import MetricSums, check_losses, count_rows, learning_rate_at, loss_weights

OBJECTIVE = ObjectiveConfig(ttt_steps=3, ttt_decay=0.5)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rows_are_counted_by_draft_step() -> None:
    masks = {"a": [0, 0, 1, 1, 1, 1], "b": [0, 1, 1, 0, 1]}
    packs = [pack([random_sample(name, mask)]) for name, mask in masks.items()]
    # Answers of 4, 2 and 1 tokens: one row fewer than tokens at step 0, one fewer at each later step.
    assert count_rows(packs, 3).tolist() == [3 + 1, 2, 1]
    assert count_rows([], 3).tolist() == [0, 0, 0]


def test_every_step_is_divided_by_the_first_ones_count() -> None:
    assert loss_weights(OBJECTIVE, f64(8, 4, 1)).tolist() == [1 / 8, 0.5 / 8, 0.25 / 8]


def test_per_step_means_are_divided_by_their_own_counts() -> None:
    per_step = dataclasses.replace(OBJECTIVE, count="per_step")
    assert loss_weights(per_step, f64(8, 4, 0)).tolist() == [1 / 8, 0.5 / 4, 0]


def test_sums_are_divided_once() -> None:
    first = MetricSums(f64(10, 4, 1), f64(5, 2, 1), f64(5, 1, 0), f64(2.5, 1, 0))
    second = MetricSums(f64(2, 2, 0), f64(1, 1, 0), f64(0, 1, 0), f64(0, 0.5, 0))
    both = first + second
    assert both.loss(OBJECTIVE) == pytest.approx((12 + 0.5 * 6 + 0.25 * 1) / 6)
    assert both.per_position() == {"top1": [5 / 6, 2 / 3, 0], "acceptance": [2.5 / 6, 0.5, 0]}


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_ratio=0.1)
    rates = [learning_rate_at(step, 100, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.55)  # halfway down
    assert rates[-1] == pytest.approx(0.1)
    assert all(before > after for before, after in itertools.pairwise(rates[9:]))


def test_learning_rate_without_warm_up_or_with_one_step() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.0)
    assert 0.9 < learning_rate_at(1, 10, config) < 1.0
    assert learning_rate_at(1, 1, config) == pytest.approx(0.1)


def test_losses_that_are_not_finite_name_their_samples() -> None:
    check_losses([1.0, 2.0], [["a"], ["b"]])
    with pytest.raises(FloatingPointError, match=r"got inf in 2 of 3 micro-batches.*samples 'b', 'c', 'd'"):
        check_losses([1.0, math.inf, math.nan], [["a"], ["b", "c"], ["d"]])
