"""The target in this process says when it cannot be decoded here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.config import TargetConfig, UserError
from eagle3.evaluation.target import LocalTarget, attention_window, load_local_target
from eagle3.prompts.tokenizers import load_tokenizer


def test_a_window_that_a_sequence_outgrows_is_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    model.config.layer_types = ["sliding_attention", "full_attention"] * 4
    model.config.sliding_window = 64
    target = LocalTarget(model, (2, 4, 5), frozenset())
    target.start(1, 64)
    with pytest.raises(UserError, match=r"attention window of 64 tokens .* got 65; lower max_new_tokens"):
        target.start(1, 65)


@pytest.mark.parametrize(
    ("text_config", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, 128),
    ],
)
def test_window_of_a_config(text_config: dict[str, object], window: int | None) -> None:
    assert attention_window(text_config) == window


def test_layers_without_one_key_per_token_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"attend to all earlier tokens .* got \['linear_attention'\]; serve the target"
    ):
        attention_window({"layer_types": ["full_attention", "linear_attention"]})


def test_loading_names_the_directory_that_fails(tmp_path: Path, tiny_target: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target), trust_remote_code=False)
    with pytest.raises(UserError, match=f"target.path must be a model that transformers loads, got '{tmp_path}'"):
        load_local_target(TargetConfig(str(tmp_path)), (2, 4, 5), tokenizer)


def test_an_answer_ends_with_any_of_the_end_tokens(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target), trust_remote_code=False)
    tokenizer.eos_token = "<|endoftext|>"
    config = TargetConfig(str(tiny_target), dtype="float32", device="cpu")
    target = load_local_target(config, (2, 4, 5), tokenizer)
    assert target.end_ids == {0, 2}
    assert target.dtype == torch.float32


def test_a_target_that_lacks_weights_is_refused(make_target: Callable[..., Path], tmp_path: Path) -> None:
    path = make_target(tmp_path / "target") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 9}))
    tokenizer = load_tokenizer(str(tmp_path / "target"), False)
    with pytest.raises(UserError, match=r"must hold every weight .* got none for model.layers.8.* and \d more"):
        load_local_target(TargetConfig(str(tmp_path / "target")), [2, 4, 5], tokenizer)
    (tmp_path / "target" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"must be a model that transformers loads, got '.*target' \(.*header"):
        load_local_target(TargetConfig(str(tmp_path / "target")), [2, 4, 5], tokenizer)


def test_a_gpu_that_is_not_there_is_named(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tokenizer = load_tokenizer(str(tiny_target), False)
    with pytest.raises(UserError, match=r"target\.device must be a device of this machine, got 'cuda' without a GPU"):
        load_local_target(TargetConfig(str(tiny_target), device="cuda"), [2, 4, 5], tokenizer)
