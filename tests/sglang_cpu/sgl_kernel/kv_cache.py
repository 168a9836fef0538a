"""Which slots of the key-value cache a request's tokens lie in.

`req_to_token` is (requests, positions): row `req_pool_indices[b]` holds the slots of request b in the batch.
"""

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes new slots, request after request in `out_cache_loc`, to positions [start, end) of each request."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Reads the slots at positions [start, end) of each request into `out_cache_loc`, request after request."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        slots = req_to_token[row, start:end]
        out_cache_loc[taken : taken + end - start] = slots.to(out_cache_loc.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Reads the slots that follow each request's tokens: topk branches of num_steps drafted tokens."""
    num_drafted = topk * num_steps
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        slots = req_to_token[row, length : length + num_drafted]
        out_cache_loc[b * num_drafted : (b + 1) * num_drafted] = slots.to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:  # (requests * topk, pool_len)
    """Returns one row of slots per branch: the request's tokens, then the branch's own drafted ones."""
    table = torch.empty((req_pool_indices.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        for branch in range(topk):
            drafted = length + branch * num_steps
            slots = table[b * topk + branch]
            slots[:length] = req_to_token[row, :length]
            slots[length : length + num_steps] = req_to_token[row, drafted : drafted + num_steps]
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Moves rows of each layer's buffer, given by address and bytes per row; source and target may overlap."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, num_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=False):
        rows = [ctypes.string_at(address + slot * num_bytes, num_bytes) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * num_bytes, row, num_bytes)
