"""The drafter's config.json, as SGLang and vLLM read it.

SGLang's layer ids in it are not boundaries: the target's class turns them into boundaries, and not all classes alike.
vLLM's are, for every class, so each engine has a list of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eagle3.config import UserError
from eagle3.draft.model import DrafterConfig
from eagle3.draft.target_weights import check_capture_layers, default_capture_layers, rms_norm_eps, rope_parameters

ARCHITECTURE = "LlamaForCausalLMEagle3"
RECORD_KEY = "eagle3"  # of config.json: what the drafter was trained on
# Within eagle_config it is SGLang's. Beside it it is vLLM's, which takes boundaries (0.11.2 to 0.33.0): without it, its
# older runner takes SGLang's list for boundaries, and its newer one falls back on default layers.
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"

# SGLang's `set_eagle3_layers_to_capture` of these takes ids as boundaries, but adds 1 to each if the first is 1; every
# other class always adds 1. Source: SGLang 0.5.23, srt/models/deepseek_v2.py and its subclasses, glm4_moe_lite.py,
# kimi_k25.py. Up to 0.5.12.post1 these classes always added 1, too.
IDS_ARE_BOUNDARIES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)

# Switches of others' drafters that change the computation: the value that this drafter has, in a form to print.
PLAIN_SWITCHES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_fc": False,
    "rope_is_neox_style": True,
    "hidden_act": "silu",
    "quantization_config": None,
}

NEEDED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
A_SIZE = "an integer of 1 or more"
# Wherever they stand: when they are right, in code and in words. RoPE divides by the logarithm of its base.
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rms_norm_eps": (lambda value: 0 <= value < 1, "a number from 0 to below 1"),
    "rope_theta": (lambda value: value > 1, "a number above 1"),
}
LARGEST_NUMBER = 1e30  # whatever is above it, nan among it, is none of these


def served_layer_ids(capture_layers: Sequence[int], architecture: str) -> list[int]:
    """Returns the ids from which SGLang's class of the target makes these boundaries.

    Raises:
        UserError: the class cannot be made to capture them.
    """
    if architecture not in IDS_ARE_BOUNDARIES:
        return [boundary - 1 for boundary in capture_layers]  # the class adds 1 to each
    if capture_layers[0] == 1:
        raise UserError(
            f"capture_layers must not start with boundary 1 for a target of class {architecture}, got "
            f"{list(capture_layers)}: SGLang adds 1 to every id of such a list, and no list gives this one; "
            f"capture other layers and train on those"
        )
    return list(capture_layers)


def served_boundaries(layer_ids: Sequence[int] | None, architecture: str, num_layers: int) -> list[int]:
    """Returns the boundaries that SGLang's class of the target captures for a drafter's ids; None: its own default.

    Raises:
        UserError: they are none of the target's.
    """
    if layer_ids is None:
        boundaries = default_capture_layers(num_layers)
    elif architecture in IDS_ARE_BOUNDARIES and list(layer_ids[:1]) != [1]:
        boundaries = list(layer_ids)
    else:
        boundaries = [layer_id + 1 for layer_id in layer_ids]
    check_capture_layers(boundaries, num_layers)
    return boundaries


def target_architecture(target_config: dict[str, Any]) -> str:
    """Returns the name of the target's class.

    Raises:
        UserError: its config names none, or several.
    """
    architectures = target_config["architectures"]
    if len(architectures) != 1:
        raise UserError(
            f"the target's config.json must name one architecture, got {architectures}; layer ids depend on it"
        )
    return str(architectures[0])


def to_serving_config(config: DrafterConfig, target_config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the content of config.json for a drafter whose weights are stored in `dtype`."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    token_ids: dict[str, Any] = {
        key: target_config[key] for key in ("bos_token_id", "eos_token_id") if key in target_config
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Both schemas: transformers 5 reads the last one, transformers 4 the first two.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "num_aux_hidden_states": config.num_aux,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            LAYER_IDS_KEY: served_layer_ids(config.capture_layers, target_architecture(target_config)),
            "use_aux_hidden_state": True,
        },
        LAYER_IDS_KEY: list(config.capture_layers),
        **token_ids,
    }


def from_serving_config(stored: dict[str, Any], target_config: dict[str, Any], where: str) -> DrafterConfig:
    """Returns the drafter that SGLang would build from a config.json beside this target.

    Raises:
        UserError: it is no such drafter, or one of another target; all reasons at once.
    """
    problems = _config_problems(stored, target_config)
    if problems:
        heading = f"a drafter's config.json must be one that SGLang serves with this target, got ({where}):"
        raise UserError("\n".join([heading, *problems]))
    eagle_config = stored.get("eagle_config") or {}
    layer_ids = eagle_config.get(LAYER_IDS_KEY)
    boundaries = served_boundaries(layer_ids, target_architecture(target_config), target_config["num_hidden_layers"])
    num_heads = stored["num_attention_heads"]
    return DrafterConfig(
        hidden_size=stored["hidden_size"],
        intermediate_size=stored["intermediate_size"],
        num_attention_heads=num_heads,
        num_key_value_heads=stored.get("num_key_value_heads") or num_heads,
        head_dim=stored.get("head_dim") or stored["hidden_size"] // num_heads,  # LlamaConfig's default
        vocab_size=stored["vocab_size"],
        draft_vocab_size=stored["draft_vocab_size"],
        capture_layers=tuple(boundaries),
        rms_norm_eps=rms_norm_eps(stored),
        max_position_embeddings=stored["max_position_embeddings"],
        rope_parameters=rope_parameters(stored),
        num_aux=stored.get("num_aux_hidden_states") or len(boundaries),
        fc_norm=bool(stored.get("fc_norm") or stored.get("use_aux_norm")),
        norm_output=bool(stored.get("norm_output")),
    )


def _config_problems(stored: dict[str, Any], target_config: dict[str, Any]) -> list[str]:
    problems = []
    if stored.get("architectures") != [ARCHITECTURE]:
        problems.append(
            f"- architectures={stored.get('architectures')!r}, wanted {[ARCHITECTURE]!r}: SGLang builds another model"
        )
    # What LlamaConfig would put in their place is no drafter: 32 layers, 2,048 positions.
    for key in NEEDED_SIZES:
        if stored.get(key) is None:
            problems.append(f"- {key}={stored.get(key)!r}, wanted {A_SIZE}")
    problems += wrong_kinds(stored)
    if "draft_vocab_size" in stored and stored["draft_vocab_size"] is None:
        problems.append(
            "- draft_vocab_size=None: SGLang then serves the target's own head; put that head into the file as "
            "lm_head.weight and its number of rows here"
        )
    elif "draft_vocab_size" not in stored:
        problems.append(f"- draft_vocab_size=None, wanted {A_SIZE}")
    eagle_config = stored["eagle_config"] if isinstance(stored.get("eagle_config"), dict) else {}
    for key, plain in PLAIN_SWITCHES.items():
        value = eagle_config.get(key, stored.get(key, plain))
        if value != plain:
            problems.append(f"- {key}={value!r}, wanted {plain!r}: such drafters are not supported")
    if not eagle_config.get("use_aux_hidden_state", True):
        problems.append("- use_aux_hidden_state=False, wanted True: an EAGLE-1 or EAGLE-2 drafter")
    for key in ("hidden_size", "vocab_size"):
        if isinstance(stored.get(key), int) and stored[key] != target_config[key]:
            problems.append(
                f"- {key}={stored[key]}, wanted the target's {target_config[key]}: another target's drafter"
            )
    if stored.get("target_hidden_size", stored.get("hidden_size")) != stored.get("hidden_size"):
        problems.append(f"- target_hidden_size={stored['target_hidden_size']}, wanted hidden_size: not supported")
    return problems


def wrong_kinds(stored: Mapping[str, Any]) -> list[str]:
    """Returns the values of a config.json that are of another kind than engines read; what is left out has no kind."""
    problems = [
        f"- {key}={_short(stored[key])}, wanted {A_SIZE}"
        for key in (*NEEDED_SIZES, "draft_vocab_size", "num_key_value_heads", "head_dim", "num_aux_hidden_states")
        if stored.get(key) is not None and not _is_size(stored[key])
    ]
    objects: dict[str, Mapping[str, Any]] = {"": stored}
    for key in ("eagle_config", "rope_scaling", "rope_parameters", RECORD_KEY):
        value = stored.get(key)
        if isinstance(value, Mapping):
            objects[f"{key}."] = value
        elif value is not None:
            problems.append(f"- {key}={_short(value)}, wanted an object")
    for where, values in objects.items():
        for key, (is_right, wanted) in NUMBERS.items():
            if key in values and not (_is_number(values[key]) and is_right(values[key])):
                problems.append(f"- {where}{key}={_short(values[key])}, wanted {wanted}")
        for key in (LAYER_IDS_KEY, "capture_layers"):
            if values.get(key) is not None and not _are_ids(values[key]):
                problems.append(f"- {where}{key}={_short(values[key])}, wanted a list of integers")
    return problems


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST_NUMBER


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
