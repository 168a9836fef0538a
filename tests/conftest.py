"""Fixtures that several test modules share: tiny random targets as Hugging Face directories, random samples.

The targets are written without transformers, so that a test which loads them with it compares two programs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from eagle3.features.record import FeatureSample, supervised_rows

# 256 byte tokens, three specials, merges up to 300: then a padded vocabulary, as real targets have.
TINY_VOCAB = 320
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,  # the fewest layers are 7 for which [2, L//2, L-3] increases
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not 64 / 4
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": TINY_VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
    "use_cache": True,
}
REPOSITORY = Path(__file__).resolve().parent.parent
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGE_TEXT = [
    "<|im_start|>system\nYou are a helpful assistant.",
    "<|im_start|>user\nWhat is the answer to the question? There are ten in the list, and the last one is this.",
    "<|im_start|>assistant\nThe answer is that there are ten of them.",
]


def pytest_configure() -> None:
    """Has Triton's kernels interpreted where there is no GPU; it reads this when it is imported. W&B stays off."""
    os.environ["WANDB_MODE"] = "disabled"  # a test of it says offline
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Returns random weights under transformers' names; logits have a spread of about 2, so greedy tokens are clear."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, scale=4.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = norm()
        weights[prefix + "self_attn.q_proj.weight"] = matrix(num_q, hidden)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(num_kv, hidden)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(num_kv, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, num_q)
        weights[prefix + "post_attention_layernorm.weight"] = norm()
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
    weights["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, scale=2.0)
    return weights


def write_weights(directory: Path, weights: dict[str, Tensor], num_shards: int) -> None:
    """Writes one model.safetensors, or shards with an index; shards are contiguous runs of names."""
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {
        name: f"model-{1 + i * num_shards // len(names):05d}-of-{num_shards:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file_name in sorted(set(weight_map.values())):
        shard = {name: weights[name] for name in names if weight_map[name] == file_name}
        save_file(shard, directory / file_name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level BPE tokenizer with ChatML specials (ids 0, 1, 2) and a chat template without system text."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(MERGE_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": TINY_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_tiny_target(directory: Path, *, seed: int = 0, num_shards: int = 1, **config_changes: Any) -> Path:
    """Writes a tiny random Llama in fp32 with its tokenizer; `config_changes` replace entries of TINY_CONFIG."""
    config = TINY_CONFIG | config_changes
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=1))
    write_weights(directory, tiny_weights(config, seed), num_shards)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Path]:
    """`make_target(directory, *, seed=0, num_shards=1, **config_changes) -> directory`."""
    return write_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 8 layers, D 64, V 320, 4 query and 2 key heads of 24, fp32, untied, one weights file."""
    return write_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tiny_target_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as `tiny_target`, in three shards with an index."""
    return write_tiny_target(tmp_path_factory.mktemp("target") / "tiny-sharded", num_shards=3)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in bf16: converted by the user's own command, once for all sessions of this checkout."""
    directory = REPOSITORY / "ckpts" / "models" / "SmolLM2-135M-Instruct"
    if not directory.is_dir():  # the command renames it into place when it is whole
        subprocess.run([sys.executable, REPOSITORY / "examples" / "smollm2.py", directory], check=True)
    return directory


def random_sample(
    sample_id: str,
    loss_mask: list[int],
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_aux: int = 3,
    vocab_size: int = TINY_VOCAB,
    all_rows: bool = False,
) -> FeatureSample:
    """Returns a sample with random ids and fp32 features and the given loss mask (0s and 1s, one per token)."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = len(loss_mask)
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    rows = torch.arange(num_tokens, dtype=torch.int32) if all_rows else supervised_rows(mask)
    return FeatureSample(
        sample_id=sample_id,
        input_ids=torch.randint(vocab_size, (num_tokens,), generator=generator, dtype=torch.int32),
        loss_mask=mask,
        aux_hidden_states=torch.randn(num_tokens, num_aux * hidden_size, generator=generator),
        last_hidden_states=torch.randn(rows.numel(), hidden_size, generator=generator),
        last_rows=rows,
    )


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., FeatureSample]:
    """`make_sample(sample_id, loss_mask, *, seed, hidden_size, num_aux, vocab_size, all_rows) -> FeatureSample`."""
    return random_sample
