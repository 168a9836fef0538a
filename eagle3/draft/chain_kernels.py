"""A row's own chain merged into its attention over the context, on a GPU, in Triton.

One program does the query heads that share a key head at one row. `attention` has the same in plain torch, which runs
on the CPU and is what the tests compare with.
"""

import triton
import triton.language as tl
from torch import Tensor


def merge_chain(
    query: Tensor,  # (T, n_q, d)
    chain: Tensor,  # (C, T, 2 n_kv, d) own keys and values of the steps so far
    rows: Tensor,  # (R,) int64 tokens
    context: Tensor,  # (T, n_q, d) attention over the step-0 keys
    lse: Tensor,  # (T, n_q) fp32, of any strides: the context's log-sum-exp, becomes the merged one at the rows
) -> Tensor:  # (R, n_q, d)
    """Adds each row's own chain to its attention over the context."""
    num_heads, head_dim = query.shape[1:]
    output = query.new_empty(rows.numel(), num_heads, head_dim)
    _merge_chain_kernel[(rows.numel(), chain.shape[2] // 2)](
        query,
        chain,
        chain.stride(0),
        chain.shape[0],
        rows,
        context,
        lse,
        *lse.stride(),
        output,
        head_dim**-0.5,
        **_head_sizes(query, chain),
    )
    return output


def merge_chain_backward(
    grad: Tensor,  # (R, n_q, d)
    query: Tensor,  # (T, n_q, d)
    chain: Tensor,  # (C, T, 2 n_kv, d)
    rows: Tensor,  # (R,) int64 tokens
    output: Tensor,  # (R, n_q, d) merged
    lse: Tensor,  # (T, n_q) merged, of any strides
    context_grad_query: Tensor,  # (T, n_q, d) from the context's backward
    grad_chain: Tensor,  # (C, T, 2 n_kv, d) of later steps; this step's is added to all links but the last
) -> Tensor:  # (R, n_q + 2 n_kv, d)
    """Returns the gradients of what this step projected: query, and the chain's last link with what later steps say."""
    num_heads, head_dim = query.shape[1:]
    grad_projected = query.new_empty(rows.numel(), num_heads + chain.shape[2], head_dim)
    _merge_chain_backward_kernel[(rows.numel(), chain.shape[2] // 2)](
        grad,
        query,
        chain,
        chain.stride(0),
        chain.shape[0],
        rows,
        output,
        lse,
        *lse.stride(),
        context_grad_query,
        grad_chain,
        grad_projected,
        head_dim**-0.5,
        **_head_sizes(query, chain),
    )
    return grad_projected


def _head_sizes(query: Tensor, chain: Tensor) -> dict[str, int]:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = chain.shape[2] // 2
    group = num_heads // num_kv_heads
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_BLOCK": triton.next_power_of_2(group),
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "num_warps": 1,  # a group of heads is 512 to 1,024 numbers
    }


@triton.jit
def _merge_chain_kernel(
    query,
    chain,
    link_stride,
    chain_length,
    rows,
    context,
    lse,
    lse_token_stride,
    lse_head_stride,
    output,
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
    at_token = (token * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + at_token, mask=mask, other=0.0).to(tl.float32)
    # Online softmax that starts from the context: its output counts once, with its log-sum-exp as the running maximum.
    weighted = tl.load(context + at_token, mask=mask, other=0.0).to(tl.float32)
    lse += token * lse_token_stride + heads * lse_head_stride
    maximum = tl.load(lse, mask=is_head, other=0.0)
    total = tl.full([GROUP_BLOCK], 1.0, tl.float32)
    own_key = chain + (token * 2 * KV_HEADS + kv_head) * HEAD_DIM + dims
    for _ in range(chain_length):
        k = tl.load(own_key, mask=is_dim, other=0.0).to(tl.float32)
        v = tl.load(own_key + KV_HEADS * HEAD_DIM, mask=is_dim, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], axis=1) * scale
        new_maximum = tl.maximum(maximum, score)
        kept = tl.exp(maximum - new_maximum)
        prob = tl.exp(score - new_maximum)
        weighted = weighted * kept[:, None] + prob[:, None] * v[None, :]
        total = total * kept + prob
        maximum = new_maximum
        own_key += link_stride
    at_row = (row * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + at_row, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)
    tl.store(lse, maximum + tl.log(total), mask=is_head)


@triton.jit
def _merge_chain_backward_kernel(
    grad,
    query,
    chain,
    link_stride,
    chain_length,
    rows,
    output,
    lse,
    lse_token_stride,
    lse_head_stride,
    context_grad_query,
    grad_chain,
    grad_projected,
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
    q = tl.load(query + at_token, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(output + at_row, mask=mask, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + token * lse_token_stride + heads * lse_head_stride, mask=is_head, other=0.0)
    delta = tl.sum(g * o, axis=1)
    grad_q = tl.load(context_grad_query + at_token, mask=mask, other=0.0).to(tl.float32)
    at_own = (token * 2 * KV_HEADS + kv_head) * HEAD_DIM + dims
    at_value = KV_HEADS * HEAD_DIM
    # Where this step's own key and value have their gradients among what it projected.
    own_grad = grad_projected + (row * (GROUP + 2) * KV_HEADS + GROUP * KV_HEADS + kv_head) * HEAD_DIM + dims
    for link in range(chain_length):
        k = tl.load(chain + at_own, mask=is_dim, other=0.0).to(tl.float32)
        v = tl.load(chain + at_own + at_value, mask=is_dim, other=0.0).to(tl.float32)
        prob = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - row_lse)
        prob = tl.where(is_head, prob, 0.0)
        grad_score = prob * (tl.sum(g * v[None, :], axis=1) - delta) * scale
        grad_q += grad_score[:, None] * k[None, :]
        grad_k = tl.load(grad_chain + at_own, mask=is_dim, other=0.0).to(tl.float32)
        grad_k += tl.sum(grad_score[:, None] * q, axis=0)
        grad_v = tl.load(grad_chain + at_own + at_value, mask=is_dim, other=0.0).to(tl.float32)
        grad_v += tl.sum(prob[:, None] * g, axis=0)
        if link < chain_length - 1:
            tl.store(grad_chain + at_own, grad_k.to(grad_chain.dtype.element_ty), mask=is_dim)
            tl.store(grad_chain + at_own + at_value, grad_v.to(grad_chain.dtype.element_ty), mask=is_dim)
        else:
            tl.store(own_grad, grad_k.to(grad_projected.dtype.element_ty), mask=is_dim)
            tl.store(own_grad + at_value, grad_v.to(grad_projected.dtype.element_ty), mask=is_dim)
        at_own += link_stride
    at_query = (row * (GROUP + 2) * KV_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(grad_projected + at_query, grad_q.to(grad_projected.dtype.element_ty), mask=mask)
