"""A new drafter has the target's sizes, its head and its norm."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import DraftConfig, TrainConfig, UserError
from eagle3.config_file import find_config, load_config
from eagle3.draft.draft_vocab import build_draft_vocab
from eagle3.draft.initial import drafter_config_from_target, init_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights, load_target_config

LLAMA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
# The sizes of Kimi-K2.5's text_config that matter here.
KIMI: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def test_sizes_are_the_targets_where_the_config_leaves_them_null() -> None:
    config = drafter_config_from_target(LLAMA, DraftConfig(draft_vocab_size=40), [1, 4, 6])
    assert config == DrafterConfig(
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=100,
        draft_vocab_size=40,
        capture_layers=(1, 4, 6),
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )


def test_sizes_given_win() -> None:
    draft = DraftConfig(
        draft_vocab_size=40, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        fc_norm=True, norm_output=True,
    )  # fmt: skip
    config = drafter_config_from_target(LLAMA | {"head_dim": 10}, draft, [1, 2, 4, 6])
    sizes = (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert sizes == (96, 4, 4, 16)
    assert (config.num_aux, config.fc_norm, config.norm_output) == (4, True, True)


def test_target_with_an_explicit_head_dim(tiny_target: Path) -> None:
    config = drafter_config_from_target(load_target_config(tiny_target), DraftConfig(draft_vocab_size=40), [2, 4, 5])
    assert config.head_dim == 24  # hidden_size / num_attention_heads is 16
    assert config.max_position_embeddings == 512


def test_mla_target_gives_whole_heads_and_plain_yarn() -> None:
    config = drafter_config_from_target(KIMI, DraftConfig(), [3, 31, 59])
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 64, 128)
    assert config.rope_parameters == {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip


def test_the_shipped_head_for_kimi_has_the_whole_vocabulary() -> None:
    config = load_config(TrainConfig, find_config("kimi_k2_5", "train"))
    assert config.target.capture_layers is not None
    sizes = drafter_config_from_target(KIMI, config.draft, config.target.capture_layers)
    assert sizes.draft_vocab_size == sizes.vocab_size == 163840
    with torch.device("meta"):
        drafter = Eagle3Drafter(sizes)
    assert round(sum(parameter.numel() for parameter in drafter.parameters()) / 1e9, 2) == 1.93


def test_multimodal_rope_becomes_plain() -> None:
    for rope in ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
                 {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 1, 1],
                                      "mrope_interleaved": True, "partial_rotary_factor": 0.25}}):  # fmt: skip
        config = drafter_config_from_target(LLAMA | rope, DraftConfig(draft_vocab_size=40), [1, 4, 6])
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_size_that_nobody_says_is_named() -> None:
    target = {key: value for key, value in LLAMA.items() if key != "intermediate_size"} | {"num_attention_heads": 7}
    draft = DraftConfig(draft_vocab_size=40, num_attention_heads=6)
    with pytest.raises(UserError, match=r"draft\.intermediate_size and draft\.head_dim must be given .* got null"):
        drafter_config_from_target(target, draft, [1, 4, 6])


def test_boundaries_and_vocabulary_must_fit_the_target() -> None:
    with pytest.raises(UserError, match="boundary 9, the last layer's output"):
        drafter_config_from_target(LLAMA, DraftConfig(draft_vocab_size=40), [1, 4, 9])
    with pytest.raises(UserError, match="draft_vocab_size must be between 1 and the target's 100 tokens, got 32000"):
        drafter_config_from_target(LLAMA, DraftConfig(), [1, 4, 6])


def make_drafter(seed: int, init_from_target: bool) -> tuple[Eagle3Drafter, TargetWeights]:
    generator = torch.Generator().manual_seed(9)
    target = TargetWeights(
        embed_tokens=torch.randn(100, 48, generator=generator).bfloat16(),
        lm_head=torch.randn(100, 48, generator=generator).bfloat16(),
        norm=torch.rand(48, generator=generator).bfloat16(),
        rms_norm_eps=1e-5,
    )
    vocab = build_draft_vocab(torch.arange(100), 40, [3])
    draft = DraftConfig(draft_vocab_size=40, fc_norm=True)
    drafter = Eagle3Drafter(drafter_config_from_target(LLAMA, draft, [1, 4, 6]))
    init_drafter(drafter, target, vocab, seed=seed, init_from_target=init_from_target)
    return drafter, target


def test_head_and_norm_start_as_the_targets() -> None:
    drafter, target = make_drafter(0, init_from_target=True)
    assert drafter.target_ids.tolist() == [3, *range(61, 100)]
    for row, token in enumerate(drafter.target_ids.tolist()):
        assert torch.equal(drafter.lm_head.weight[row], target.lm_head[token].float())
    assert torch.equal(drafter.norm.weight, target.norm.float())
    assert drafter.lm_head.weight.dtype == torch.float32
    assert drafter.t2d.nonzero().flatten().tolist() == drafter.target_ids.tolist()


def test_a_vocabulary_of_another_size_than_the_targets_is_refused() -> None:
    drafter, target = make_drafter(0, init_from_target=False)
    vocab = build_draft_vocab(torch.arange(101), 40, [3])
    with pytest.raises(UserError, match=r"vocab_size must be the target's 100, got 101; restore its manifest\.json"):
        init_drafter(drafter, target, vocab, seed=0, init_from_target=True)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first, _ = make_drafter(0, init_from_target=False)
    torch.manual_seed(2)
    again, _ = make_drafter(0, init_from_target=False)
    other, _ = make_drafter(1, init_from_target=False)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert torch.equal(parameter, other.get_parameter(name)) == (parameter.dim() == 1), name


def test_matrices_are_uniform_in_their_fan_in() -> None:
    drafter, _ = make_drafter(0, init_from_target=False)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            assert bool((parameter == 1).all()), name
        else:
            bound = parameter.shape[1] ** -0.5
            assert parameter.abs().max() <= bound, name
            # 640 numbers or more of a uniform distribution: the spread is known to about 2 %.
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.08), name
