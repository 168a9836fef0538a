"""The Triton kernels against the plain torch beside their callers; without a GPU in Triton's interpreter."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from draft_oracle import tiny_drafter
from tiny_objective import with_normalisers
from torch import Tensor

from eagle3.draft import fusion
from eagle3.draft.fusion import RopeTables, TokenHeads
from eagle3.draft.head import LossKind, _log_sum_exp, _score_rows
from eagle3.draft.objective import TTTSums, ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import pack
from eagle3.features.record import FeatureSample

pytest.importorskip("triton", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bf16 has 8 bits, and plain torch rounds to them between operations that a kernel does at once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Returns what a function gives with kernels, and without."""

    def run(function: Callable[[], Any]) -> tuple[Any, Any]:
        results = []
        for with_kernels in (True, False):
            for module in ("fusion", "attention", "head"):
                monkeypatch.setattr(f"eagle3.draft.{module}.has_kernels", lambda tensor, answer=with_kernels: answer)
            results.append(function())
        return results[0], results[1]

    return run


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(ours: Any, plain: Any, dtype: torch.dtype) -> None:
    for got, expected in zip(*(each if isinstance(each, tuple) else (each,) for each in (ours, plain)), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms(both: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.draft.row_kernels.NORM_PROGRAMS", 3)  # of 7 rows one has three, the others two
    states, update, table = (random_tensor(n, 20, dtype=dtype, seed=n) for n in (7, 8, 9))
    update, ids = update[:7], torch.tensor([3, 3, 0, 8, 1, 5, 3], device=DEVICE)
    weight = random_tensor(20, seed=1)
    wide = random_tensor(7, 40, dtype=dtype, seed=3)  # a slice of it has a row stride of its own
    for function in (
        lambda: fusion.norm(states, weight, 1e-5),
        lambda: fusion.norm(wide[:, 20:], weight, 1e-5),
        lambda: fusion.norm(table, weight, 1e-5, index=ids),
        lambda: fusion.norm(table, weight, 1e-5, index=ids, dtype=torch.float32),
        lambda: fusion.add_norm(states, update, weight, 1e-5),
        lambda: fusion.norm_backward(states, weight, 1e-5, wide[:, 20:]),
        lambda: fusion.norm_backward(states, weight, 1e-5, wide[:, :20], added=update),
        lambda: fusion.embeds_norm_backward(table, ids, weight, 1e-5, wide[:, :20]),
    ):
        ours, plain = both(function)
        assert_near(ours, plain, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_row_work(both: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.draft.row_kernels.COLUMNS_PER_PROGRAM", 8)  # rows of 12 and more, the last not full
    gate_up, grad = random_tensor(5, 2 * 12, dtype=dtype), random_tensor(5, 12, dtype=dtype, seed=1)
    heads = random_tensor(5, 19, 6, dtype=dtype)  # more heads than one program does
    angles = random_tensor(30, 3, seed=2)
    tables, positions = RopeTables(angles.cos(), angles.sin()), torch.tensor([4, 0, 29, 7, 7], device=DEVICE)
    index = torch.tensor([-1, 4, 0, -1], device=DEVICE)
    given = TokenHeads(random_tensor(7, 24, 6, dtype=dtype, seed=3), torch.tensor([6, -1, 0, 2, -1], device=DEVICE), 5)

    def turn_back() -> tuple[Tensor, Tensor]:
        grad_given = given._replace(table=given.table.clone())
        return fusion.rotate_backward(heads, positions, tables, 17, grad_given), grad_given.table

    for function in (
        lambda: fusion.swiglu(gate_up),
        lambda: fusion.swiglu_backward(gate_up, grad),
        lambda: fusion.rotate(heads, positions, tables, 17, given),
        turn_back,
        lambda: fusion.take(heads, index),
        lambda: fusion.take(heads[:, 3:7], index, out=torch.full((4, 4, 6), 9.0, dtype=dtype, device=DEVICE)),
    ):
        ours, plain = both(function)
        assert_near(ours, plain, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("kind", get_args(LossKind))
def test_scores(
    both: Any, dtype: torch.dtype, kind: LossKind, with_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.draft.score_kernels.SCORE_BLOCK", 16)  # three passes, the last one not full
    logits, target_logits = 3 * random_tensor(6, 40, dtype=dtype), 3 * random_tensor(3, 40, dtype=dtype, seed=1)
    logits[0, [5, 21, 37]] = 20.0  # a tie: the first one is chosen
    index = torch.tensor([2, 0, 2, 1, 1, 0], device=DEVICE)
    share, scale = random_tensor(3, seed=2).sigmoid(), random_tensor(6, seed=3)
    mass = random_tensor(6, seed=4).sigmoid()

    def score() -> tuple[Tensor, ...]:
        lse = _log_sum_exp(target_logits)
        grad_scale = scale if with_gradient else None
        scores = _score_rows(logits.clone(), target_logits, lse, share, index, mass, grad_scale, kind)
        grads = (scores.grad_logits,) if with_gradient else ()
        return lse, scores.loss, scores.acceptance, scores.choice, *grads

    ours, plain = both(score)
    assert ours[3][0] == 5
    assert_near(ours[:4], plain[:4], torch.float32)  # sums are fp32 whatever the logits are
    assert_near(ours[4:], plain[4:], dtype)


@pytest.mark.parametrize("drop_rejected", [False, True])
def test_whole_steps_with_all_gradients(
    both: Any, drop_rejected: bool, make_sample: Callable[..., FeatureSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three heads to a key head, a head size and a width that are no powers of two, rows that leave."""
    masks = [[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0]]
    packed = pack([make_sample(f"s{i}", m, seed=i, hidden_size=16, vocab_size=40) for i, m in enumerate(masks)])
    drafter = tiny_drafter(num_attention_heads=6, head_dim=8, fc_norm=True, norm_output=True).to(DEVICE)
    target = TargetWeights(random_tensor(40, 16), random_tensor(40, 16, seed=1), torch.ones(16), rms_norm_eps=1e-5)
    packed = with_normalisers(packed, target)
    monkeypatch.setattr(
        "eagle3.draft.objective._is_right",
        lambda chosen, recorded: torch.arange(len(chosen), device=DEVICE) % 3 > 0,
    )

    def run() -> tuple[Tensor, ...]:
        sums: TTTSums = ttt_sums(
            drafter,
            target.to(DEVICE, torch.float32),
            packed.to(DEVICE),
            ttt_steps=4,
            ttt_decay=0.8,
            renormalise=False,
            drop_rejected=drop_rejected,
        )
        grads = torch.autograd.grad(sums.loss, list(drafter.parameters()))
        return sums.loss, sums.step_loss, sums.num_counted, sums.num_top1, sums.acceptance, *grads

    ours, plain = both(run)
    assert_near(ours, plain, torch.float32)
    assert ours[2].tolist() == ([8, 3, 2, 0] if drop_rejected else [8, 5, 3, 1])
