"""Causal over the context plus the row's own chain.

Only the step-0 attention is quadratic. It runs in a flash kernel, and the row's own keys of later steps join through
the log-sum-exp; the trap is the backward: the kernel must be given the *merged* output and log-sum-exp, or its
probabilities are those of a softmax that forgot the chain.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CAUSAL = 1  # the memory-efficient kernel's mask type: row i of a document sees its rows 0..i


def chain_attention(
    query: Tensor,  # (R, n_q, d)
    keys: Tensor,  # (T, n_kv, d) of step 0, every token
    values: Tensor,  # (T, n_kv, d)
    own_keys: Tensor,  # (R, C, n_kv, d) of steps 1..C, each row's own
    own_values: Tensor,  # (R, C, n_kv, d)
    rows: Tensor,  # (R,) int64, ascending: the token that each query row stands at
    document_lengths: tuple[int, ...],  # tokens, adding up to T
) -> Tensor:  # (R, n_q, d)
    """Attends from each row t to the step-0 keys j <= t of its document and to its own chain; memory is linear in T."""
    assert sum(document_lengths) == keys.shape[0], (document_lengths, keys.shape)
    if rows.numel() == 0:
        return query * 1  # a kernel is never launched on nothing
    return _ChainAttention.apply(query, keys, values, own_keys, own_values, rows, document_lengths)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        rows: Tensor,
        document_lengths: tuple[int, ...],
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            query_at_tokens = _scatter(query, rows, keys.shape[0])
            context, context_lse = _context_forward(query_at_tokens, keys, values, document_lengths)
            if own_keys.shape[1]:
                output, lse = _merge_chain(query, own_keys, own_values, rows, context, context_lse)
            else:
                output, lse = context[rows], context_lse[rows]  # (R, n_q, d), (R, n_q)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, rows, output, lse)
        ctx.document_lengths = document_lengths
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, rows, output, lse = ctx.saved_tensors
        num_tokens = keys.shape[0]
        with torch.autocast(query.device.type, enabled=False):
            # Token rows without a query have q, gradient, output and lse zero, so that they add exactly nothing.
            grad_query, grad_keys, grad_values = _context_backward(
                _scatter(grad, rows, num_tokens),
                _scatter(query, rows, num_tokens),
                _scatter(output, rows, num_tokens),
                _scatter(lse, rows, num_tokens),
                keys,
                values,
                ctx.document_lengths,
            )
            if own_keys.shape[1]:
                grad_query, grad_own_keys, grad_own_values = _merge_chain_backward(
                    grad, query, own_keys, own_values, output, lse, rows, grad_query
                )
            else:
                grad_query = grad_query[rows]
                grad_own_keys, grad_own_values = torch.zeros_like(own_keys), torch.zeros_like(own_values)
        return grad_query, grad_keys, grad_values, grad_own_keys, grad_own_values, None, None


def _merge_chain(
    query: Tensor,  # (R, n_q, d)
    own_keys: Tensor,  # (R, C, n_kv, d)
    own_values: Tensor,  # (R, C, n_kv, d)
    rows: Tensor,  # (R,)
    context: Tensor,  # (T, n_q, d)
    context_lse: Tensor,  # (T, n_q)
) -> tuple[Tensor, Tensor]:  # (R, n_q, d), (R, n_q)
    """Adds each row's own chain to its attention over the context."""
    if query.is_cuda:
        return _kernels().merge_chain(query, own_keys, own_values, rows, context, context_lse)
    context, context_lse = context[rows], context_lse[rows]  # (R, n_q, d), (R, n_q)
    scores = _own_scores(query, own_keys)  # (R, n_q, C)
    lse = torch.cat([context_lse[..., None], scores], dim=-1).logsumexp(-1)  # (R, n_q)
    own = _sum_over_chain((scores - lse[..., None]).exp(), own_values)
    return ((context_lse - lse).exp()[..., None] * context + own).to(query.dtype), lse


def _merge_chain_backward(
    grad: Tensor,  # (R, n_q, d)
    query: Tensor,  # (R, n_q, d)
    own_keys: Tensor,  # (R, C, n_kv, d)
    own_values: Tensor,  # (R, C, n_kv, d)
    output: Tensor,  # (R, n_q, d) merged
    lse: Tensor,  # (R, n_q) merged
    rows: Tensor,  # (R,)
    context_grad_query: Tensor,  # (T, n_q, d) what the context's backward gave
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the query, all of it, and of the own keys and values."""
    if query.is_cuda:
        return _kernels().merge_chain_backward(grad, query, own_keys, own_values, output, lse, rows, context_grad_query)
    probs = (_own_scores(query, own_keys) - lse[..., None]).exp()  # (R, n_q, C)
    delta = _dot(grad, output)[..., None]  # (R, n_q, 1)
    grad_scores = probs * (_own_dots(grad, own_values) - delta) * query.shape[-1] ** -0.5
    grad_query = (context_grad_query[rows] + _sum_over_chain(grad_scores, own_keys)).to(query.dtype)
    return grad_query, _sum_over_group(grad_scores, query, own_keys), _sum_over_group(probs, grad, own_values)


def _kernels() -> ModuleType:
    # triton comes with the CUDA builds of torch alone.
    from eagle3.draft import kernels

    return kernels


def _scatter(rows_of: Tensor, rows: Tensor, num_tokens: int) -> Tensor:  # (R, ...) -> (T, ...)
    return rows_of.new_zeros(num_tokens, *rows_of.shape[1:]).index_copy_(0, rows, rows_of)


def _wide(tensor: Tensor) -> Tensor:
    """Widens bf16 and fp16 to fp32: the chain's few terms are summed as precisely as the kernel sums its own."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _dot(left: Tensor, right: Tensor) -> Tensor:  # (R, n_q, d), (R, n_q, d) -> (R, n_q)
    return (_wide(left) * _wide(right)).sum(-1)


def _own_dots(per_query: Tensor, own: Tensor) -> Tensor:  # (R, n_q, d), (R, C, n_kv, d) -> (R, n_q, C)
    grouped = _wide(per_query).unflatten(1, (own.shape[2], -1))  # (R, n_kv, group, d)
    return torch.einsum("rhgd,rchd->rhgc", grouped, _wide(own)).flatten(1, 2)


def _own_scores(query: Tensor, own_keys: Tensor) -> Tensor:  # (R, n_q, d), (R, C, n_kv, d) -> (R, n_q, C)
    return _own_dots(query, own_keys) * query.shape[-1] ** -0.5


def _sum_over_chain(weights: Tensor, own: Tensor) -> Tensor:  # (R, n_q, C), (R, C, n_kv, d) -> (R, n_q, d)
    grouped = weights.unflatten(1, (own.shape[2], -1))  # (R, n_kv, group, C)
    return torch.einsum("rhgc,rchd->rhgd", grouped, _wide(own)).flatten(1, 2)


def _sum_over_group(weights: Tensor, per_query: Tensor, own: Tensor) -> Tensor:
    """Sums weights (R, n_q, C) times vectors (R, n_q, d) over the query heads that share a kv head, shaped as `own`."""
    weights = weights.unflatten(1, (own.shape[2], -1))
    grouped = _wide(per_query).unflatten(1, (own.shape[2], -1))
    return torch.einsum("rhgc,rhgd->rchd", weights, grouped).to(own.dtype)


def _context_forward(
    query: Tensor,  # (T, n_q, d)
    keys: Tensor,  # (T, n_kv, d)
    values: Tensor,
    document_lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # output (T, n_q, d), log-sum-exp (T, n_q) in fp32 or wider
    if _has_varlen_kernel(query):
        bounds, longest = _bounds(document_lengths, query.device), max(document_lengths)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, keys, values, bounds, bounds, longest, longest, 0.0, True, False
        )
        return output, lse.transpose(0, 1)
    outputs = [_document_forward(*document) for document in _documents(document_lengths, query, keys, values)]
    return torch.cat([output for output, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _context_backward(
    grad: Tensor,  # (T, n_q, d)
    query: Tensor,  # (T, n_q, d)
    output: Tensor,  # (T, n_q, d)
    lse: Tensor,  # (T, n_q)
    keys: Tensor,  # (T, n_kv, d)
    values: Tensor,
    document_lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_varlen_kernel(query):
        bounds, longest = _bounds(document_lengths, query.device), max(document_lengths)
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # the random state of a dropout of zero
        lse = lse.transpose(0, 1).contiguous()  # (n_q, T)
        return torch.ops.aten._flash_attention_backward(
            grad, query, keys, values, output, lse, bounds, bounds, longest, longest, 0.0, True, unused, unused
        )
    documents = _documents(document_lengths, grad, query, output, lse, keys, values)
    grads = [_document_backward(*document) for document in documents]
    grad_query, grad_keys, grad_values = (torch.cat(parts) for parts in zip(*grads, strict=True))
    return grad_query, grad_keys, grad_values


def _has_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _bounds(document_lengths: tuple[int, ...], device: torch.device) -> Tensor:  # (documents + 1,) int32
    return torch.tensor((0, *document_lengths)).cumsum(0).to(device, torch.int32)


def _documents(document_lengths: tuple[int, ...], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Cuts tensors (T, n, ...) into documents, in the kernels' layout (1, n, T_document, ...)."""
    for parts in zip(*(tensor.split(document_lengths) for tensor in tensors), strict=True):
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
