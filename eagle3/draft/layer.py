"""The draft layer in training: fused weights, and a backward that makes again what is cheap.

The same layer as `model`, which decoding uses: a test holds them together. What a step keeps for its backward is
what a matrix product made or what attention needs; norms and the gated product are made again, one read of what is
kept. That halves the memory of a step for one part in a hundred of its time.

What the layer multiplies with a token's embedding does not depend on the draft step: it is made once for each token,
and every row that reads the token at any step adds it to what comes of its hidden state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.fusion import (
    RopeTables,
    TokenHeads,
    add_norm,
    embeds_norm_backward,
    norm,
    norm_backward,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)
from eagle3.draft.model import Eagle3Drafter


class LayerWeights(NamedTuple):
    """The layer's matrices in the compute dtype, made once for all draft steps; norms keep their own."""

    embeds_norm: Tensor  # (D,)
    hidden_norm: Tensor  # (D,)
    of_embeds: Tensor  # (n_q d + 2 n_kv d, D) makes queries, keys and values of embeddings
    query: Tensor  # (n_q d, D) of hidden states, as the next two
    key_value: Tensor  # (2 n_kv d, D)
    query_key_value: Tensor  # (n_q d + 2 n_kv d, D)
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

    of_embeds, query_key_value = joined(attention.q_proj, attention.k_proj, attention.v_proj).chunk(2, dim=1)
    query_size = attention.q_proj.out_features
    return LayerWeights(
        embeds_norm=layer.input_layernorm.weight,
        hidden_norm=layer.hidden_norm.weight,
        of_embeds=of_embeds,
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


def embeds_heads(
    embed_tokens: Tensor,  # (V, D) frozen
    token_ids: Tensor,  # (T,)
    weights: LayerWeights,
    head_dim: int,
) -> Tensor:  # (T, n_q + 2 n_kv, d)
    """Returns what each token's embedding gives to queries, keys and values, before RoPE."""
    table: Tensor = _EmbedsHeads.apply(embed_tokens, token_ids, weights.embeds_norm, weights.of_embeds, weights.eps)
    return table.unflatten(1, (-1, head_dim))


def project(
    added: TokenHeads,
    hidden_states: Tensor,  # (N, D)
    weights: LayerWeights,
    matrix: Tensor,  # (n d, D) of the weights
    rotation: Rotation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes attention's inputs (N, n, d), RoPE applied; returns hidden states and the tokens' table too.

    A residual (N, D) that is taken from here brings its gradient back here, where it joins the norm's in one pass. The
    next call must be given the table (T, H, d) that this one returned: its gradient runs back along the calls, each of
    which adds to it in place.
    """
    projected, residual, table = _Projection.apply(
        added.table, added.tokens, added.first, hidden_states, weights.hidden_norm, matrix, weights.eps, rotation
    )
    return projected, residual, table


def finish(
    residual: Tensor,  # (N, D)
    attended: Tensor,  # (N, n_q, d)
    weights: LayerWeights,
    *,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Completes the layer after the attention; returns its output (N, D) and that after the final norm.

    With `recompute` gate and up (N, 2I), half of what a step keeps, are multiplied again in the backward.
    """
    output, normed = _Finish.apply(
        residual,
        attended.flatten(1),
        weights.attention_output,
        weights.mlp_norm,
        weights.gate_up,
        weights.down,
        weights.final_norm,
        weights.eps,
        recompute,
    )
    return output, normed


class _EmbedsHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        embed_tokens: Tensor,
        token_ids: Tensor,
        embeds_norm: Tensor,
        matrix: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(embed_tokens, token_ids, embeds_norm, matrix)
        ctx.eps = eps
        return norm(embed_tokens, embeds_norm, eps, index=token_ids, dtype=matrix.dtype) @ matrix.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        embed_tokens, token_ids, embeds_norm, matrix = ctx.saved_tensors
        grad_matrix = grad.T @ norm(embed_tokens, embeds_norm, ctx.eps, index=token_ids, dtype=matrix.dtype)
        grad_norm = embeds_norm_backward(embed_tokens, token_ids, embeds_norm, ctx.eps, grad @ matrix)
        return None, None, grad_norm, grad_matrix, None


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        tokens: Tensor,
        first_head: int,
        hidden: Tensor,
        hidden_norm: Tensor,
        matrix: Tensor,
        eps: float,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens, hidden, hidden_norm, matrix)
        ctx.table_shape, ctx.first_head, ctx.eps, ctx.rotation = table.shape, first_head, eps, rotation
        heads = (norm(hidden, hidden_norm, eps) @ matrix.T).unflatten(1, (-1, rotation.head_dim))  # (N, n, d)
        added = TokenHeads(table, tokens, first_head)
        heads = rotate(heads, rotation.positions, rotation.tables, rotation.num_rotated, added)
        return heads, hidden.view_as(hidden), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, grad_residual: Tensor | None, grad_table: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        tokens, hidden, hidden_norm, matrix = ctx.saved_tensors
        eps, rotation = ctx.eps, ctx.rotation
        if grad_table is None:  # no later call
            grad_table = grad.new_zeros(ctx.table_shape)
        grad_added = TokenHeads(grad_table, tokens, ctx.first_head)
        grad = rotate_backward(grad, rotation.positions, rotation.tables, rotation.num_rotated, grad_added).flatten(1)
        grad_matrix = grad.T @ norm(hidden, hidden_norm, eps)
        grads = norm_backward(hidden, hidden_norm, eps, grad @ matrix, added=grad_residual)
        return grad_table, None, None, grads.states, grads.weight, grad_matrix, None, None


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
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        middle, normed = add_norm(residual, attended @ attention_output.T, mlp_norm, eps)
        gate_up = normed @ gate_up_matrix.T
        output, output_normed = add_norm(middle, swiglu(gate_up) @ down.T, final_norm, eps)
        kept = None if recompute else gate_up
        ctx.save_for_backward(
            attended, middle, kept, output, attention_output, mlp_norm, gate_up_matrix, down, final_norm
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
        middle_normed = norm(middle, mlp_norm, eps)
        if gate_up is None:
            gate_up = middle_normed @ gate_up_matrix.T
        product, grad_gate_up = swiglu_backward(gate_up, grad @ down)
        grad_down = grad.T @ product
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
            None,
        )
