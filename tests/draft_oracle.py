"""Drafting token by token with a KV cache, in plain formulas: shares no code with the drafter, only its parameters.

It is what a server does: true features of the tokens so far, then chains that feed on themselves.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.draft.model import DrafterConfig, Eagle3Drafter


def tiny_drafter(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Eagle3Drafter:
    """Returns a random drafter: D 16, V 40, W 12, 4 query and 2 key heads of 6; every norm and the map are random."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,  # not 16 / 4
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "capture_layers": (1, 2, 4),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    config = DrafterConfig(**(sizes | changes))
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config)
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    drafter.set_draft_vocab(ids - torch.arange(ids.numel()), t2d)
    return drafter.to(dtype)


@dataclass(frozen=True)
class Drafted:
    """What one step of a chain gives."""

    output: Tensor  # (D,) before the final norm
    logits: Tensor  # (W,)


class CachedDrafter:
    """Runs one token at a time; keys and values of earlier tokens lie in `cache`."""

    def __init__(self, drafter: Eagle3Drafter, embed_tokens: Tensor) -> None:
        self.weights = dict(drafter.named_parameters())
        self.config = drafter.config
        self.embed_tokens = embed_tokens
        self.cache: list[tuple[Tensor, Tensor]] = []  # (n_kv, d) each

    def chain(self, input_ids: Tensor, aux: Tensor, row: int, steps: int) -> list[Drafted]:
        """Reads the true features of tokens 0..row of one document, then drafts, fed the recorded tokens."""
        self.cache = []
        for token in range(row + 1):
            drafted = self.feed(self.fuse(aux[token]), int(input_ids[token + 1]), token)
        chain = [drafted]
        for step in range(1, steps):
            hidden = chain[-1].output
            if self.config.norm_output:
                hidden = self.norm(hidden, "norm")
            chain.append(self.feed(hidden, int(input_ids[row + 1 + step]), row + step))
        return chain

    def fuse(self, aux: Tensor) -> Tensor:  # (A*D,) -> (D,)
        size = self.config.hidden_size
        states = [aux[size * i : size * (i + 1)] for i in range(self.config.num_aux)]
        if self.config.fc_norm:
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        return self.weights["fc.weight"] @ torch.cat(states)

    def feed(self, hidden: Tensor, token: int, position: int) -> Drafted:
        embed = self.embed_tokens[token].to(hidden.dtype)
        joined = torch.cat(
            [self.norm(embed, "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm")]
        )  # (2D,)
        key = self.rotate(self.heads("k_proj", joined), position)
        self.cache.append((key, self.heads("v_proj", joined)))
        query = self.rotate(self.heads("q_proj", joined), position)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        attended = []
        for head in range(self.config.num_attention_heads):
            keys = torch.stack([key[head // group] for key, _ in self.cache])  # (cached, d)
            values = torch.stack([value[head // group] for _, value in self.cache])
            attended.append(torch.softmax(keys @ query[head] / self.config.head_dim**0.5, dim=0) @ values)
        hidden = hidden + self.weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        inner = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate = self.weights["midlayer.mlp.gate_proj.weight"] @ inner
        up = self.weights["midlayer.mlp.up_proj.weight"] @ inner
        output = hidden + self.weights["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return Drafted(output, self.weights["lm_head.weight"] @ self.norm(output, "norm"))

    def heads(self, name: str, joined: Tensor) -> Tensor:  # (2D,) -> (n, d)
        return (self.weights[f"midlayer.self_attn.{name}.weight"] @ joined).reshape(-1, self.config.head_dim)

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        root = (hidden.pow(2).sum() / hidden.numel() + self.config.rms_norm_eps).sqrt()
        return hidden / root * self.weights[f"{name}.weight"]

    def rotate(self, heads: Tensor, position: int) -> Tensor:  # (n, d), RoPE with the halves paired
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=heads.dtype)
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(heads[:, :half], heads[:, half:])
        return torch.cat([turned.real, turned.imag], dim=1)
