"""Causal over the context plus the row's own chain.

Only the step-0 attention is quadratic. It runs in a flash kernel, and the row's own keys of later steps join through
the log-sum-exp; the trap is the backward: the kernel must be given the *merged* output and log-sum-exp, or its
probabilities are those of a softmax that forgot the chain.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle3.draft.fusion import has_kernels, take

CAUSAL = 1  # the memory-efficient kernel's mask type: row i of a document sees its rows 0..i


class Documents(NamedTuple):
    """Documents one after another on a token axis."""

    lengths: tuple[int, ...]  # tokens, adding up to T
    bounds: Tensor  # (documents + 1,) int32: where each starts, and T

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> "Documents":
        """Returns documents of these lengths."""
        return cls(lengths, torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32))


class Places(NamedTuple):
    """Where the rows of a draft step stand."""

    rows: Tensor  # (R,) int64, ascending: the token of each row
    row_of_token: Tensor  # (T,) int64: the row at each token, -1 where there is none
    documents: Documents


def draft_attention(
    projected: Tensor,  # (R, n_q, d) queries at step 0; (R, n_q + 2 n_kv, d) with own keys and values later
    context: Tensor,  # (T, 2 n_kv, d) step-0 keys and values of every token
    chain: Tensor | None,  # (C, T, 2 n_kv, d) own keys and values of steps 1..C; None at step 0
    step: int,  # what is projected at step k >= 1 goes to chain[k - 1], in place
    places: Places,
) -> tuple[Tensor, Tensor | None]:  # (R, n_q, d), and the chain with this step's link
    """Attends from each row t to the step-0 keys j <= t of its document and to its own chain; memory is linear in T.

    A step must be given the chain that the step before returned: its gradient runs back along the steps, so that each
    link has all of it when its own step comes.
    """
    assert sum(places.documents.lengths) == context.shape[0], (places.documents.lengths, context.shape)
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
        keys, values = context.chunk(2, dim=1)  # (T, n_kv, d)
        with torch.autocast(projected.device.type, enabled=False):
            query = take(projected[:, :num_queries], places.row_of_token)  # (T, n_q, d)
            output_at_tokens, lse = _context_forward(query, keys, values, places.documents)
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
            grad_query, grad_keys, grad_values = _context_backward(
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


def _context_forward(
    query: Tensor,  # (T, n_q, d)
    keys: Tensor,  # (T, n_kv, d)
    values: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor]:  # output (T, n_q, d), log-sum-exp (T, n_q) in fp32 or wider
    if _has_varlen_kernel(query):
        bounds, longest = documents.bounds, max(documents.lengths)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, keys, values, bounds, bounds, longest, longest, 0.0, True, False
        )
        return output, lse.transpose(0, 1)
    outputs = [_document_forward(*document) for document in _split(documents, query, keys, values)]
    return torch.cat([output for output, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _context_backward(
    grad: Tensor,  # (T, n_q, d)
    query: Tensor,  # (T, n_q, d)
    output: Tensor,  # (T, n_q, d)
    lse: Tensor,  # (T, n_q)
    keys: Tensor,  # (T, n_kv, d)
    values: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_varlen_kernel(query):
        bounds, longest = documents.bounds, max(documents.lengths)
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # the random state of a dropout of zero
        lse = lse.transpose(0, 1).contiguous()  # (n_q, T)
        return torch.ops.aten._flash_attention_backward(
            grad, query, keys, values, output, lse, bounds, bounds, longest, longest, 0.0, True, unused, unused
        )
    parts = _split(documents, grad, query, output, lse, keys, values)
    grads = [_document_backward(*part) for part in parts]
    grad_query, grad_keys, grad_values = (torch.cat(parts) for parts in zip(*grads, strict=True))
    return grad_query, grad_keys, grad_values


def _has_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _split(documents: Documents, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Cuts tensors (T, n, ...) into documents, in the kernels' layout (1, n, T_document, ...)."""
    for parts in zip(*(tensor.split(documents.lengths) for tensor in tensors), strict=True):
        yield [part.transpose(0, 1)[None] for part in parts]


def _document_forward(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        query, keys, values = _for_efficient_kernel(query, keys, values)
        output, lse, *_ = torch.ops.aten._efficient_attention_forward(
            query, keys, values, None, None, None, None, None, 0.0, CAUSAL, True
        )
        return output[0], lse[0, :, : query.shape[1]].transpose(0, 1)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, True)
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


def _document_backward(
    grad: Tensor, query: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> list[Tensor]:
    if query.is_cuda:
        num_tokens, num_kv_heads = query.shape[2], keys.shape[1]
        query, keys, values = _for_efficient_kernel(query, keys, values)
        grad, output = grad.transpose(1, 2), output.transpose(1, 2)
        lse = F.pad(lse, (0, -num_tokens % 32), value=torch.inf)  # (1, n_q, T'), as the kernel's forward pads it
        no_dropout = torch.zeros((), dtype=torch.int64)
        grad_query, *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad, query, keys, values, None, output, None, None, num_tokens, num_tokens, lse, 0.0, no_dropout,
            no_dropout, CAUSAL, False
        )  # fmt: skip
        return [grad_query[0], *(part[0].unflatten(1, (num_kv_heads, -1)).sum(2) for part in grads)]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, keys, values, output, lse, 0.0, True
    )
    return [part[0].transpose(0, 1) for part in grads]


def _for_efficient_kernel(query: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Lays (1, n, T, d) out as (1, T, n_q, d): the kernel knows no shared heads."""
    group = query.shape[1] // keys.shape[1]
    return [
        part.transpose(1, 2) for part in (query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1))
    ]
