"""Fused work of a draft step on a GPU, in Triton.

Only what lies between the matrix products: a row's own chain merged into its context attention, and the draft head's
scores. Each has an equal in plain torch beside its caller, which runs on the CPU and is what the tests compare with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORE_BLOCK = 4096  # draft tokens per pass: 16 values a thread at 8 warps, which keeps reads in flight


def merge_chain(
    query: Tensor,  # (R, n_q, d)
    own_keys: Tensor,  # (R, C, n_kv, d)
    own_values: Tensor,  # (R, C, n_kv, d)
    rows: Tensor,  # (R,) int64 tokens
    context: Tensor,  # (T, n_q, d) attention over the step-0 keys
    context_lse: Tensor,  # (T, n_q) fp32, of any strides
) -> tuple[Tensor, Tensor]:  # output (R, n_q, d), its log-sum-exp (R, n_q) fp32
    """Adds each row's own chain to its attention over the context."""
    num_rows, num_heads, head_dim = query.shape
    chain_length, num_kv_heads = own_keys.shape[1:3]
    output = torch.empty_like(query)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=query.device)
    group = num_heads // num_kv_heads
    _merge_chain_kernel[(num_rows, num_kv_heads)](
        query,
        own_keys,
        own_values,
        rows,
        context,
        context_lse,
        output,
        lse,
        chain_length,
        *context_lse.stride(),
        head_dim**-0.5,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return output, lse


def merge_chain_backward(
    grad: Tensor,  # (R, n_q, d)
    query: Tensor,  # (R, n_q, d)
    own_keys: Tensor,  # (R, C, n_kv, d)
    own_values: Tensor,  # (R, C, n_kv, d)
    output: Tensor,  # (R, n_q, d) merged
    lse: Tensor,  # (R, n_q) merged
    rows: Tensor,  # (R,) int64 tokens
    context_grad_query: Tensor,  # (T, n_q, d) from the context's backward
) -> tuple[Tensor, Tensor, Tensor]:  # gradients of query (R, n_q, d), own keys and own values
    """Returns the gradients of a row's own chain; the query's includes what the context's backward gave."""
    num_rows, num_heads, head_dim = query.shape
    chain_length, num_kv_heads = own_keys.shape[1:3]
    grad_query = torch.empty_like(query)
    grad_keys, grad_values = torch.empty_like(own_keys), torch.empty_like(own_values)
    group = num_heads // num_kv_heads
    _merge_chain_backward_kernel[(num_rows, num_kv_heads)](
        grad,
        query,
        own_keys,
        own_values,
        output,
        lse,
        rows,
        context_grad_query,
        grad_query,
        grad_keys,
        grad_values,
        chain_length,
        head_dim**-0.5,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return grad_query, grad_keys, grad_values


def score_rows(
    logits: Tensor,  # (N, W) the drafter's, overwritten with their gradient where `grad_scale` is given
    target_logits: Tensor,  # (n, W) the target's on the draft vocabulary
    target_lse: Tensor,  # (n,) fp32: log-sum-exp of `target_logits`
    share: Tensor,  # (n,) fp32: what share of the target's whole mass the draft vocabulary has
    target_index: Tensor,  # (N,) int64: which target row each row is scored against
    grad_scale: Tensor | None,  # (N,) fp32: what each row's (drafter - target) is multiplied by
) -> tuple[Tensor, Tensor, Tensor]:  # soft cross-entropy (N,), acceptance (N,), first choice (N,) int64
    """Scores draft logits against the target's softmax over W in two passes, and leaves their gradient in place.

    The acceptance, 1 - TV, compares the drafter with the target over all V: the target's share is taken into account.
    """
    num_rows, width = logits.shape
    cross_entropy = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    acceptance = torch.empty_like(cross_entropy)
    choice = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _score_rows_kernel[(num_rows,)](
            logits,
            target_logits,
            target_lse,
            share,
            target_index,
            cross_entropy if grad_scale is None else grad_scale,
            cross_entropy,
            acceptance,
            choice,
            width,
            WITH_GRADIENT=grad_scale is not None,
            BLOCK=SCORE_BLOCK,
            num_warps=8,
        )
    return cross_entropy, acceptance, choice


@triton.jit
def _merge_chain_kernel(
    query,
    own_keys,
    own_values,
    rows,
    context,
    context_lse,
    output,
    lse,
    chain_length,
    lse_token_stride,
    lse_head_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    token = tl.load(rows + row)
    heads = kv_head * GROUP + tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = tl.arange(0, GROUP_BLOCK) < GROUP
    is_dim = dims < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    at_row = (row * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    at_token = (token * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + at_row, mask=mask, other=0.0).to(tl.float32)
    # Online softmax that starts from the context: its output counts once, with its log-sum-exp as the running maximum.
    weighted = tl.load(context + at_token, mask=mask, other=0.0).to(tl.float32)
    maximum = tl.load(context_lse + token * lse_token_stride + heads * lse_head_stride, mask=is_head, other=0.0)
    total = tl.full([GROUP_BLOCK], 1.0, tl.float32)
    for link in range(chain_length):
        at_own = ((row * chain_length + link) * KV_HEADS + kv_head) * HEAD_DIM + dims
        k = tl.load(own_keys + at_own, mask=is_dim, other=0.0).to(tl.float32)
        v = tl.load(own_values + at_own, mask=is_dim, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], axis=1) * scale
        new_maximum = tl.maximum(maximum, score)
        kept = tl.exp(maximum - new_maximum)
        prob = tl.exp(score - new_maximum)
        weighted = weighted * kept[:, None] + prob[:, None] * v[None, :]
        total = total * kept + prob
        maximum = new_maximum
    tl.store(output + at_row, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)
    tl.store(lse + row * KV_HEADS * GROUP + heads, maximum + tl.log(total), mask=is_head)


@triton.jit
def _merge_chain_backward_kernel(
    grad,
    query,
    own_keys,
    own_values,
    output,
    lse,
    rows,
    context_grad_query,
    grad_query,
    grad_keys,
    grad_values,
    chain_length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    token = tl.load(rows + row)
    heads = kv_head * GROUP + tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = tl.arange(0, GROUP_BLOCK) < GROUP
    is_dim = dims < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    at_row = (row * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    at_token = (token * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    g = tl.load(grad + at_row, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(query + at_row, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(output + at_row, mask=mask, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + row * KV_HEADS * GROUP + heads, mask=is_head, other=0.0)
    delta = tl.sum(g * o, axis=1)
    grad_q = tl.load(context_grad_query + at_token, mask=mask, other=0.0).to(tl.float32)
    for link in range(chain_length):
        at_own = ((row * chain_length + link) * KV_HEADS + kv_head) * HEAD_DIM + dims
        k = tl.load(own_keys + at_own, mask=is_dim, other=0.0).to(tl.float32)
        v = tl.load(own_values + at_own, mask=is_dim, other=0.0).to(tl.float32)
        prob = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - row_lse)
        prob = tl.where(is_head, prob, 0.0)
        grad_score = prob * (tl.sum(g * v[None, :], axis=1) - delta) * scale
        grad_q += grad_score[:, None] * k[None, :]
        grad_k = tl.sum(grad_score[:, None] * q, axis=0)
        grad_v = tl.sum(prob[:, None] * g, axis=0)
        tl.store(grad_keys + at_own, grad_k.to(grad_keys.dtype.element_ty), mask=is_dim)
        tl.store(grad_values + at_own, grad_v.to(grad_values.dtype.element_ty), mask=is_dim)
    tl.store(grad_query + at_row, grad_q.to(grad_query.dtype.element_ty), mask=mask)


@triton.jit
def _score_rows_kernel(
    logits,
    target_logits,
    target_lse,
    share,
    target_index,
    grad_scale,
    cross_entropy,
    acceptance,
    choice,
    width,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_index + row)
    logits += row * width
    target_logits += target * width
    lse_of_target = tl.load(target_lse + target)
    lanes = tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum, sum and dot product; lanes meet once, after the pass.
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    places = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        mask = start + lanes < width
        x = tl.load(logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.load(target_logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
        prob = tl.exp(y - lse_of_target)
        dots += tl.where(mask, prob * x, 0.0)
        larger = x > maxima
        new_maxima = tl.where(larger, x, maxima)
        totals = totals * tl.where(larger, tl.exp(maxima - new_maxima), 1.0) + tl.where(
            mask, tl.exp(x - new_maxima), 0.0
        )
        places = tl.where(larger, start + lanes, places)
        maxima = new_maxima
    maximum = tl.max(maxima, axis=0)
    total = tl.sum(tl.where(maxima > float("-inf"), totals * tl.exp(maxima - maximum), 0.0), axis=0)
    lse = maximum + tl.log(total)
    # Ties go to the smaller token, as torch's argmax has it on one device.
    tl.store(choice + row, tl.min(tl.where(maxima == maximum, places, width), axis=0).to(tl.int64))
    tl.store(cross_entropy + row, lse - tl.sum(dots, axis=0))
    row_share = tl.load(share + target)
    if WITH_GRADIENT:
        scale = tl.load(grad_scale + row)
    overlap = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + lanes < width
        x = tl.load(logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.load(target_logits + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
        prob = tl.exp(y - lse_of_target)
        drafted = tl.exp(x - lse)
        overlap += tl.minimum(prob * row_share, drafted)
        if WITH_GRADIENT:
            tl.store(logits + start + lanes, ((drafted - prob) * scale).to(logits.dtype.element_ty), mask=mask)
    tl.store(acceptance + row, tl.sum(overlap, axis=0))
