"""Causal attention of documents over themselves, with its log-sum-exp, in PyTorch's fused kernels.

The backward takes output and log-sum-exp from its caller, who may have merged more keys into both: all the kernels make
their probabilities of the log-sum-exp that they are given, and the softmax's own term of output and gradient.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# The memory-efficient kernel's mask types, of square and of other masks: the last row of a document sees all its keys.
CAUSAL, CAUSAL_FROM_THE_END = 1, 2
# cuDNN compiles a plan, about 0.05 s each way, for every shape that it is given. Documents as long as they come would
# ask for one at every micro-batch; documents cut at a limit, or filled up to one, have this many tokens or a multiple.
PLANNED_TOKENS = 1024
HOPPER = 9  # compute capability from which cuDNN's kernels use what FlashAttention-2 does not: wgmma and bulk copies

Kernel = Literal["cudnn", "flash", "efficient", "cpu"]


class Documents(NamedTuple):
    """Documents one after another on a token axis.

    The tokens here are each document's last ones: those before them have keys, and attend to nothing.
    """

    lengths: tuple[int, ...]  # tokens that attend, adding up to T
    bounds: Tensor  # (documents + 1,) int32: where each starts, and T
    key_lengths: tuple[int, ...]  # tokens with keys, adding up to T'
    key_bounds: Tensor  # (documents + 1,) int32

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], device: torch.device, key_lengths: tuple[int, ...] | None = None
    ) -> "Documents":
        """Returns documents of these lengths."""
        key_lengths = lengths if key_lengths is None else key_lengths
        bounds, key_bounds = (
            torch.tensor((0, *each)).cumsum(0).to(device, torch.int32) for each in (lengths, key_lengths)
        )
        return cls(lengths, bounds, key_lengths, key_bounds)


def has_plan(lengths: tuple[int, ...]) -> bool:
    """Tells whether documents are of one length that comes again, so that a plan for them is worth compiling."""
    return len(set(lengths)) == 1 and lengths[0] % PLANNED_TOKENS == 0


def wants_all_queries(lengths: tuple[int, ...], device: torch.device) -> bool:
    """Tells whether documents are attended to faster, or in less memory, with queries that nobody needs than without.

    cuDNN's kernels know square masks alone, and the CPU's would be given one of T x T' numbers.
    """
    return device.type == "cpu" or has_plan(lengths)


def kernel_for(query: Tensor, documents: Documents) -> Kernel:  # (T, n_q, d)
    """Chooses the fastest kernel that can do it, the same for forward and backward."""
    if not query.is_cuda:
        return "cpu"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return "efficient"
    head_dim = query.shape[-1]
    fits = head_dim <= 128 and head_dim % 8 == 0 and torch.backends.cudnn.is_available()
    whole = documents.key_lengths == documents.lengths and has_plan(documents.lengths)
    ordered = torch.are_deterministic_algorithms_enabled()  # cuDNN promises no order of its sums
    if fits and whole and not ordered and torch.cuda.get_device_capability(query.device)[0] >= HOPPER:
        return "cudnn"
    return "flash"


def context_forward(
    query: Tensor,  # (T, n_q, d)
    keys: Tensor,  # (T', n_kv, d)
    values: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor]:  # output (T, n_q, d), log-sum-exp (T, n_q) in fp32 or wider
    """Attends from each token to those of its document up to itself."""
    kernel = kernel_for(query, documents)
    if kernel == "cudnn":
        return _equal_documents_forward(query, keys, values, documents)
    if kernel == "flash":
        sizes = (documents.bounds, documents.key_bounds, max(documents.lengths), max(documents.key_lengths))
        output, lse, *_ = torch.ops.aten._flash_attention_forward(query, keys, values, *sizes, 0.0, True, False)
        return output, lse.transpose(0, 1)
    queries, contexts = _cut(documents.lengths, query), _cut(documents.key_lengths, keys, values)
    outputs = [_document_forward(*mine, *seen) for mine, seen in zip(queries, contexts, strict=True)]
    return torch.cat([output for output, _ in outputs]), torch.cat([lse for _, lse in outputs])


def context_backward(
    grad: Tensor,  # (T, n_q, d)
    query: Tensor,  # (T, n_q, d)
    output: Tensor,  # (T, n_q, d)
    lse: Tensor,  # (T, n_q)
    keys: Tensor,  # (T', n_kv, d)
    values: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, keys and values."""
    kernel = kernel_for(query, documents)
    if kernel == "cudnn":
        return _equal_documents_backward(grad, query, output, lse, keys, values, documents)
    if kernel == "flash":
        sizes = (documents.bounds, documents.key_bounds, max(documents.lengths), max(documents.key_lengths))
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # the random state of a dropout of zero
        lse = lse.transpose(0, 1).contiguous()  # (n_q, T)
        return torch.ops.aten._flash_attention_backward(
            grad, query, keys, values, output, lse, *sizes, 0.0, True, unused, unused
        )
    queries = _cut(documents.lengths, grad, query, output, lse)
    contexts = _cut(documents.key_lengths, keys, values)
    grads = [_document_backward(*mine, *seen) for mine, seen in zip(queries, contexts, strict=True)]
    grad_query, grad_keys, grad_values = (torch.cat(parts) for parts in zip(*grads, strict=True))
    return grad_query, grad_keys, grad_values


def _equal_documents_forward(
    query: Tensor, keys: Tensor, values: Tensor, documents: Documents
) -> tuple[Tensor, Tensor]:
    parts = [_as_batch(tensor, documents) for tensor in (query, keys, values)]
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, True)
    return output.transpose(1, 2).flatten(0, 1), lse[..., 0].transpose(1, 2).flatten(0, 1)


def _equal_documents_backward(
    grad: Tensor, query: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, output, keys, values = (_as_batch(tensor, documents) for tensor in (grad, query, output, keys, values))
    # A plan is found again by the strides of query, keys and values alone: those of the others must always be the same.
    lse = _as_batch(lse, documents).flatten().view(*query.shape[:3], 1)  # (B, n_q, L, 1)
    unused = torch.empty((), dtype=torch.int64, device=query.device)  # the random state of a dropout of zero
    length = documents.lengths[0]
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, keys, values, output, lse, unused, unused, None, None, None, length, length, 0.0, True
    )
    grad_query, grad_keys, grad_values = (part.transpose(1, 2).flatten(0, 1) for part in grads)
    return grad_query, grad_keys, grad_values


def _as_batch(tensor: Tensor, documents: Documents) -> Tensor:  # (T, n, ...) -> (B, n, L, ...)
    """Views B documents of L tokens side by side."""
    return tensor.unflatten(0, (len(documents.lengths), documents.lengths[0])).transpose(1, 2)


def _cut(lengths: tuple[int, ...], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Cuts tensors (T, n, ...) into documents, in the kernels' layout (1, n, T_document, ...)."""
    for parts in zip(*(tensor.split(lengths) for tensor in tensors), strict=True):
        yield [part.transpose(0, 1)[None] for part in parts]


def _document_forward(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        query, keys, values = _for_efficient_kernel(query, keys, values)
        output, lse, *_ = torch.ops.aten._efficient_attention_forward(
            query, keys, values, None, None, None, None, None, 0.0, _efficient_mask(query, keys), True
        )
        return output[0], lse[0, :, : query.shape[1]].transpose(0, 1)
    mask = _cpu_mask(query, keys)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, mask is None, attn_mask=mask
    )
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


def _document_backward(
    grad: Tensor, query: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> list[Tensor]:
    if query.is_cuda:
        num_tokens, num_keys, num_kv_heads = query.shape[2], keys.shape[2], keys.shape[1]
        query, keys, values = _for_efficient_kernel(query, keys, values)
        grad, output = grad.transpose(1, 2), output.transpose(1, 2)
        # (1, n_q, T'), as the kernel's forward pads it: heads may lie a multiple of 32 apart and no other way
        lse = F.pad(lse, (0, -num_tokens % 32), value=torch.inf).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64)
        grad_query, *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad, query, keys, values, None, output, None, None, num_tokens, num_keys, lse, 0.0, no_dropout,
            no_dropout, _efficient_mask(query, keys), False
        )  # fmt: skip
        return [grad_query[0], *(part[0].unflatten(1, (num_kv_heads, -1)).sum(2) for part in grads)]
    mask = _cpu_mask(query, keys)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, keys, values, output, lse, 0.0, mask is None, attn_mask=mask
    )
    return [part[0].transpose(0, 1) for part in grads]


def _efficient_mask(query: Tensor, keys: Tensor) -> int:  # (1, T, n_q, d), (1, T', n_q, d)
    return CAUSAL if query.shape[1] == keys.shape[1] else CAUSAL_FROM_THE_END


def _cpu_mask(query: Tensor, keys: Tensor) -> Tensor | None:  # (1, n_q, T, d), (1, n_kv, T', d) -> (1, 1, T, T')
    """Returns what is added to the scores of a document with more keys than tokens; its kernel knows no such mask."""
    num_tokens, num_keys = query.shape[2], keys.shape[2]
    if num_tokens == num_keys:
        return None
    hidden = torch.ones(num_tokens, num_keys, dtype=torch.bool).triu(1 + num_keys - num_tokens)
    return query.new_zeros(num_tokens, num_keys).masked_fill(hidden, -torch.inf)[None, None]


def _for_efficient_kernel(query: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Lays (1, n, T, d) out as (1, T, n_q, d): the kernel knows no shared heads."""
    group = query.shape[1] // keys.shape[1]
    return [
        part.transpose(1, 2) for part in (query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1))
    ]
