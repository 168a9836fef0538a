"""Training-time test as it is defined, dense: every row of a document at every step, under a mask of T x T numbers.

It shares no code with the engine, only the drafter's parameters; autograd makes its gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.objective import TTTSums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences


def dense_sums(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    packed: PackedSequences,
    *,
    ttt_steps: int,
    ttt_decay: float,
    renormalise: bool,
    step_weights: Tensor | None = None,
    **others: Any,  # of `ttt_sums`, none of which asks for another loss
) -> TTTSums:
    """Returns what `ttt_sums` does for cross-entropy."""
    assert others.get("kind", "cross_entropy") == "cross_entropy", others
    assert not others.get("drop_rejected", False), others
    if step_weights is None:
        step_weights = ttt_decay ** torch.arange(ttt_steps, dtype=torch.float64)
    loss_of = [torch.zeros((), dtype=torch.float64) for _ in range(ttt_steps)]
    num_counted, num_top1, acceptance = torch.zeros(3, ttt_steps, dtype=torch.float64)
    target_ids = torch.tensor([number + int(offset) for number, offset in enumerate(drafter.d2t)])
    target_logits = packed.last_hidden_states.float() @ target.lm_head.float().T  # (S, V)
    served_of_row = target_logits.softmax(-1)[:, target_ids]  # (S, W) of the softmax over V
    row_of_token = torch.full((packed.input_ids.numel(),), -1)
    row_of_token[packed.target_rows] = torch.arange(packed.target_rows.numel())
    start = 0
    for length in packed.document_lengths:
        ids = packed.input_ids[start : start + length]
        mask = packed.loss_mask[start : start + length].tolist()
        steps = _unroll(drafter, target.embed_tokens, ids, packed.aux_hidden_states[start : start + length], ttt_steps)
        for step, logits in enumerate(steps):  # (T, W)
            rows = [t for t in range(length - 2 - step) if all(mask[t + 1 : t + 3 + step])]
            if not rows:
                continue
            at = torch.tensor(rows)
            served = served_of_row[row_of_token[start + at + 1 + step]]  # (R, W)
            wanted = served / served.sum(-1, keepdim=True) if renormalise else served
            log_drafted = logits[at].log_softmax(-1)
            loss_of[step] = loss_of[step] - (wanted * log_drafted).sum(dtype=torch.float64)
            num_counted[step] += len(rows)
            num_top1[step] += (target_ids[log_drafted.argmax(-1)] == ids[at + 2 + step]).sum()
            acceptance[step] += torch.minimum(served, log_drafted.detach().exp()).sum()
        start += length
    step_loss = torch.stack(loss_of)
    # A sum over all parameters, so that each has a gradient whatever is counted.
    nothing = sum((parameter.sum() * 0.0 for parameter in drafter.parameters()), start=torch.zeros(()))
    loss = (step_weights.double() * step_loss).sum() + nothing
    return TTTSums(loss, step_loss.detach(), num_counted, num_top1, acceptance)


def _unroll(drafter: Eagle3Drafter, embed_tokens: Tensor, ids: Tensor, aux: Tensor, ttt_steps: int) -> Iterator[Tensor]:
    """Yields each step's logits (T, W); rows whose tokens are not all there are whatever they are."""
    weights, config = dict(drafter.named_parameters()), drafter.config
    num_tokens, num_heads, num_kv_heads = ids.numel(), config.num_attention_heads, config.num_key_value_heads
    group = num_heads // num_kv_heads

    def norm(states: Tensor, name: str) -> Tensor:
        return (
            states / (states.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]
        )

    def linear(name: str, states: Tensor) -> Tensor:
        return states @ weights[f"{name}.weight"].T

    states = aux.float().split(config.hidden_size, dim=-1)
    if config.fc_norm:
        states = tuple(norm(state, f"fc_norm.{number}") for number, state in enumerate(states))
    hidden = linear("fc", torch.cat(states, dim=-1))  # (T, D)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    keys, values = [], []  # of each step, (T, n_q, d)
    for step in range(ttt_steps):
        places = (torch.arange(num_tokens) + 1 + step).clamp(max=num_tokens - 1)
        embeds = embed_tokens[ids[places]].float()
        joined = torch.cat([norm(embeds, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")], dim=-1)
        query, key, value = (
            linear(f"midlayer.self_attn.{name}_proj", joined).unflatten(-1, (-1, config.head_dim)) for name in "qkv"
        )
        query, key = (_rotate(config, heads, step) for heads in (query, key))
        keys.append(key.repeat_interleave(group, dim=1))
        values.append(value.repeat_interleave(group, dim=1))
        scores = torch.einsum("ihd,jhd->hij", query, keys[0]).masked_fill(future, -torch.inf)  # (n_q, T, T)
        own = [torch.einsum("ihd,ihd->hi", query, key) for key in keys[1:]]
        probs = torch.cat([scores, *(each[..., None] for each in own)], dim=-1) / config.head_dim**0.5
        probs = probs.softmax(-1)  # (n_q, T, T + k)
        attended = torch.einsum("hij,jhd->ihd", probs[..., :num_tokens], values[0])
        for number, value in enumerate(values[1:]):
            attended = attended + probs[..., num_tokens + number].T[..., None] * value
        hidden = hidden + linear("midlayer.self_attn.o_proj", attended.flatten(1))
        inner = norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = linear("midlayer.mlp.gate_proj", inner), linear("midlayer.mlp.up_proj", inner)
        hidden = hidden + linear("midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        normed = norm(hidden, "norm")
        yield linear("lm_head", normed)
        if config.norm_output:
            hidden = normed


def _rotate(config: DrafterConfig, heads: Tensor, step: int) -> Tensor:  # (T, n, d), at positions t + step
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    positions = torch.arange(heads.shape[0]) + step
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)  # (T, d/2)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(heads[..., :half], heads[..., half:])
    return torch.cat([turned.real, turned.imag], dim=-1)
