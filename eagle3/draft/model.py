"""One draft step.

The target's embeddings are not in here: they are frozen, and callers pass embedded tokens. What a step hands to the
next one is its output before the final norm, unless `norm_output` (EAGLE-3.1) says after it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.config import UserError
from eagle3.draft.fusion import RmsNorm, RopeTables, apply_rope
from eagle3.words import one_line

# Their tables do not depend on the sequence's length, so that packing and serving read the same ones.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and switches of a drafter."""

    hidden_size: int  # D
    intermediate_size: int  # I
    num_attention_heads: int  # n_q
    num_key_value_heads: int  # n_kv
    head_dim: int  # d; never derived from D
    vocab_size: int  # V
    draft_vocab_size: int  # W
    capture_layers: tuple[int, ...]  # boundaries: k is the residual stream that enters target layer k
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    rope_parameters: dict[str, Any]  # transformers 5: rope_type, rope_theta, and what the type needs
    num_aux: int = 3  # A
    fc_norm: bool = False  # EAGLE-3.1: RMSNorm on each captured state before fc
    norm_output: bool = False  # EAGLE-3.1: the normed state is fed back
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        """Checks the values against each other.

        Raises:
            UserError: some cannot be built; all of them are named.
        """
        problems = []
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}; change one of them"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            problems.append(
                f"draft_vocab_size must be between 1 and the target's {self.vocab_size} tokens, "
                f"got {self.draft_vocab_size}; change it"
            )
        if len(self.capture_layers) != self.num_aux:
            problems.append(
                f"capture_layers must be {self.num_aux} boundaries (num_aux), got {list(self.capture_layers)}; "
                f"name one boundary for each captured state"
            )
        if self.hidden_act != "silu":
            problems.append(f"hidden_act must be 'silu', got {self.hidden_act!r}; SGLang's draft layer has no other")
        if self.rope_parameters.get("rope_type") not in ROPE_TYPES:
            problems.append(
                f"rope_parameters.rope_type must be one of {list(ROPE_TYPES)}, "
                f"got {self.rope_parameters.get('rope_type')!r}; give the drafter one of these"
            )
        if self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(
                f"rope_parameters.partial_rotary_factor must be 1.0, "
                f"got {self.rope_parameters['partial_rotary_factor']!r}; the draft layer rotates whole heads"
            )
        if problems:
            raise UserError("\n".join(problems))


class QueryKeyValue(NamedTuple):
    """Attention inputs of N rows, RoPE applied."""

    query: Tensor  # (N, n_q, d)
    key: Tensor  # (N, n_kv, d)
    value: Tensor  # (N, n_kv, d)


class RMSNorm(nn.Module):
    """Llama's RMSNorm, whose mean is taken in fp32 whatever the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:  # (..., size) -> (..., size)
        normed: Tensor = RmsNorm.apply(hidden_states, self.weight, self.eps)
        return normed


class Attention(nn.Module):
    """The projections of the draft layer's attention, which reads 2D: [embedding; hidden state]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:  # (N, D) -> (N, D)
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DraftLayer(nn.Module):
    """Parameters of the one decoder layer; the names are those of the files that SGLang loads."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Drafter(nn.Module):
    """An EAGLE-3 draft head, in pieces: what lies between `qkv` and `finish` is the caller's attention."""

    d2t: Tensor  # (W,) int64 offsets: draft token i is target token i + d2t[i]
    t2d: Tensor  # (V,) bool: the target tokens that can be drafted
    inv_freq_bits: Tensor  # (d/2,) int32

    def __init__(self, config: DrafterConfig) -> None:
        """Makes a drafter with random weights from torch's default generator, for the first W target tokens."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_aux * config.hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(config.num_aux)
            )
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        rotary = _rotary_embedding(config)
        # Kept as the bits of fp32 numbers: a module cast to bf16 casts its float buffers, and positions past 256 blur.
        self.register_buffer("inv_freq_bits", rotary.inv_freq.float().view(torch.int32), persistent=False)
        self.rope_scaling = float(rotary.attention_scaling)

    def set_draft_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Sets which target tokens are drafted: d2t (W,) int64 offsets, t2d (V,) bool."""
        assert d2t.shape == self.d2t.shape, (d2t.shape, self.d2t.shape)
        assert t2d.shape == self.t2d.shape, (t2d.shape, self.t2d.shape)
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    @torch.no_grad()
    def init_from_target(self, lm_head: Tensor, norm: Tensor) -> None:
        """Starts the head as the drafted rows of the target's head (V, D), the final norm as the target's (D,)."""
        self.lm_head.weight.copy_(lm_head[self.target_ids.to(lm_head.device)])
        self.norm.weight.copy_(norm)

    @property
    def target_ids(self) -> Tensor:
        """The target token (W,) int64 of each draft token."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def compute_dtype(self) -> torch.dtype:
        """The dtype that matrix products run in: autocast's inside autocast, the weights' elsewhere."""
        weight = self.fc.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def rope_tables(self, num_positions: int) -> RopeTables:
        """Returns RoPE's cosines and sines (P, d/2) of positions 0..P-1."""
        return self._tables_at(torch.arange(num_positions, device=self.d2t.device))

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:  # (N, A*D) -> (N, D)
        """Makes the hidden state of step 0 from the captured states."""
        aux = aux_hidden_states.to(self.compute_dtype())
        if self.config.fc_norm:
            states = aux.split(self.config.hidden_size, dim=-1)  # A of (N, D)
            aux = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(aux)

    def attention_input(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:  # (N, D), (N, D) -> (N, 2D)
        """Joins the next token's embedding and the hidden state, each with its own norm."""
        layer = self.midlayer
        return torch.cat(
            [layer.input_layernorm(embeds).to(hidden_states.dtype), layer.hidden_norm(hidden_states)], dim=-1
        )

    def queries(self, attention_input: Tensor, positions: Tensor) -> Tensor:  # (N, 2D), (N,) -> (N, n_q, d)
        """Projects and rotates queries."""
        query = self.midlayer.self_attn.q_proj(attention_input)
        return self._rotate(query.unflatten(-1, (-1, self.config.head_dim)), positions)

    def keys_values(self, attention_input: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Projects (N, 2D) to keys and values (N, n_kv, d), the keys rotated by positions (N,)."""
        attention = self.midlayer.self_attn
        heads = (-1, self.config.head_dim)
        key = attention.k_proj(attention_input).unflatten(-1, heads)
        return self._rotate(key, positions), attention.v_proj(attention_input).unflatten(-1, heads)

    def qkv(self, embeds: Tensor, hidden_states: Tensor, positions: Tensor) -> QueryKeyValue:
        """Makes the attention inputs of rows with embeddings (N, D), hidden states (N, D) and positions (N,)."""
        attention_input = self.attention_input(embeds, hidden_states)
        key, value = self.keys_values(attention_input, positions)
        return QueryKeyValue(self.queries(attention_input, positions), key, value)

    def finish(self, hidden_states: Tensor, attention_output: Tensor) -> Tensor:  # (N, D), (N, n_q, d) -> (N, D)
        """Completes the layer after the attention; returns its output before the final norm."""
        layer = self.midlayer
        hidden_states = hidden_states + layer.self_attn.o_proj(attention_output.flatten(-2))
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    def feedback(self, output: Tensor) -> Tensor:  # (N, D) -> (N, D)
        """Makes the hidden state of the next step from a step's output."""
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: Tensor) -> Tensor:  # (N, D) -> (N, W)
        """Scores the draft tokens."""
        return self.lm_head(self.norm(output))

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:  # (N, n, d), (N,) -> (N, n, d)
        tables = self._tables_at(positions)
        return apply_rope(heads, tables.cos[:, None], tables.sin[:, None])

    def _tables_at(self, positions: Tensor) -> RopeTables:  # (N,)
        angles = positions.float()[:, None] * self.inv_freq_bits.view(torch.float32)  # (N, d/2)
        return RopeTables(angles.cos() * self.rope_scaling, angles.sin() * self.rope_scaling)


def _rotary_embedding(config: DrafterConfig) -> LlamaRotaryEmbedding:
    """Reads the frequencies from transformers, so that every RoPE type means what it means there.

    Raises:
        UserError: transformers makes none of these parameters.
    """
    try:
        return _llama_rotary_embedding(config)
    except Exception as error:  # it checks some parameters, and computes with the others
        raise UserError(
            f"rope_parameters must be ones that transformers computes, got {config.rope_parameters} "
            f"({one_line(error)}); write the base and scaling that the drafter was trained with"
        ) from error


def _llama_rotary_embedding(config: DrafterConfig) -> LlamaRotaryEmbedding:
    llama = LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,  # only head_dim matters; this one always divides
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    return LlamaRotaryEmbedding(llama)
