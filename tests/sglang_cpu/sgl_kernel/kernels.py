"""The ops of a dense Llama and of SGLang's `intel_amx` attention, registered as `torch.ops.sgl_kernel`.

One tensor-parallel rank. Names and schemas are those of the compiled package in SGLang 0.5.23.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as the op of this schema."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(schema)
        LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


@op("init_cpu_threads_env(str cpuids) -> ()")
def init_cpu_threads_env(cpuids: str) -> None:
    """Threads are OMP_NUM_THREADS' business here."""


@op("initialize(int size, int rank) -> ()")
def initialize(size: int, rank: int) -> None:
    if size > 1:
        raise NotImplementedError(f"EAGLE3_CPU_KERNELS=1 must run on one tensor-parallel rank, got {size}")


@op("convert_weight_packed(Tensor w) -> Tensor")
def convert_weight_packed(weight: Tensor) -> Tensor:
    return weight.clone()  # an op may not return its argument


@op("weight_packed_linear(Tensor x, Tensor w, Tensor? bias, bool is_vnni) -> Tensor")
def weight_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool) -> Tensor:
    return F.linear(x, weight, bias)


@op("rmsnorm_cpu(Tensor x, Tensor w, float eps) -> Tensor")
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x.float(), weight, eps).to(x.dtype)


@op("fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor w, float eps) -> ()")
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normed(total, weight, eps))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@op("silu_and_mul_cpu(Tensor x) -> Tensor")
def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@op(
    "rotary_embedding_cpu(Tensor positions, Tensor q, Tensor k, int head_size, Tensor cos_sin, bool is_neox)"
    " -> (Tensor, Tensor)"
)
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    table = cos_sin.index_select(0, positions.flatten()).float()  # (N, r): cosines, then sines, of r / 2 angles
    cos, sin = (half.unsqueeze(-2) for half in table.chunk(2, dim=-1))
    num_rotated = table.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(positions.numel(), -1, head_size)  # (N, heads, d)
        rotated, rest = heads[..., :num_rotated].float(), heads[..., num_rotated:]
        if is_neox:  # pairs are (i, i + r / 2)
            first, second = rotated.chunk(2, dim=-1)
            pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:  # pairs are (2i, 2i + 1)
            first, second = rotated[..., ::2], rotated[..., 1::2]
            pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        return torch.cat((pairs.to(x.dtype), rest), dim=-1).reshape(x.shape)

    return rotate(query), rotate(key)


@op("store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor loc, int row_dim) -> ()")
def store_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, row_dim: int) -> None:
    keys.view(-1, row_dim)[slots] = key.reshape(-1, row_dim).to(keys.dtype)
    values.view(-1, row_dim)[slots] = value.reshape(-1, row_dim).to(values.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, logit_cap: float) -> Tensor:
    """Returns (N, n_q, d) of queries (N, n_q, d) over keys (S, n_kv, d) where `visible` (N, S) says so."""
    num_shared = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(num_shared, dim=1) for x in (keys, values))  # (S, n_q, d)
    scores = torch.einsum("nhd,shd->hns", query.float(), keys) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), values).to(query.dtype)


def _refuse(is_cross: bool, encoder_lens: Tensor | None, sinks: Tensor | None) -> None:
    if is_cross or encoder_lens is not None or sinks is not None:
        raise NotImplementedError("cross attention and attention sinks need the real sgl_kernel")


@op(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor kb, Tensor vb, float ks, float vs, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, bool is_cross, int sliding_window, Tensor? encoder_lens, "
    "Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
def extend_attention(
    query: Tensor,
    key: Tensor | None,  # new keys and values are in the cache already
    value: Tensor | None,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attends from the last extend_seq_lens[b] tokens of each request to all of its seq_lens[b]."""
    _refuse(is_cross, encoder_lens, sinks)
    masked = 0  # entries of tree_mask that are used up
    columns = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=False
    )
    for row, length, num_new, start in columns:
        if num_new == 0:
            continue
        position, other = torch.arange(length - num_new, length)[:, None], torch.arange(length)
        visible = other <= position if is_causal else torch.ones(num_new, length, dtype=torch.bool)
        if sliding_window > 0:
            visible = visible & (other > position - sliding_window)
        if tree_mask is not None:  # num_new * num_new entries per request; the tokens before them are all visible
            tree = tree_mask.view(-1)[masked : masked + num_new**2].view(num_new, num_new).bool()
            visible = torch.cat((torch.ones(num_new, length - num_new, dtype=torch.bool), tree), dim=1)
            masked += num_new**2
        slots = req_to_token[row, :length].long()
        rows = slice(start, start + num_new)
        out[rows] = _attend(query[rows], keys[slots], values[slots], visible, scale, logit_cap)


@op(
    "decode_attention_cpu(Tensor q, Tensor(a!) kb, Tensor(b!) vb, float ks, float vs, Tensor(c!) o, Tensor? k, "
    "Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "float sm_scale, float logit_cap, bool is_cross, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: float,
    value_scale: float,
    out: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    slots: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Stores each request's new key and value, then attends from its last token."""
    _refuse(is_cross, encoder_lens, sinks)
    if key is not None and value is not None:
        keys[slots.long()] = key.reshape(-1, *keys.shape[1:]).to(keys.dtype)
        values[slots.long()] = value.reshape(-1, *values.shape[1:]).to(values.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        visible = torch.ones(1, length, dtype=torch.bool)
        if sliding_window > 0:
            visible[:, : max(0, length - sliding_window)] = False
        held = req_to_token[row, :length].long()
        out[b : b + 1] = _attend(query[b : b + 1], keys[held], values[held], visible, scale, logit_cap)


def _named_only(name: str) -> None:
    """Registers an op that SGLang looks up when it is imported and that no model here calls."""

    def refuse() -> None:
        raise NotImplementedError(f"{name} needs the real sgl_kernel")

    op(f"{name}() -> ()")(refuse)


for _name in ("apply_rotary_pos_emb_cpu", "flash_attn_varlen_func", "conv3d_embed_cpu"):
    _named_only(_name)
