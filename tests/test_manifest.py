"""A store's digests move with the target's contents and with nothing else."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3.features.manifest import FINGERPRINT_BYTES, digest_target_config, digest_target_weights


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
