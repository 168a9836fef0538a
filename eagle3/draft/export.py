"""The files that SGLang and vLLM load.

SGLang skips tensors that it does not know and leaves random what it does not find, without a word (vLLM, too, leaves
random what it does not find): so the names are compared with a literal list, in both directions.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.serving_config import (
    IDS_ARE_BOUNDARIES,
    RECORD_KEY,
    from_serving_config,
    served_layer_ids,
    target_architecture,
    to_serving_config,
)
from eagle3.draft.target_weights import open_tensors, tensor_files
from eagle3.features.record import all_finite
from eagle3.files import sync, system_errors

logger = logging.getLogger(__name__)

WEIGHT_NAMES = (
    "fc.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
)
TRAINED_ON = ("target_config_digest", "target_revision", "tokenizer_digest", "chat_template_digest")  # of a store
FILE_NAMES = ("config.json", "model.safetensors", "README.md")

# What others' files may hold besides: the embedding, which SGLang replaces by the target's, and RoPE's table.
IGNORED_NAMES = frozenset({"embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq"})
# Other spellings that SGLang accepts (0.5.23, srt/models/llama_eagle3.py); replaced in this order.
OTHER_SPELLINGS = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def tensor_names(config: DrafterConfig) -> list[str]:
    """Returns the names in model.safetensors, all of them; a drafter of the whole vocabulary needs no maps."""
    fc_norms = [f"fc_norm.{index}.weight" for index in range(config.num_aux)] if config.fc_norm else []
    return [*WEIGHT_NAMES, *fc_norms, "d2t", "t2d"]


def export_drafter(
    drafter: Eagle3Drafter,
    directory: Path,
    *,
    target_config: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.bfloat16,
    trained_on: Mapping[str, str] | None = None,
) -> None:
    """Writes config.json, model.safetensors and README.md; whoever reads the directory sees all of them or none.

    `trained_on` are the digests of the features' target, tokenizer and template: with the boundaries they stand in
    config.json under RECORD_KEY, which engines ignore, so that a server or a doctor can compare them with its own.
    `target_config` is what `load_target_config` returns. `card` is Markdown with its title: data, recipe, and tau with
    its setting; a section about serving is put behind it. An earlier export in the same place is replaced.

    Raises:
        UserError: the directory holds something else, or the target's class cannot capture the layers.
    """
    serving_config = to_serving_config(drafter.config, target_config, dtype)
    serving_config[RECORD_KEY] = {"capture_layers": list(drafter.config.capture_layers), **(trained_on or {})}
    state = drafter.state_dict()
    assert set(state) == set(tensor_names(drafter.config)), (sorted(state), tensor_names(drafter.config))
    tensors = {
        name: (state[name].to(dtype) if state[name].is_floating_point() else state[name]).cpu().contiguous()
        for name in tensor_names(drafter.config)
    }
    if drafter.config.draft_vocab_size == drafter.config.vocab_size and not bool(state["d2t"].any()):
        # Each draft token is itself: vLLM has no parameter for such a map then, and refuses the file (0.32.0).
        del tensors["d2t"], tensors["t2d"]
    if directory.exists() and (strangers := sorted({file.name for file in directory.iterdir()} - set(FILE_NAMES))):
        raise UserError(
            f"a drafter's directory must hold nothing but {', '.join(FILE_NAMES)}, got {strangers} ({directory}); "
            f"export to another directory"
        )
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(serving_config, indent=2) + "\n", encoding="utf-8")
    (partial / "README.md").write_text(card + _serving_section(drafter.config, target_config), encoding="utf-8")
    with system_errors(partial / "model.safetensors"):
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    for name in FILE_NAMES:
        sync(partial / name)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced)
    else:
        partial.rename(directory)
    sync(directory.parent)


def load_drafter(directory: Path, target_config: dict[str, Any]) -> Eagle3Drafter:
    """Loads a drafter in SGLang's format, ours or another's, in fp32 on the CPU.

    `target_config` is what `load_target_config` returns: layer ids mean nothing without the target's class.

    Raises:
        UserError: SGLang would not serve it as it is meant: a wrong config, or tensors that are missing, unknown or
            misshapen (all at once).
    """
    config_path = directory / "config.json"
    try:
        stored = json.loads(config_path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(
            f"a drafter must be a directory with config.json and model.safetensors, got {str(directory)!r} without "
            f"a config.json; give the directory that training exported, RUN/drafter"
        ) from None
    except ValueError as error:
        raise UserError(f"config.json must be JSON, got {error} ({config_path}); export the drafter again") from None
    if not isinstance(stored, dict):
        raise UserError(
            f"config.json must be an object, got a {type(stored).__name__} ({config_path}); export it again"
        )
    config = from_serving_config(stored, target_config, str(config_path))
    if config.max_position_embeddings < target_config["max_position_embeddings"]:
        logger.warning(
            "the drafter's max_position_embeddings is %d and the target's %d: SGLang's acceptance collapses beyond the "
            "former (%s)",
            config.max_position_embeddings, target_config["max_position_embeddings"], config_path,
        )  # fmt: skip
    with torch.device("meta"):  # sizes that no file has would take memory that no machine has
        expected = {name: tuple(tensor.shape) for name, tensor in Eagle3Drafter(config).state_dict().items()}
    tensors = _checked_tensors(_read_tensors(directory), config, expected, directory)
    drafter = Eagle3Drafter(config)
    drafter.load_state_dict(tensors)
    return drafter


def our_spelling(stored_name: str) -> str:
    """Returns our name of a tensor that SGLang reads under another one as well."""
    name = stored_name.removeprefix("model.")
    for other, ours in OTHER_SPELLINGS.items():
        if name.startswith(other):
            name = ours + name.removeprefix(other)
    return name


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """Reads all tensors under our spelling of their names; what is ignored is counted in a log line."""
    tensors: dict[str, Tensor] = {}
    ignored, doubled = [], []
    for stored_name, file in tensor_files(directory).items():
        name = our_spelling(stored_name)
        if name in IGNORED_NAMES:
            ignored.append(stored_name)
            continue
        if name in tensors:
            doubled.append(stored_name)
        with open_tensors(file) as stored:
            tensors[name] = stored.get_tensor(stored_name)
    if doubled:
        raise UserError(f"each tensor must be stored once, got another spelling of {doubled} ({directory})")
    if ignored:
        logger.info("tensors of the drafter that SGLang replaces are not used, %d in all: %s", len(ignored), ignored)
    return tensors


def _checked_tensors(
    tensors: dict[str, Tensor], config: DrafterConfig, expected: dict[str, tuple[int, ...]], directory: Path
) -> dict[str, Tensor]:
    """Returns the tensors with d2t and t2d where those may be left out, once names, shapes and maps are right."""
    if config.draft_vocab_size == config.vocab_size:
        tensors = {"d2t": torch.zeros(config.vocab_size, dtype=torch.int64)} | tensors
    problems = [f"- missing: {name} {expected[name]}" for name in sorted(expected.keys() - tensors.keys() - {"t2d"})]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"- unknown: {name} {tuple(tensor.shape)}")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"- misshapen: {name} {tuple(tensor.shape)}, wanted {expected[name]}")
        elif name not in ("d2t", "t2d") and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            problems.append(f"- quantised: {name} in {tensor.dtype}, wanted float32, bfloat16 or float16")
        elif tensor.is_floating_point() and not all_finite(tensor):
            problems.append(f"- not finite: {name}, wanted numbers alone")
    if not problems:
        tensors, problems = _with_checked_maps(tensors, config)
    if problems:
        heading = f"a drafter's tensors must be those that SGLang loads for its config.json, got ({directory}):"
        raise UserError("\n".join([heading, *problems]))
    return tensors


def _with_checked_maps(tensors: dict[str, Tensor], config: DrafterConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors with t2d made from d2t, and what is wrong with the two."""
    target_ids = tensors["d2t"].long() + torch.arange(config.draft_vocab_size)  # (W,)
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= config.vocab_size:
        return tensors, [
            f"- d2t: target tokens {low}..{high}, wanted 0..{config.vocab_size - 1}; it must hold offsets "
            f"(target token - draft token), perhaps it holds target tokens"
        ]
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    if int(t2d.sum()) != config.draft_vocab_size:
        return tensors, ["- d2t: several draft tokens for one target token; it must hold offsets"]
    if not torch.equal(tensors.get("t2d", t2d).bool(), t2d):
        return tensors, ["- t2d: other target tokens than d2t's; d2t must hold offsets (target token - draft token)"]
    return tensors | {"t2d": t2d}, []


def _serving_section(config: DrafterConfig, target_config: dict[str, Any]) -> str:
    architecture = target_architecture(target_config)
    layer_ids = served_layer_ids(config.capture_layers, architecture)
    version = "3.1" if config.fc_norm or config.norm_output else "3"
    older = (
        f"\nSGLang up to 0.5.12.post1 adds 1 to them for this class: write {[i - 1 for i in layer_ids]} there."
        if architecture in IDS_ARE_BOUNDARIES
        else ""
    )
    vllms = "0.32.0 and newer" if version == "3.1" else "0.11.2, 0.32.0 and newer"
    return f"""
## Serving

EAGLE-{version}, for a target of class {architecture} with hidden size {config.hidden_size} and
{config.vocab_size} tokens, of which {config.draft_vocab_size} can be drafted.
It reads the states that enter the target's layers {list(config.capture_layers)} (counted from 0);
`eagle_aux_hidden_state_layer_ids` in config.json, {layer_ids}, makes SGLang capture these for this class.{older}

```bash
python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps 3 --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens 4
```

With `EAGLE` in place of `EAGLE3` nothing is ever accepted, and no error says so.

vLLM ({vllms}) reads the list beside `eagle_config`, {list(config.capture_layers)}, and takes it as it is:

```bash
vllm serve TARGET \\
  --speculative-config '{{"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": 3}}'
```

Without `"method": "eagle3"` it guesses the kind of drafter from the directory's name.
"""
