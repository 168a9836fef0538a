"""Functions of elementwise work that a GPU runs as one kernel.

Read them as plain torch: that is what the CPU runs. What is easy to get wrong is the dtype: sums are taken in fp32,
and what goes back to memory is in the dtype that came.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function for GPUs when it is first called with a tensor there; elsewhere it runs as written."""
    compiled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (isinstance(args[0], Tensor) and args[0].is_cuda):
            return function(*args, **kwargs)
        if not compiled:
            # The number of rows differs from step to step and from batch to batch: one kernel for all of them.
            compiled.append(torch.compile(function, dynamic=True))
        return compiled[0](*args, **kwargs)

    return run


@fused
def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:  # (..., D), (D,) -> (..., D)
    """Llama's RMSNorm, whose mean is taken in fp32 whatever the input."""
    wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(hidden_states.dtype)


@fused
def joined_rms_norms(
    embeds: Tensor,  # (N, D)
    hidden_states: Tensor,  # (N, D)
    embeds_weight: Tensor,  # (D,)
    hidden_weight: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (N, 2D)
    """Joins two inputs, each with its own norm."""
    wide_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    parts = []
    for part, weight in ((embeds, embeds_weight), (hidden_states, hidden_weight)):
        wide = part.to(wide_dtype)
        parts.append((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(hidden_states.dtype))
    return torch.cat(parts, dim=-1)


@fused
def add_rms_norm(
    residual: Tensor,  # (N, D)
    update: Tensor,  # (N, D)
    weight: Tensor,  # (D,)
    eps: float,
) -> tuple[Tensor, Tensor]:  # the sum and its norm, (N, D) each
    """Adds to the residual stream and norms what it has become."""
    total = residual + update
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (normed * weight).to(total.dtype)


@fused
def rotate(
    heads: Tensor,  # (N, n, d)
    positions: Tensor,  # (N,)
    inv_freq: Tensor,  # (d/2,) fp32
    scaling: float,
) -> Tensor:  # (N, n, d)
    """Applies RoPE; the angles are fp32, for bf16 cannot tell position 300 from 301."""
    angles = positions.float()[:, None] * inv_freq  # (N, d/2)
    cos = (angles.cos() * scaling)[:, None]  # (N, 1, d/2)
    sin = (angles.sin() * scaling)[:, None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:  # (N, I), (N, I) -> (N, I)
    """Gates the MLP's inner states."""
    return F.silu(gate) * up
