"""The draft layer in training: fused weights, and a backward that makes again what is cheap.

The same layer as `model`, which decoding uses: a test holds them together. What a step keeps for its backward is
what a matrix product made or what attention needs; norms and the gated product are made again, one read of what is
kept. That halves the memory of a step for one part in a hundred of its time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.fusion import (
    RopeTables,
    add_norm,
    embeds_norm_backward,
    joined_norms,
    norm,
    norm_backward,
    rotate,
    swiglu,
    swiglu_backward,
)
from eagle3.draft.model import Eagle3Drafter


class LayerWeights(NamedTuple):
    """The layer's matrices in the compute dtype, made once for all draft steps; norms keep their own."""

    embeds_norm: Tensor  # (D,)
    hidden_norm: Tensor  # (D,)
    query: Tensor  # (n_q d, 2D)
    key_value: Tensor  # (2 n_kv d, 2D)
    query_key_value: Tensor  # (n_q d + 2 n_kv d, 2D)
    attention_output: Tensor  # (D, n_q d)
    mlp_norm: Tensor  # (D,)
    gate_up: Tensor  # (2I, D)
    down: Tensor  # (D, I)
    final_norm: Tensor  # (D,)
    eps: float  # of all norms


def layer_weights(drafter: Eagle3Drafter) -> LayerWeights:
    """Joins the matrices that read the same input; the parameters' gradients come back through it."""
    layer, dtype = drafter.midlayer, drafter.compute_dtype()
    attention, mlp = layer.self_attn, layer.mlp

    def joined(*linears: torch.nn.Linear) -> Tensor:
        return torch.cat([linear.weight.to(dtype) for linear in linears])

    query_key_value = joined(attention.q_proj, attention.k_proj, attention.v_proj)
    query_size = attention.q_proj.out_features
    return LayerWeights(
        embeds_norm=layer.input_layernorm.weight,
        hidden_norm=layer.hidden_norm.weight,
        query=query_key_value[:query_size],
        key_value=query_key_value[query_size:],
        query_key_value=query_key_value,
        attention_output=attention.o_proj.weight.to(dtype),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.to(dtype),
        final_norm=drafter.norm.weight,
        eps=drafter.config.rms_norm_eps,
    )


class Rotation(NamedTuple):
    """RoPE of some rows' heads."""

    positions: Tensor  # (N,) int64
    tables: RopeTables
    num_rotated: int  # heads; values are not rotated
    head_dim: int


def project(
    embed_tokens: Tensor,  # (V, D) frozen
    token_ids: Tensor,  # (N,)
    hidden_states: Tensor,  # (N, D)
    weights: LayerWeights,
    matrix: Tensor,  # (n d, 2D) of the weights
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:
    """Makes attention's inputs (N, n, d), RoPE applied; returns the hidden states (N, D) too, for the residual stream.

    A residual that is taken from here brings its gradient back here, where it joins the norm's in one pass.
    """
    projected, residual = _Projection.apply(
        embed_tokens,
        token_ids,
        hidden_states,
        weights.embeds_norm,
        weights.hidden_norm,
        matrix,
        weights.eps,
        rotation,
    )
    return projected, residual


def finish(
    residual: Tensor,  # (N, D)
    attended: Tensor,  # (N, n_q, d)
    weights: LayerWeights,
) -> tuple[Tensor, Tensor]:
    """Completes the layer after the attention; returns its output (N, D) and that after the final norm."""
    output, normed = _Finish.apply(
        residual,
        attended.flatten(1),
        weights.attention_output,
        weights.mlp_norm,
        weights.gate_up,
        weights.down,
        weights.final_norm,
        weights.eps,
    )
    return output, normed


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        embed_tokens: Tensor,
        token_ids: Tensor,
        hidden: Tensor,
        embeds_norm: Tensor,
        hidden_norm: Tensor,
        matrix: Tensor,
        eps: float,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(embed_tokens, token_ids, hidden, embeds_norm, hidden_norm, matrix)
        ctx.eps, ctx.rotation = eps, rotation
        heads = joined_norms(embed_tokens, token_ids, hidden, embeds_norm, hidden_norm, eps) @ matrix.T
        heads = heads.unflatten(1, (-1, rotation.head_dim))  # (N, n, d)
        return rotate(heads, rotation.positions, rotation.tables, rotation.num_rotated), hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_residual: Tensor | None) -> tuple[Tensor | None, ...]:
        embed_tokens, token_ids, hidden, embeds_norm, hidden_norm, matrix = ctx.saved_tensors
        eps, rotation, width = ctx.eps, ctx.rotation, hidden.shape[1]
        grad = rotate(grad, rotation.positions, rotation.tables, rotation.num_rotated, direction=-1.0).flatten(1)
        grad_joined = grad @ matrix  # (N, 2D)
        grad_matrix = grad.T @ joined_norms(embed_tokens, token_ids, hidden, embeds_norm, hidden_norm, eps)
        hidden_grads = norm_backward(hidden, hidden_norm, eps, grad_joined[:, width:], added=grad_residual)
        grad_embeds_norm = embeds_norm_backward(embed_tokens, token_ids, embeds_norm, eps, grad_joined[:, :width])
        return None, None, hidden_grads.states, grad_embeds_norm, hidden_grads.weight, grad_matrix, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        attended: Tensor,
        attention_output: Tensor,
        mlp_norm: Tensor,
        gate_up_matrix: Tensor,
        down: Tensor,
        final_norm: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        middle, normed = add_norm(residual, attended @ attention_output.T, mlp_norm, eps)
        gate_up = normed @ gate_up_matrix.T
        output, output_normed = add_norm(middle, swiglu(gate_up) @ down.T, final_norm, eps)
        ctx.save_for_backward(
            attended, middle, gate_up, output, attention_output, mlp_norm, gate_up_matrix, down, final_norm
        )
        ctx.eps = eps
        return output, output_normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        attended, middle, gate_up, output, attention_output, mlp_norm, gate_up_matrix, down, final_norm = (
            ctx.saved_tensors
        )
        eps, grad, grad_final_norm = ctx.eps, grad_output, None
        if grad_normed is not None:
            grad, grad_final_norm = norm_backward(output, final_norm, eps, grad_normed, added=grad_output)
        assert grad is not None, "a backward needs a gradient"
        product, grad_gate_up = swiglu_backward(gate_up, grad @ down)
        grad_down = grad.T @ product
        middle_normed = norm(middle, mlp_norm, eps)
        grad_gate_up_matrix = grad_gate_up.T @ middle_normed
        grad, grad_mlp_norm = norm_backward(middle, mlp_norm, eps, grad_gate_up @ gate_up_matrix, added=grad)
        return (
            grad,
            grad @ attention_output,
            grad.T @ attended,
            grad_mlp_norm,
            grad_gate_up_matrix,
            grad_down,
            grad_final_norm,
            None,
        )
