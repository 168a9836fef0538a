"""Drafters as other trainers write them, and what can be wrong with one: how it is broken, and what the doctor says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import write_tokenizer
from safetensors.torch import load_file, save_file
from target_stores import LAYERS
from torch import Tensor

IDS = [boundary - 1 for boundary in LAYERS]  # what SGLang's Llama makes LAYERS of


def write_as_others_do(source: Path, directory: Path, **changes: Any) -> Path:
    """Writes a drafter's weights as another trainer would: its own names, a short config, no record of ours, no t2d."""
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    directory.mkdir()
    kept = ["architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    kept += ["head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"]
    short = {key: config[key] for key in kept} | {"model_type": "llama", "num_hidden_layers": 1}
    short |= {"tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS}}
    (directory / "config.json").write_text(json.dumps(short | changes))
    others = {name.replace("midlayer", "layers.0"): tensor for name, tensor in weights.items() if name != "t2d"}
    others.setdefault("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))  # we leave a plain one out
    save_file(others, directory / "model.safetensors")
    return directory


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def wrong_names(directory: Path) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("layers.0")]:
            weights["draft_decoder." + name.removeprefix("layers.0.")] = weights.pop(name)

    change_weights(directory, rename)


def absolute_d2t(directory: Path) -> None:
    """The last 200 tokens of 320, as tokens and not as offsets."""

    def store_tokens(weights: dict[str, Tensor]) -> None:
        weights["d2t"] = torch.arange(120, 320)
        weights["lm_head.weight"] = weights["lm_head.weight"][120:].clone()

    change_weights(directory, store_tokens)
    change_config(directory, draft_vocab_size=200)


def eagle_1(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "norm" not in name and "head" not in name}
    kept["fc.weight"] = kept["fc.weight"][:, :128].clone()
    kept.pop("d2t")
    save_file(kept, directory / "model.safetensors")
    change_config(directory, architectures=["LlamaForCausalLMEagle"], eagle_config=None)


def random_head(directory: Path) -> None:
    def forget(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = torch.nn.Linear(64, 320).weight.detach().clone()

    change_weights(directory, forget)


def overflow(directory: Path) -> None:
    def to_fp16(weights: dict[str, Tensor]) -> None:
        weights["norm.weight"] = (weights["norm.weight"] * 1e5).half()

    change_weights(directory, to_fp16)
    change_config(directory, torch_dtype="float16")


def missing_norm(directory: Path) -> None:
    def forget(weights: dict[str, Tensor]) -> None:
        del weights["norm.weight"]

    change_weights(directory, forget)


def other_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def other_tokenizer(directory: Path) -> None:
    write_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer))


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def git_lfs_pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensor-names": (wrong_names, "layers have names that SGLang does not know|tensors have names"),
    "d2t-absolute": (absolute_d2t, "d2t holds target tokens"),
    "eagle-not-eagle3": (eagle_1, r"EAGLE-1 or EAGLE-2 drafter \(fc.weight \(64, 128\)\)"),
    "random-head": (random_head, "lm_head.weight is independent random numbers"),
    "fp16-overflow": (overflow, "norm.weight has values beyond 65504"),
    "missing-tensors": (missing_norm, "norm.weight is not in the file"),
    "template": (other_template, "the chat template beside the drafter is not the target's"),
    "other-tokenizer": (other_tokenizer, "its tokenizer.json has tokens that are not the target's, 2 of 300, "),
    "truncated-file": (truncated, "bytes long and its header promises"),
    "git-lfs-pointer": (git_lfs_pointer, "is a Git LFS pointer"),
    "context-length": (
        lambda directory: change_config(directory, max_position_embeddings=256),
        "max_position_embeddings is 256 and the target's 512",
    ),
    "layer-ids": (
        lambda directory: change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)}),
        r"capture the boundaries \[3, 5, 6\], all shifted by \+1, and on a store of other boundaries .*: \[2, 4, 5\]",
    ),
    "rope": (
        lambda directory: change_config(directory, rope_theta=1.5),
        r"RoPE is .*1\.5.* first drafts are right .* with the target's and .* with its own",
    ),
    "other-target": (
        lambda directory: change_config(directory, vocab_size=321),
        "vocab_size is 321 and the target's 320: another target's drafter",
    ),
    "architecture": (
        lambda directory: change_config(directory, architectures=["LlamaForCausalLM"]),
        r"architectures is \['LlamaForCausalLM'\], from which SGLang builds another model",
    ),
    "shapes": (
        lambda directory: change_config(directory, head_dim=16),
        r"q_proj.weight is \(96, 128\) where config.json makes it \(64, 128\)",
    ),
    "draft-vocab-size": (
        lambda directory: change_config(directory, draft_vocab_size=None),
        "draft_vocab_size is null: SGLang serves the target's own head",
    ),
    "rope-schemas": (
        lambda directory: change_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        "rope_theta=10000.0 and rope_parameters.rope_theta=5.0",
    ),
    "no-config": (lambda directory: (directory / "config.json").unlink(), "there is no config.json"),
    "no-weights": (lambda directory: (directory / "model.safetensors").unlink(), "model.safetensors, or shards"),
}


# What our own exporter has written and somebody has changed, or what was trained on something else.
EXPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "layer-ids": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        r"boundaries \[3, 5, 6\], all shifted by \+1, and it was trained on \[2, 4, 5\]",
    ),
    "other-tokenizer": (
        {"eagle3": {"capture_layers": list(LAYERS), "tokenizer_digest": "abc"}},
        "trained with the tokenizer abc, and the target's is ",
    ),
    "template": (
        {"eagle3": {"capture_layers": list(LAYERS), "chat_template_digest": "abc"}},
        "the drafter was trained with another chat template than",
    ),
    "config-sizes": ({"intermediate_size": None}, "config.json has no intermediate_size"),
    "not-loadable": ({"hidden_act": "gelu"}, "hidden_act='gelu', wanted 'silu'"),
}
