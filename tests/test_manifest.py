"""A store's digests move with the target's contents and with nothing else; a damaged manifest is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_stores import HIDDEN, VOCAB, write_store

from eagle3.config import UserError
from eagle3.features.manifest import FINGERPRINT_BYTES, digest_target_config, digest_target_weights
from eagle3.features.store import FeatureStore


def write_config(directory: Path, values: dict[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_config_digest_ignores_key_order_and_the_saving_version(tmp_path: Path) -> None:
    one = write_config(tmp_path / "one", {"hidden_size": 8, "model_type": "llama", "transformers_version": "4.40"})
    two = write_config(tmp_path / "two", {"model_type": "llama", "hidden_size": 8, "transformers_version": "5.17"})
    three = write_config(tmp_path / "three", {"model_type": "llama", "hidden_size": 16})
    assert digest_target_config(one) == digest_target_config(two)
    assert digest_target_config(one) != digest_target_config(three)


def test_weights_digest_tells_two_fine_tunes_apart(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(FINGERPRINT_BYTES), "b": torch.zeros(4)}
    digests = []
    for number, change in enumerate([None, None, ("a", 0), ("b", 3)]):
        directory = tmp_path / str(number)
        directory.mkdir()
        changed = {name: tensor.clone() for name, tensor in weights.items()}
        if change is not None:
            changed[change[0]][change[1]] = 1.0
        save_file(changed, directory / "model.safetensors")
        digests.append(digest_target_weights(directory))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold manifest.json, got a path without one"):
        FeatureStore(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:40], r"must be JSON with a format_version, got JSONDecodeError"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 7'), r"must be 1, got 7"),
        (
            lambda text: text.replace('"engine":', '"motor":'),
            r"must have the fields of format 1, got no engine, an unknown motor",
        ),
        (lambda text: text.replace('"format_version": 1', '"format_version": true'), r"must be 1, got True"),
        (lambda text: text.replace('"bfloat16"', '"float32"'), r"fp32, int8 or fp8 for states in float32, got bf16"),
        (lambda text: text.replace('"last_rows": "supervised"', '"last_rows": "some"'), r"or all, got 'some'"),
        (lambda text: text.replace('"tokenizer_digest": "t0"', '"tokenizer_digest": 5'), r"must be text, got 5"),
        (lambda text: text.replace('"git_commit": "abc"', '"git_commit": 5'), r"must be text or null, got 5"),
        (lambda text: text.replace(f'"hidden_size": {HIDDEN}', '"hidden_size": 0'), r"a positive integer, got 0"),
        (lambda text: re.sub(r'"capture_layers": \[[^]]*\]', '"capture_layers": null', text), r"integers, got None"),
        (lambda text: text.replace(f'"vocab_size": {VOCAB}', '"vocab_size": "x"'), r"vocab_size must be .* got 'x'"),
        (lambda text: re.sub(r'"generation": \{[^}]*\}', '"generation": 5', text), r"must be an object, got 5"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    write_store(tmp_path, range(2))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(UserError, match=message):
        FeatureStore(tmp_path)
