"""One draft step: names, norms, RoPE tables."""

from typing import Any

import pytest
import torch
from draft_oracle import CachedDrafter, tiny_drafter
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3.config import UserError
from eagle3.draft.model import RMSNorm

NAMES = [
    "d2t",
    "fc.weight",
    "lm_head.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "t2d",
]
FC_NORM_NAMES = ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("fc_norm", [False, True])
def test_parameter_names_are_those_of_served_files(fc_norm: bool) -> None:
    expected = NAMES + (FC_NORM_NAMES if fc_norm else [])
    assert sorted(tiny_drafter(fc_norm=fc_norm, norm_output=True).state_dict()) == sorted(expected)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("cast", [False, True])
def test_rotation_is_that_of_transformers_at_any_position(rope: dict[str, Any], cast: bool) -> None:
    drafter = tiny_drafter(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    if cast:  # as DeepSpeed casts a module: the tables must not become bf16
        drafter.bfloat16()
    positions = torch.tensor([0, 2047, 100000])
    heads = torch.randn(3, 4, 64)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope)
    )
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(drafter._rotate(heads, positions), expected[0])


def test_norm_is_llamas_in_fp32_and_sums_in_fp32_in_bf16() -> None:
    hidden = torch.randn(5, 64) * 30
    ours, llamas = RMSNorm(64, 1e-5), LlamaRMSNorm(64, eps=1e-5)
    for norm in (ours, llamas):
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(hidden), llamas(hidden), rtol=1e-6, atol=1e-6)  # fp32, other order of products
    exact = llamas(hidden.bfloat16().float())
    rounded = ours(hidden.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=0)  # one rounding to 8 bits of mantissa


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
def test_one_step_is_that_of_the_plain_formulas(switches: dict[str, Any]) -> None:
    drafter = tiny_drafter(**switches)
    embeds, aux, positions = torch.randn(1, 16), torch.randn(1, 48), torch.tensor([7])
    hidden = drafter.fuse(aux)
    _, _, value = drafter.qkv(embeds, hidden, positions)
    output = drafter.finish(hidden, value.repeat_interleave(2, 1))  # one key: attention returns its value

    oracle = CachedDrafter(drafter, embeds)
    expected = oracle.feed(oracle.fuse(aux[0]), 0, 7)
    torch.testing.assert_close(output[0], expected.output, rtol=1e-5, atol=1e-5)  # fp32, other summation order
    torch.testing.assert_close(drafter.logits(output)[0], expected.logits, rtol=1e-5, atol=1e-5)
    fed_back = oracle.norm(expected.output, "norm") if switches else expected.output
    torch.testing.assert_close(drafter.feedback(output)[0], fed_back, rtol=1e-5, atol=1e-5)


def test_head_and_norm_start_as_the_targets() -> None:
    drafter = tiny_drafter()
    lm_head, norm = torch.randn(40, 16), torch.randn(16)
    drafter.init_from_target(lm_head, norm)
    ids = [int(offset) + i for i, offset in enumerate(drafter.d2t)]
    assert drafter.target_ids.tolist() == ids
    assert torch.equal(drafter.lm_head.weight, lm_head[ids])
    assert torch.equal(drafter.norm.weight, norm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 3 and 2"),
        ({"draft_vocab_size": 41}, "draft_vocab_size must be between 1 and the target's 40 tokens, got 41"),
        ({"capture_layers": (1, 2)}, r"capture_layers must be 3 boundaries \(num_aux\), got \[1, 2\]"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be one of .*, got 'dynamic'"),
        (
            {"rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1.0, got 0.5",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_drafter(**changes)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"(?s)draft_vocab_size.*hidden_act"):
        tiny_drafter(draft_vocab_size=0, hidden_act="gelu")
