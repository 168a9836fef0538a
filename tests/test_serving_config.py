"""config.json says what SGLang's classes read, and layer ids come back as the same boundaries."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from eagle3.config import UserError
from eagle3.draft.model import DrafterConfig
from eagle3.draft.serving_config import (
    from_serving_config,
    served_boundaries,
    served_layer_ids,
    to_serving_config,
)

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 12,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def drafter_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": 100,
        "draft_vocab_size": 40,
        "capture_layers": (3, 6, 9),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    return DrafterConfig(**values | changes)


def captured_by_sglang(layer_ids: list[int], architecture: str) -> list[int]:
    """What `set_eagle3_layers_to_capture` stores, written after SGLang 0.5.23's llama.py and deepseek_v2.py."""
    if architecture.startswith(("Deepseek", "Kimi")):
        return [i + 1 for i in layer_ids] if layer_ids[0] == 1 else list(layer_ids)
    return [i + 1 for i in layer_ids]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM",
                                          "KimiK25ForConditionalGeneration"])  # fmt: skip
@pytest.mark.parametrize("boundaries", [[2, 15, 27], [3, 31, 59], [0, 1, 2], [60]])
def test_sglang_captures_the_boundaries(architecture: str, boundaries: list[int]) -> None:
    layer_ids = served_layer_ids(boundaries, architecture)
    assert captured_by_sglang(layer_ids, architecture) == boundaries
    assert served_boundaries(layer_ids, architecture, 61) == boundaries


def captured_by_vllm(stored: dict[str, Any], runner: str) -> list[int] | None:
    """What its runners set on the target, written after vLLM 0.33.0; None: the target's default layers.

    All classes alike take the numbers as boundaries (model_executor/models/llama.py and deepseek_v2.py).
    """
    found = stored.get("eagle_aux_hidden_state_layer_ids")
    if runner == "v1/worker/gpu_model_runner.py" and not found:
        found = (stored.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return list(found) if found else None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("runner", ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"])
def test_both_engines_capture_the_boundaries_from_one_file(architecture: str, runner: str) -> None:
    stored = to_serving_config(drafter_config(), TARGET | {"architectures": [architecture]}, torch.bfloat16)
    assert captured_by_vllm(stored, runner) == [3, 6, 9]
    assert captured_by_sglang(stored["eagle_config"]["eagle_aux_hidden_state_layer_ids"], architecture) == [3, 6, 9]
    del stored["eagle_aux_hidden_state_layer_ids"]  # of an older export vLLM captures something else
    without = [2, 5, 8] if architecture == "LlamaForCausalLM" else [3, 6, 9]
    assert captured_by_vllm(stored, runner) == (without if "gpu_model_runner" in runner else None)


def test_list_that_no_ids_give_is_refused() -> None:
    assert served_layer_ids([1, 4, 6], "LlamaForCausalLM") == [0, 3, 5]
    with pytest.raises(
        UserError, match=r"must not start with boundary 1 for .* DeepseekV3ForCausalLM, got \[1, 4, 6\]"
    ):
        served_layer_ids([1, 4, 6], "DeepseekV3ForCausalLM")


def test_ids_that_start_with_1_gain_1_in_every_class() -> None:
    assert served_boundaries([1, 29, 57], "KimiK25ForConditionalGeneration", 61) == [2, 30, 58]
    assert served_boundaries([1, 29, 57], "LlamaForCausalLM", 61) == [2, 30, 58]


def test_drafter_without_ids_gets_sglangs_default() -> None:
    assert served_boundaries(None, "LlamaForCausalLM", 12) == [2, 6, 9]
    assert served_boundaries(None, "DeepseekV3ForCausalLM", 61) == [2, 30, 58]


@pytest.mark.parametrize("layer_ids", [[], [2, 6, 11]])
def test_ids_outside_the_target_are_refused(layer_ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"strictly increase within 0\.\.11"):
        served_boundaries(layer_ids, "LlamaForCausalLM", 12)


def test_config_is_the_literal_one() -> None:
    assert to_serving_config(drafter_config(), TARGET, torch.bfloat16) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "vocab_size": 100,
        "draft_vocab_size": 40,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "num_aux_hidden_states": 3,
        "fc_norm": False,
        "norm_output": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 8], "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [3, 6, 9],
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
    }


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 1024},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_reads_the_same_in_both_schemas(rope: dict[str, Any]) -> None:
    config = drafter_config(rope_parameters=rope)
    stored = to_serving_config(config, TARGET, torch.float32)
    for left_out in ([], ["rope_parameters"], ["rope_theta", "rope_scaling"]):
        kept = {key: value for key, value in copy.deepcopy(stored).items() if key not in left_out}
        assert from_serving_config(kept, TARGET, "config.json") == config, left_out
        llama = LlamaConfig(**kept)
        assert llama.to_dict()["rope_parameters"] == rope, left_out
        assert (llama.head_dim, llama.max_position_embeddings, llama.num_hidden_layers) == (10, 4096, 1)


@pytest.mark.parametrize(
    "changes", [{}, {"fc_norm": True, "norm_output": True}, {"capture_layers": (0, 11), "num_aux": 2}]
)
def test_config_comes_back(changes: dict[str, Any]) -> None:
    config = drafter_config(**changes)
    assert from_serving_config(to_serving_config(config, TARGET, torch.bfloat16), TARGET, "config.json") == config


def test_others_configs_may_leave_out_what_has_a_default() -> None:
    stored = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "vocab_size": 100,
        "draft_vocab_size": 40,
        "max_position_embeddings": 2048,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "use_aux_norm": True,
    }
    assert from_serving_config(stored, TARGET, "config.json") == drafter_config(
        num_key_value_heads=6, head_dim=8, rms_norm_eps=1e-6, capture_layers=(2, 6, 9), max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, fc_norm=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures=\['LlamaForCausalLM'\], wanted \['Llama.*Eagle3'\]"),
        ({"draft_vocab_size": None}, "draft_vocab_size=None: SGLang then serves the target's own head"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size='40', wanted an integer"),
        ({"hidden_size": 64}, "hidden_size=64, wanted the target's 48: another target's drafter"),
        ({"vocab_size": 101}, "vocab_size=101, wanted the target's 100: another target's drafter"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, wanted 1: such drafters are not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True, wanted False"),
        ({"attention_bias": True}, "attention_bias=True, wanted False"),
        ({"norm_before_fc": True}, "norm_before_fc=True, wanted False"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc=True, wanted False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False, wanted True"),
        ({"target_hidden_size": 96}, "target_hidden_size=96, wanted hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}, wanted None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', wanted 'silu'"),
        ({"eagle_config": "x"}, "eagle_config='x', wanted an object"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, r".*layer_ids=\['a'\], wanted a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}}, ".*layer_ids=5, wanted a list"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads='x', wanted an integer of 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, wanted an integer of 1 or more"),
        ({"head_dim": -3}, "head_dim=-3, wanted an integer of 1 or more"),
        ({"draft_vocab_size": True}, "draft_vocab_size=True, wanted an integer of 1 or more"),
        ({"rope_parameters": "x"}, "rope_parameters='x', wanted an object"),
        ({"rope_theta": "x"}, "rope_theta='x', wanted a number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x', wanted a number"),
    ],
)  # fmt: skip
def test_config_that_is_served_differently_is_refused(change: dict[str, Any], message: str) -> None:
    stored = to_serving_config(drafter_config(), TARGET, torch.bfloat16) | change
    with pytest.raises(UserError, match=rf"(?s)one that SGLang serves with this target, got \(HERE\):.*- {message}"):
        from_serving_config(stored, TARGET, "HERE")


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError) as error:
        from_serving_config({"attention_bias": True, "draft_vocab_size": None}, TARGET, "HERE")
    for key in ("architectures=None", "hidden_size=None", "num_hidden_layers=None", "max_position_embeddings=None",
                "attention_bias=True", "draft_vocab_size=None"):  # fmt: skip
        assert f"- {key}" in str(error.value)


def test_number_of_states_must_be_the_number_of_ids() -> None:
    stored = to_serving_config(drafter_config(), TARGET, torch.bfloat16) | {"num_aux_hidden_states": 4}
    with pytest.raises(UserError, match=r"capture_layers must be 4 boundaries \(num_aux\), got \[3, 6, 9\]"):
        from_serving_config(stored, TARGET, "HERE")


def test_target_must_say_its_class() -> None:
    with pytest.raises(UserError, match=r"must name one architecture, got \[\]; layer ids depend on it"):
        to_serving_config(drafter_config(), TARGET | {"architectures": []}, torch.bfloat16)
