"""The target's embedding, norm and head, without loading the target.

Three tensors are read from the safetensors shards, found by the end of their names, so that a target of 1 T
parameters costs a few gigabytes. `capture_layers` are boundaries: k is the residual stream that enters layer k.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.config import UserError

# Whatever wraps the language model; layers (DeepSeek's MTP layer among them) and other towers do not match.
TENSOR_NAMES = {
    "model.embed_tokens.weight": re.compile(r"(.+\.)?(model|language_model)\.embed_tokens\.weight"),
    "model.norm.weight": re.compile(r"(.+\.)?(model|language_model)\.norm\.weight"),
    "lm_head.weight": re.compile(r"((model|language_model)\.)*lm_head\.weight"),
}

# With one of these the target's logits are not lm_head(last), which every loss and metric here takes them to be.
LOGIT_TRANSFORMS = {
    "final_logit_softcapping": 0,  # the value that changes nothing
    "logit_scale": 1,
    "logits_scaling": 1,
    "lm_head_multiplier": 1,
}

# Their RMSNorm multiplies by 1 + weight (transformers 5.17, the modeling file of each); the drafter's by weight.
ZERO_CENTRED_NORM_TYPES = frozenset(
    {"gemma", "gemma2", "gemma3_text", "minimax_m3_vl_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
)

# A wrapper's text_config inherits these from the wrapper where it does not say them itself.
INHERITED_KEYS = ("tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "quantization_config")

LOGITS_PER_CHUNK = 2**24  # 64 MiB in fp32, little beside a target's head


@dataclass(frozen=True)
class TargetWeights:
    """What the drafter and its losses need of the target, frozen."""

    embed_tokens: Tensor  # (V, D)
    lm_head: Tensor  # (V, D), the embedding itself where the target ties them; or the drafted rows alone, (W, D)
    norm: Tensor  # (D,) the final norm's scale: normed * scale
    rms_norm_eps: float

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TargetWeights":
        """Returns the weights on a device in a dtype; tied ones stay one tensor."""
        embed_tokens = self.embed_tokens.to(device, dtype)
        lm_head = embed_tokens if self.lm_head is self.embed_tokens else self.lm_head.to(device, dtype)
        return TargetWeights(embed_tokens, lm_head, self.norm.to(device, dtype), self.rms_norm_eps)

    def drafted(self, token_ids: Tensor) -> "TargetWeights":  # (W,), ascending
        """Returns the weights with the head's rows of the drafted tokens alone: no copy, where it has no others."""
        if token_ids.numel() == self.lm_head.shape[0]:
            return self
        return replace(self, lm_head=self.lm_head[token_ids.to(self.lm_head.device)])


def default_capture_layers(num_layers: int) -> list[int]:
    """Returns [2, L//2, L-3], what SGLang captures for a drafter that names no layers.

    Raises:
        UserError: the target has too few layers for them to increase.

    Source: EAGLE, eagle/model/modeling_llama_kv.py.
    """
    layers = [2, num_layers // 2, num_layers - 3]
    if num_layers < 7:
        raise UserError(
            f"target.capture_layers must be given for a target of {num_layers} layers, got none and the default "
            f"{layers} does not increase; name boundaries within 0..{num_layers - 1}"
        )
    return layers


def check_capture_layers(layers: Sequence[int], num_layers: int) -> None:
    """Checks that boundaries can be captured from a target of `num_layers` layers.

    Raises:
        UserError: they do not strictly increase within 0..num_layers - 1, or there are none.
    """
    increasing = all(low < high for low, high in itertools.pairwise(layers))
    if not layers or not increasing or layers[0] < 0 or layers[-1] >= num_layers:
        note = f"; boundary {num_layers}, the last layer's output, cannot be captured" if num_layers in layers else ""
        raise UserError(
            f"target.capture_layers must strictly increase within 0..{num_layers - 1} (layers of the target that the "
            f"captured states enter), got {list(layers)}{note}; change the list"
        )


def load_target_config(path: Path) -> dict[str, Any]:
    """Returns the language model's part of a target's config.json, with the `architectures` of the whole.

    Raises:
        UserError: the file is missing, is no JSON object, is a drafter's, or lacks a size.
    """
    config_path = path / "config.json"
    try:
        whole = json.loads(config_path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(
            f"target.path must be a Hugging Face directory, got {str(path)!r} without a config.json; "
            f"download the model and give its directory"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"config.json must be JSON, got {error} ({config_path}); download it again") from None
    if not isinstance(whole, dict):
        raise UserError(f"config.json must be an object, got a {type(whole).__name__} ({config_path})")
    config = whole.get("text_config") or whole
    if not isinstance(config, dict):
        raise UserError(f"text_config must be an object, got {config!r} ({config_path}); download it again")
    config = dict(config)
    for key in INHERITED_KEYS:
        if key in whole:
            config.setdefault(key, whole[key])
    # Layer ids are counted by the class that serves, and the outermost name decides which class that is.
    config["architectures"] = whole.get("architectures") or config.get("architectures") or []
    if "ForCausalLMEagle" in str(config["architectures"]):  # as EAGLE's drafters are called
        raise UserError(
            f"target.path must be a target's directory, got a drafter's ({config_path} has the architectures "
            f"{config['architectures']}); give the model that it drafts for"
        )
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    missing = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise UserError(
            f"config.json must hold {', '.join(needed)} as integers of 1 or more, got none for {', '.join(missing)} "
            f"({config_path}, or its text_config); the target must be a decoder-only language model"
        )
    return config


def load_target_weights(path: Path) -> TargetWeights:
    """Reads embedding, head and final norm of the target in a directory, in their stored dtype, on the CPU.

    Raises:
        UserError: a tensor is missing, found twice, misshapen or quantised, or the target's logits are not
            `lm_head(last)`.
    """
    config = load_target_config(path)
    files = tensor_files(path)
    _check_plain_head(config, files, path)
    head_shape = (config["vocab_size"], config["hidden_size"])
    embed_tokens = _read(files, "model.embed_tokens.weight", head_shape, path)
    norm = _read(files, "model.norm.weight", head_shape[1:], path)
    if config.get("model_type") in ZERO_CENTRED_NORM_TYPES:
        norm = 1 + norm
    # transformers' default where the config does not say: tied, if there is no head.
    has_head = any(TENSOR_NAMES["lm_head.weight"].fullmatch(name) for name in files)
    tied = config.get("tie_word_embeddings", not has_head)
    lm_head = embed_tokens if tied else _read(files, "lm_head.weight", head_shape, path)
    return TargetWeights(embed_tokens, lm_head, norm, rms_norm_eps(config))


def rms_norm_eps(config: dict[str, Any]) -> float:
    """Returns the norms' epsilon of a model's config; 1e-6 is transformers' default."""
    return float(config.get("rms_norm_eps", 1e-6))


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Returns RoPE's settings in transformers 5's schema, from a model's config in either schema.

    A fresh dict with at least `rope_type` and `rope_theta`; of settings by layer type, those of full attention.

    Source: transformers 5.17, modeling_rope_utils.py, `standardize_rope_params`.
    """
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    parameters = dict(stored.get("full_attention", stored))
    rope_type = parameters.pop("type", "default")  # the older name
    parameters.setdefault("rope_type", rope_type)
    theta = config.get("rope_theta")
    parameters.setdefault("rope_theta", 10000.0 if theta is None else theta)
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return parameters


@torch.no_grad()
def log_normaliser(target: TargetWeights, last: Tensor) -> Tensor:  # (N, D) -> (N,) fp32
    """Returns the log-sum-exp over V of the target's logits, for last hidden states after the final norm.

    Logits are made in the head's dtype, as the engine makes them, a few rows at a time, and summed in fp32.
    """
    num_rows = max(1, LOGITS_PER_CHUNK // target.lm_head.shape[0])
    chunks = [
        (rows.to(target.lm_head) @ target.lm_head.T).float().logsumexp(-1)  # (<= num_rows,)
        for rows in last.split(num_rows)
    ]
    return torch.cat(chunks)


def tensor_files(path: Path) -> dict[str, Path]:
    """Returns the file of every tensor of a model directory, by name.

    Raises:
        UserError: there are no safetensors, or their index cannot be read.
    """
    index_path, single_path = path / "model.safetensors.index.json", path / "model.safetensors"
    if index_path.exists():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            return {name: path / file_name for name, file_name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the weights' index must be JSON with a weight_map, got {error!r} ({index_path}); download it again"
            ) from None
    if single_path.exists():
        with open_tensors(single_path) as tensors:
            return dict.fromkeys(tensors.keys(), single_path)
    others = sorted(file.name for file in path.glob("*.bin"))
    raise UserError(
        f"a model's weights must be model.safetensors, or shards with {index_path.name}, "
        f"got {others or 'neither'} ({path}); save the model as safetensors"
    )


def open_tensors(file: Path) -> Any:
    """Opens a safetensors file, mapped: a context manager with `keys` and `get_tensor`.

    Raises:
        UserError: the file is missing or broken.
    """
    try:
        return safe_open(file, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"a weights file must be whole and readable, got {error} ({file}); download it again") from None


def _check_plain_head(config: dict[str, Any], files: dict[str, Path], path: Path) -> None:
    changes = [
        f"{key}={config[key]!r}" for key, plain in LOGIT_TRANSFORMS.items() if config.get(key) not in (None, plain)
    ]
    changes += [name for name in files if name.endswith("lm_head.bias")]
    if changes:
        raise UserError(
            f"the target's logits must be lm_head(last hidden state), got {', '.join(changes)} as well ({path}); "
            f"a drafter for this target cannot be trained here"
        )


def _read(files: dict[str, Path], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    found = [candidate for candidate in files if TENSOR_NAMES[name].fullmatch(candidate)]
    if len(found) != 1:
        raise UserError(
            f"the target's weights must hold one tensor named {name!r}, or that name under a wrapper such as "
            f"'language_model.', got {found or 'none'} among {len(files)} tensors ({path}); "
            f"a target with other names is not supported"
        )
    with open_tensors(files[found[0]]) as tensors:
        if found[0] not in tensors.keys():  # noqa: SIM118 - no dict: it cannot be asked with `in`
            raise UserError(f"{found[0]!r} must be in {files[found[0]]}, as the index says; download it again")
        tensor: Tensor = tensors.get_tensor(found[0])
    if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"{found[0]!r} must be {shape} in float32, bfloat16 or float16, "
            f"got {tuple(tensor.shape)} in {tensor.dtype} ({files[found[0]]}); a quantised head is not supported"
        )
    return tensor


def missing_weights(names: Iterable[str], path: str) -> str:
    """Says that a target lacks weights: transformers would make them up, and go on."""
    missing = sorted(names)
    return (
        f"target.path must hold every weight of the model that its config.json describes, got none for "
        f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} ({path!r}); "
        f"download it again"
    )
