"""A real SGLang server on the CPU for tests, and a target whose boundaries can be read off its states."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, TINY_CONFIG, tiny_weights, write_tokenizer, write_weights

from eagle3.config import ServerConfig

CHUNK = 128  # tokens of one prefill forward
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",  # so that states are transformers' up to summation order
    "cuda-graph-backend-decode": "disabled",
    "mem-fraction-static": 0.3,
    "max-total-tokens": 8192,
    "chunked-prefill-size": CHUNK,
    "enable-mixed-chunk": True,
    "disable-radix-cache": False,  # on, the harder case
}
ENV = {"SGLANG_USE_CPU_ENGINE": 1, "OMP_NUM_THREADS": 1, "TORCHDYNAMO_DISABLE": 1, "HF_HUB_OFFLINE": 1}
COUNTING_CHANNEL = 5


def server_config(log_directory: Path, **changes: Any) -> ServerConfig:
    """Returns settings of a server on the CPU; skips the test where no serving environment was built."""
    python = Path(os.environ.get("SGLANG_PYTHON", REPOSITORY / ".venv-sglang" / "bin" / "python"))
    if not python.exists():
        pytest.skip("no serving environment; build one: python tests/sglang_cpu/build.py .venv-sglang")
    log = log_directory / "sglang.log"
    flags = {**FLAGS, **changes.pop("flags", {})}
    return ServerConfig(
        python=str(python), log=str(log), flags=flags, env=ENV, startup_timeout_seconds=900, max_requests=16, **changes
    )


def write_counting_target(directory: Path) -> Path:
    """Writes a tiny Llama whose layer k does nothing but add 2**k to one channel, in which no embedding has a part.

    So that channel is 2**k - 1 in the stream that enters layer k, exactly, whatever the tokens are.
    """
    config = {**TINY_CONFIG, "attention_bias": True}
    weights = tiny_weights(config, seed=0)
    weights["model.embed_tokens.weight"][:, COUNTING_CHANNEL] = 0
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, num_heads in heads.items():
            weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(num_heads * head_dim)
        weights[f"{prefix}self_attn.o_proj.weight"].zero_()
        weights[f"{prefix}self_attn.o_proj.bias"] = torch.zeros(hidden)
        weights[f"{prefix}self_attn.o_proj.bias"][COUNTING_CHANNEL] = 2.0**layer
        weights[f"{prefix}mlp.down_proj.weight"].zero_()
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_weights(directory, weights, num_shards=1)
    write_tokenizer(directory)
    return directory


def wait_for_file(path: Path) -> Path:
    """Returns `path` once it is there; a writer on another thread has ten seconds."""
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.002)
    return path
