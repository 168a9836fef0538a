"""Packs and drafters at the edges of what there can be have the values and gradients of the dense definition."""

from typing import Any

import pytest
import torch
from conftest import random_sample
from dense_oracle import dense_sums
from draft_oracle import tiny_drafter
from tiny_objective import DECAY, MASKS, gradients, random_target, sums_of

from eagle3.draft.ttt import PackedSequences, pack

TURN = [0, 0, 1, 1, 1, 1, 0]
CHUNK = 4 * 12  # elements that one target row takes at 4 steps of 12 draft tokens


def packed(masks: list[list[int]], *, all_rows: bool = False) -> PackedSequences:
    return pack(
        [
            random_sample(f"s{i}", mask, seed=i, hidden_size=16, vocab_size=40, all_rows=all_rows)
            for i, mask in enumerate(masks)
        ]
    )


def assert_as_defined(changes: dict[str, Any], *, drop_rejected: bool = False, **settings: Any) -> None:
    """Compares all sums, and gradients to 1e-5 of each tensor's largest: fp32, other summation order."""
    drafter, target = tiny_drafter(**changes), random_target()
    ours = sums_of(drafter, target, drop_rejected=drop_rejected, **settings)
    defaults = {"ttt_steps": 4, "ttt_decay": DECAY, "renormalise": True}
    dense = dense_sums(drafter, target, **(defaults | settings))
    for name in ("loss", "step_loss", "num_counted", "num_top1", "acceptance"):
        torch.testing.assert_close(getattr(ours, name), getattr(dense, name), rtol=1e-5, atol=1e-6, msg=name)
    expected = gradients(drafter, dense.loss)
    for name, gradient in gradients(drafter, ours.loss).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("asks_all", [True, False])
@pytest.mark.parametrize(
    ("masks", "ttt_steps"),
    [
        (MASKS, 1),
        ([[1] * 6, [1] * 3], 9),  # more steps than any document has tokens
        ([[1]], 4),
        ([[1], [0, 1, 1, 1], [0], [1, 1, 1], [1]], 4),  # documents of one token between others
        ([[0, 0, 0], TURN], 4),
        ([TURN, [0, 0, 0]], 4),
        ([[1] * 6, [1] * 5], 4),  # all rows supervised
        ([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1], [0, 1, 0, 1, 0]], 4),
    ],
)
def test_packs(masks: list[list[int]], ttt_steps: int, asks_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With queries for all tokens, and as on a GPU for none of a prompt."""
    monkeypatch.setattr("eagle3.draft.ttt.wants_all_queries", lambda lengths, device: asks_all)
    assert_as_defined({}, packed=packed(masks), ttt_steps=ttt_steps)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 40},  # the target's
        {"draft_vocab_size": 1},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 10},
        {"head_dim": 64},
    ],
)
def test_drafters(changes: dict[str, int], renormalise: bool) -> None:
    assert_as_defined(changes, packed=packed([TURN, [1] * 6]), renormalise=renormalise)


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("num_targets", [1, 2, 3, 4, 5, 9])
def test_chunks_that_end_where_documents_do(num_targets: int, all_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, 5 and 4 supervised target rows; or of all tokens, where a chunk may have no row that is scored."""
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": num_targets * CHUNK})
    masks = [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0] * 9, [0, 1, 1, 1, 1]]
    assert_as_defined({}, packed=packed(masks, all_rows=all_rows))


@pytest.mark.parametrize("step_weights", [[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
def test_steps_that_weigh_nothing(step_weights: list[float]) -> None:
    assert_as_defined({}, packed=packed(MASKS), step_weights=torch.tensor(step_weights))


@pytest.mark.parametrize("ttt_steps", [1, 4, 9])
def test_no_row_that_leaves(ttt_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors are scored step by step, and if all survive they are what is scored at once."""
    monkeypatch.setattr("eagle3.draft.objective._is_right", lambda chosen, recorded: torch.ones_like(chosen).bool())
    assert_as_defined({}, drop_rejected=True, packed=packed([*MASKS, [1] * 9]), ttt_steps=ttt_steps)
