"""Causal over the context plus the row's own chain.

Only the step-0 attention is quadratic. It runs in a fused kernel, and the row's own keys of later steps join through
the log-sum-exp; the trap is the backward: the kernel must be given the *merged* output and log-sum-exp, or its
probabilities are those of a softmax that forgot the chain.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.context_attention import Documents, context_backward, context_forward
from eagle3.draft.fusion import has_kernels, take


class Places(NamedTuple):
    """Where the rows of a draft step stand, among the T tokens that can attend."""

    rows: Tensor  # (R,) int64, ascending: which of T each row is
    row_of_token: Tensor  # (T,) int64: the row at each of them, -1 where there is none
    documents: Documents


def draft_attention(
    projected: Tensor,  # (R, n_q, d) queries at step 0; (R, n_q + 2 n_kv, d) with own keys and values later
    context: Tensor,  # (T', 2 n_kv, d) step-0 keys and values of every token of the documents
    chain: Tensor | None,  # (C, T, 2 n_kv, d) own keys and values of steps 1..C; None at step 0
    step: int,  # what is projected at step k >= 1 goes to chain[k - 1], in place
    places: Places,
) -> tuple[Tensor, Tensor | None]:  # (R, n_q, d), and the chain with this step's link
    """Attends from each row t to the step-0 keys j <= t of its document and to its own chain; memory is linear in T.

    A step must be given the chain that the step before returned: its gradient runs back along the steps, so that each
    link has all of it when its own step comes.
    """
    assert sum(places.documents.key_lengths) == context.shape[0], (places.documents.key_lengths, context.shape)
    assert (chain is None) == (step == 0), (chain is None, step)
    output, chain = _DraftAttention.apply(projected, context, chain, step, places)
    return output, chain


class _DraftAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        projected: Tensor,
        context: Tensor,
        chain: Tensor | None,
        step: int,
        places: Places,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        num_queries = projected.shape[1] - (0 if chain is None else chain.shape[2])
        keys, values = context.chunk(2, dim=1)  # (T', n_kv, d)
        with torch.autocast(projected.device.type, enabled=False):
            query = take(projected[:, :num_queries], places.row_of_token)  # (T, n_q, d)
            output_at_tokens, lse = context_forward(query, keys, values, places.documents)
            if chain is None:
                output = take(output_at_tokens, places.rows)
            else:
                take(projected[:, num_queries:], places.row_of_token, out=chain[step - 1])
                ctx.mark_dirty(chain)
                output = _merge_chain(query, chain[:step], places.rows, output_at_tokens, lse)
        ctx.save_for_backward(query, context, output, lse)
        # Kept aside, for later steps write other links; detached, or it and the graph would hold each other.
        ctx.chain = None if chain is None else chain.detach()
        ctx.step, ctx.places = step, places
        return output, chain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_chain: Tensor | None) -> tuple[Tensor | None, ...]:
        query, context, output, lse = ctx.saved_tensors
        grad = torch.zeros_like(output) if grad is None else grad
        rows, row_of_token, documents = ctx.places
        keys, values = context.chunk(2, dim=1)
        with torch.autocast(query.device.type, enabled=False):
            # Tokens without a row have zero query, output and gradient, so that they add exactly nothing.
            grad_query, grad_keys, grad_values = context_backward(
                take(grad, row_of_token), query, take(output, row_of_token), lse, keys, values, documents
            )
            grad_context = torch.cat([grad_keys, grad_values], dim=1)
            if ctx.chain is None:
                return take(grad_query, rows), grad_context, None, None, None
            if grad_chain is None:  # no later step
                grad_chain = torch.zeros_like(ctx.chain)
            links, grad_links = ctx.chain[: ctx.step], grad_chain[: ctx.step]
            grad_projected = _merge_chain_backward(grad, query, links, rows, output, lse, grad_query, grad_links)
        return grad_projected, grad_context, grad_chain, None, None


def _merge_chain(
    query: Tensor,  # (T, n_q, d)
    links: Tensor,  # (C, T, 2 n_kv, d)
    rows: Tensor,  # (R,)
    context: Tensor,  # (T, n_q, d) attention over the step-0 keys
    lse: Tensor,  # (T, n_q) its log-sum-exp, becomes the merged one at the rows
) -> Tensor:  # (R, n_q, d)
    """Adds each row's own chain to its attention over the context."""
    if has_kernels(query):
        return _kernels().merge_chain(query, links, rows, context, lse)
    keys, values = links[:, rows].chunk(2, dim=2)  # (C, R, n_kv, d)
    context_lse = lse[rows]  # (R, n_q)
    scores = _own_scores(query[rows], keys)  # (R, n_q, C)
    merged_lse = torch.cat([context_lse[..., None], scores], dim=-1).logsumexp(-1)
    own = _sum_over_chain((scores - merged_lse[..., None]).exp(), values)  # (R, n_q, d)
    lse[rows] = merged_lse
    return ((context_lse - merged_lse).exp()[..., None] * context[rows] + own).to(query.dtype)


def _merge_chain_backward(
    grad: Tensor,  # (R, n_q, d)
    query: Tensor,  # (T, n_q, d)
    links: Tensor,  # (C, T, 2 n_kv, d)
    rows: Tensor,  # (R,)
    output: Tensor,  # (R, n_q, d) merged
    lse: Tensor,  # (T, n_q) merged
    context_grad_query: Tensor,  # (T, n_q, d) what the context's backward gave
    grad_links: Tensor,  # (C, T, 2 n_kv, d) of later steps; this step's is added to all but the last
) -> Tensor:  # (R, n_q + 2 n_kv, d)
    """Returns the gradients of what the step projected: query, and the last link with what later steps say of it."""
    if has_kernels(query):
        return _kernels().merge_chain_backward(grad, query, links, rows, output, lse, context_grad_query, grad_links)
    keys, values = links[:, rows].chunk(2, dim=2)  # (C, R, n_kv, d)
    query = query[rows]
    probs = (_own_scores(query, keys) - lse[rows][..., None]).exp()  # (R, n_q, C)
    delta = (_wide(grad) * _wide(output)).sum(-1, keepdim=True)  # (R, n_q, 1)
    grad_scores = probs * (_own_dots(grad, values) - delta) * query.shape[-1] ** -0.5
    grad_query = context_grad_query[rows] + _sum_over_chain(grad_scores, keys)
    own = torch.cat([_sum_over_group(grad_scores, query, keys), _sum_over_group(probs, grad, values)], dim=2)
    grad_links.index_add_(1, rows, own.to(grad_links.dtype))
    return torch.cat([grad_query.to(grad_links.dtype), grad_links[-1, rows]], dim=1)


def _kernels() -> ModuleType:
    # triton comes with the CUDA builds of torch alone.
    from eagle3.draft import chain_kernels

    return chain_kernels


def _wide(tensor: Tensor) -> Tensor:
    """Widens bf16 and fp16 to fp32: the chain's few terms are summed as precisely as the kernel sums its own."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _own_dots(per_query: Tensor, own: Tensor) -> Tensor:  # (R, n_q, d), (C, R, n_kv, d) -> (R, n_q, C)
    grouped = _wide(per_query).unflatten(1, (own.shape[2], -1))  # (R, n_kv, group, d)
    return torch.einsum("rhgd,crhd->rhgc", grouped, _wide(own)).flatten(1, 2)


def _own_scores(query: Tensor, keys: Tensor) -> Tensor:  # (R, n_q, d), (C, R, n_kv, d) -> (R, n_q, C)
    return _own_dots(query, keys) * query.shape[-1] ** -0.5


def _sum_over_chain(weights: Tensor, own: Tensor) -> Tensor:  # (R, n_q, C), (C, R, n_kv, d) -> (R, n_q, d)
    grouped = weights.unflatten(1, (own.shape[2], -1))  # (R, n_kv, group, C)
    return torch.einsum("rhgc,crhd->rhgd", grouped, _wide(own)).flatten(1, 2)


def _sum_over_group(weights: Tensor, per_query: Tensor, own: Tensor) -> Tensor:
    """Sums weights (R, n_q, C) times vectors (R, n_q, d) over the query heads that share a kv head, shaped as `own`."""
    weights = weights.unflatten(1, (own.shape[2], -1))
    grouped = _wide(per_query).unflatten(1, (own.shape[2], -1))
    return torch.einsum("rhgc,rhgd->crhd", weights, grouped)
