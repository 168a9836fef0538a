"""Scores of the draft head's logits, on a GPU, in Triton.

One program does one row of logits, which is read twice: once for its log-sum-exp, once for everything else.
`head` has the same in plain torch, which runs on the CPU and is what the tests compare with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORE_BLOCK = 4096  # draft tokens at a time: 16 a thread at 8 warps, which keeps reads in flight


def log_sum_exp(logits: Tensor) -> Tensor:  # (n, W) -> (n,) fp32
    """Returns each row's log-sum-exp in one pass."""
    num_rows, width = logits.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _log_sum_exp_kernel[(num_rows,)](logits, lse, width, BLOCK=SCORE_BLOCK, num_warps=8)
    return lse


def score_rows(
    logits: Tensor,  # (N, W) the drafter's, overwritten with their gradient where `grad_scale` is given
    target_logits: Tensor,  # (n, W) the target's on the draft vocabulary
    target_lse: Tensor,  # (n,) fp32: log-sum-exp of `target_logits`
    share: Tensor,  # (n,) fp32: what share of the target's whole mass the draft vocabulary has
    target_index: Tensor,  # (N,) int64: which target row each row is scored against
    mass: Tensor,  # (N,) fp32: what the target distribution of cross-entropy and KL sums to
    grad_scale: Tensor | None,  # (N,) fp32: what each row's gradient is multiplied by
    kind: str,  # of the loss
    lk_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # loss (N,), acceptance (N,), first choice (N,) int64
    """Scores draft logits against the target's, and leaves their gradient in place.

    Two passes over a row, and a third for losses whose gradient depends on the row's acceptance.

    The acceptance, 1 - TV, compares the drafter with the target over all V: the target's share is taken into account.
    """
    num_rows, width = logits.shape
    loss = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    acceptance = torch.empty_like(loss)
    choice = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    # Rows that share a target row run side by side, so that all but one of them find it in the cache.
    order = target_index.argsort()
    _score_rows_kernel[(num_rows,)](
        logits,
        target_logits,
        target_lse,
        share,
        order,
        target_index,
        mass,
        grad_scale,
        loss,
        acceptance,
        choice,
        lk_decay,
        width,
        KIND=kind,
        WITH_TV=kind in ("tv", "lk"),
        BLOCK=SCORE_BLOCK,
        num_warps=8,
    )
    return loss, acceptance, choice


@triton.jit
def _row_log_sum_exp(logits, width, BLOCK: tl.constexpr):
    """Returns a row's log-sum-exp and its first largest place, in one pass."""
    lanes = tl.arange(0, BLOCK)
    # The maximum is the row's, so that each number costs one exponential; where it lies is each lane's to remember.
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    places = tl.zeros([BLOCK], tl.int32)
    totals = tl.zeros([BLOCK], tl.float32)
    maximum = tl.max(maxima, axis=0)
    for start in range(0, width, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < width, other=float("-inf")).to(tl.float32)
        larger = x > maxima
        maxima = tl.where(larger, x, maxima)
        places = tl.where(larger, start + lanes, places)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        totals = totals * tl.exp(maximum - new_maximum) + tl.exp(x - new_maximum)
        maximum = new_maximum
    # Ties go to the smaller place, as torch's argmax has it on one device.
    place = tl.min(tl.where(maxima == maximum, places, width), axis=0)
    return maximum + tl.log(tl.sum(totals, axis=0)), place


@triton.jit
def _log_sum_exp_kernel(logits, lse, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_lse, _ = _row_log_sum_exp(logits + row * width, width, BLOCK)
    tl.store(lse + row, row_lse)


@triton.jit
def _score_rows_kernel(
    logits,
    target_logits,
    target_lse,
    share,
    order,
    target_index,
    mass,
    grad_scale,
    loss,
    acceptance,
    choice,
    lk_decay,
    width,
    KIND: tl.constexpr,
    WITH_TV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(order + tl.program_id(0))
    target = tl.load(target_index + row)
    logits += row * width
    target_logits += target * width
    lse, place = _row_log_sum_exp(logits, width, BLOCK)
    lse_of_target = tl.load(target_lse + target)
    row_share = tl.load(share + target)
    row_mass = tl.load(mass + row)
    if grad_scale is not None:
        scale = tl.load(grad_scale + row)
    lanes = tl.arange(0, BLOCK)
    dots = tl.zeros([BLOCK], tl.float32)
    overlap = tl.zeros([BLOCK], tl.float32)
    target_dots = tl.zeros([BLOCK], tl.float32)
    below = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + lanes < width
        x = tl.load(logits + start + lanes, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(target_logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
        prob = tl.exp(y - lse_of_target)
        drafted = tl.exp(x - lse)
        dots += prob * x
        overlap += tl.minimum(prob * row_share, drafted)
        if KIND != "cross_entropy":
            target_dots += prob * tl.where(prob > 0, y, 0.0)
        if WITH_TV:
            below += tl.where(mask & (drafted < prob * row_share), drafted, 0.0)
        if grad_scale is not None and not WITH_TV:
            grad = (drafted - prob) * row_mass * scale
            tl.store(logits + start + lanes, grad.to(logits.dtype.element_ty), mask=mask)
    accepted = tl.sum(overlap, axis=0)
    row_loss = row_mass * (lse - tl.sum(dots, axis=0))
    if KIND != "cross_entropy":
        row_loss += row_mass * (tl.sum(target_dots, axis=0) - lse_of_target)
    if WITH_TV:
        divergence_weight = 0.0
        if KIND == "lk":
            divergence_weight = tl.exp(-lk_decay * accepted)
        row_loss = divergence_weight * row_loss + (1.0 - divergence_weight) * (1.0 - accepted)
        if grad_scale is not None:
            pull = tl.sum(below, axis=0)
            for start in range(0, width, BLOCK):
                mask = start + lanes < width
                x = tl.load(logits + start + lanes, mask=mask, other=0.0).to(tl.float32)
                y = tl.load(target_logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
                prob = tl.exp(y - lse_of_target)
                drafted = tl.exp(x - lse)
                is_below = tl.where(drafted < prob * row_share, 1.0, 0.0)
                grad = (drafted - prob) * row_mass * divergence_weight
                grad += drafted * (pull - is_below) * (1.0 - divergence_weight)
                tl.store(logits + start + lanes, (grad * scale).to(logits.dtype.element_ty), mask=mask)
    tl.store(choice + row, place.to(tl.int64))
    tl.store(loss + row, row_loss)
    tl.store(acceptance + row, accepted)
