"""Elementwise work of the draft layer, forward and backward.

Each function is plain torch on the CPU and one Triton kernel on a GPU. What is easy to get wrong is the dtype: sums
are taken in fp32, and what goes back to memory is in the dtype that came.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RopeTables(NamedTuple):
    """Cosines and sines of every position; fp32, for bf16 cannot tell position 300 from 301."""

    cos: Tensor  # (P, d/2)
    sin: Tensor  # (P, d/2)


class TokenHeads(NamedTuple):
    """What tokens add to the heads of the rows that read them."""

    table: Tensor  # (T, H, d)
    tokens: Tensor  # (N,) int64: which of T each row reads, no two the same one; -1 for none
    first: int  # the table's head that belongs to a row's first


class NormGradients(NamedTuple):
    """Gradients of a norm's inputs."""

    states: Tensor  # (N, D)
    weight: Tensor  # (D,)


def has_kernels(tensor: Tensor) -> bool:
    """Tells whether Triton kernels work on a tensor."""
    return tensor.is_cuda


def norm(
    states: Tensor,  # (N, D), or (V, D) with an index
    weight: Tensor,  # (D,)
    eps: float,
    index: Tensor | None = None,  # (N,) int64: which of `states` each row reads
    dtype: torch.dtype | None = None,  # of what is returned; the states' by default
) -> Tensor:  # (N, D)
    """Returns Llama's RMSNorm of each row."""
    if has_kernels(states):
        num_rows = states.shape[0] if index is None else index.numel()
        normed = states.new_empty(num_rows, states.shape[1], dtype=dtype)
        _kernels().norm(states, weight, eps, normed, index=index)
        return normed
    return _plain_norm(states if index is None else states[index], weight, eps).to(dtype or states.dtype)


def add_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds to the residual stream (N, D) and norms what it has become; returns both."""
    if has_kernels(residual):
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        _kernels().norm(residual, weight, eps, normed, update=update, total=total)
        return total, normed
    total = residual + update
    return total, _plain_norm(total, weight, eps)


def norm_backward(
    states: Tensor,  # (N, D)
    weight: Tensor,  # (D,)
    eps: float,
    grad: Tensor,  # (N, D) of the norm
    added: Tensor | None = None,  # (N, D) gradient that reaches the states past the norm
) -> NormGradients:
    """Returns the gradients of a norm's inputs, the states' with `added`."""
    if has_kernels(states):
        grad_states = torch.empty_like(states)
        part = _kernels().norm_backward(states, weight, eps, grad, added=added, grad_states=grad_states)
        return NormGradients(grad_states, part.to(weight.dtype))
    unit, inverse_root = _unit_rows(states, eps)
    grad = grad.to(unit.dtype)
    along = grad * weight
    # What lies along the row changes its length alone, and the norm takes that out.
    grad_states = (along - unit * (along * unit).mean(-1, keepdim=True)) * inverse_root
    if added is not None:
        grad_states = grad_states + added
    return NormGradients(grad_states.to(states.dtype), (grad * unit).sum(0).to(weight.dtype))


def embeds_norm_backward(embed_tokens: Tensor, token_ids: Tensor, weight: Tensor, eps: float, grad: Tensor) -> Tensor:
    """Returns the gradient (D,) of the weight of the norm of embedded tokens (N,); the embeddings are frozen."""
    if has_kernels(grad):
        return _kernels().norm_backward(embed_tokens, weight, eps, grad, index=token_ids).to(weight.dtype)
    unit, _ = _unit_rows(F.embedding(token_ids, embed_tokens), eps)
    return (grad.to(unit.dtype) * unit).sum(0).to(weight.dtype)


def swiglu(gate_up: Tensor) -> Tensor:  # (N, 2I) -> (N, I)
    """Returns silu(gate) * up."""
    if has_kernels(gate_up):
        product = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _kernels().swiglu(gate_up, product)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product (N, I) once more, for its reads are the same, and the gradient (N, 2I) of its inputs."""
    if has_kernels(gate_up):
        product, grad_gate_up = torch.empty_like(grad), torch.empty_like(gate_up)
        _kernels().swiglu_backward(gate_up, grad, product, grad_gate_up)
        return product, grad_gate_up
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    open_share = gate.sigmoid()
    grad_gate = grad * up * (open_share + silu * (1 - open_share))
    return silu * up, torch.cat([grad_gate, grad * silu], dim=-1)


def rotate(
    heads: Tensor,  # (N, n, d)
    positions: Tensor,  # (N,) int64
    tables: RopeTables,
    num_rotated: int,  # heads; the rest is not turned
    added: TokenHeads,
) -> Tensor:  # (N, n, d)
    """Adds what tokens give, then applies RoPE to the first heads."""
    if has_kernels(heads):
        rotated = torch.empty_like(heads)
        _kernels().rotate(heads, rotated, num_rotated, positions, *tables, *added, backward=False)
        return rotated
    heads = heads + take(added.table[:, added.first : added.first + heads.shape[1]], added.tokens)
    return _turn(heads, positions, tables, num_rotated)


def rotate_backward(
    grad: Tensor,  # (N, n, d)
    positions: Tensor,  # (N,) int64
    tables: RopeTables,
    num_rotated: int,
    grad_added: TokenHeads,
) -> Tensor:  # (N, n, d)
    """Returns the gradient of the heads, and adds it to that of what tokens gave, in place."""
    if has_kernels(grad):
        turned = torch.empty_like(grad)
        _kernels().rotate(grad, turned, num_rotated, positions, *tables, *grad_added, backward=True)
        return turned
    turned = _turn(grad, positions, RopeTables(tables.cos, -tables.sin), num_rotated)
    there = grad_added.tokens >= 0
    table = grad_added.table[:, grad_added.first : grad_added.first + grad.shape[1]]
    table.index_add_(0, grad_added.tokens[there], turned[there].to(table.dtype))
    return turned


def _turn(heads: Tensor, positions: Tensor, tables: RopeTables, num_rotated: int) -> Tensor:  # (N, n, d) twice
    cos, sin = tables.cos[positions][:, None], tables.sin[positions][:, None]  # (N, 1, d/2)
    return torch.cat([apply_rope(heads[:, :num_rotated], cos, sin), heads[:, num_rotated:]], dim=1)


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (N, n, d), (N, 1, d/2) -> (N, n, d)
    """Applies RoPE with each row's own cosines and sines, in plain torch."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def take(source: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:  # (M, ...), (N,) -> (N, ...)
    """Returns row `index[i]` of `source` as row i, and zeros where the index is -1."""
    taken = source.new_empty(index.numel(), *source.shape[1:]) if out is None else out
    if has_kernels(source):
        _kernels().take(source, index, taken)
        return taken
    there = (index >= 0).nonzero().flatten()
    return taken.zero_().index_copy_(0, there, source[index[there]])


class TakeRows(torch.autograd.Function):
    """`take` whose gradient is `take` too: index and inverse say which rows meet, each at most once."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # torch leaves ctx untyped
        ctx.save_for_backward(inverse)
        return take(source, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return take(grad, inverse), None, None


class RmsNorm(torch.autograd.Function):
    """`norm` with its gradient, for states of any shape (..., D)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.eps = eps
        return norm(states.reshape(-1, states.shape[-1]), weight, eps).view_as(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weight = ctx.saved_tensors
        width = states.shape[-1]
        grads = norm_backward(states.reshape(-1, width), weight, ctx.eps, grad.reshape(-1, width))
        return grads.states.view_as(states), grads.weight, None


def _unit_rows(states: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rows (N, D) of mean square one, and what they were multiplied by (N, 1); fp32 or wider."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    inverse_root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse_root, inverse_root


def _plain_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (_unit_rows(states, eps)[0] * weight).to(states.dtype)


def _kernels() -> ModuleType:
    # triton comes with the CUDA builds of torch alone.
    from eagle3.draft import row_kernels

    return row_kernels
