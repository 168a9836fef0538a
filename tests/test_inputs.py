"""Store, target and config belong together, or an error names both sides."""

import dataclasses
import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conftest import random_sample, write_tiny_target
from tiny_training import tiny_config, write_target_and_store

from eagle3.commands.features import main as features
from eagle3.config import TrainConfig, UserError
from eagle3.draft.draft_vocab import DraftVocab, tau_ceiling
from eagle3.draft.target_weights import load_target_weights
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter
from eagle3.training.inputs import device_weights, largest_micro_batch, load_inputs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    directory = tmp_path_factory.mktemp("inputs")
    target, store = write_target_and_store(directory)
    return tiny_config(store, target, directory / "run")


def with_target(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, target=dataclasses.replace(config.target, **changes))


def with_data(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def test_the_drafter_starts_from_the_target_and_the_training_answers(base: TrainConfig) -> None:
    inputs = load_inputs(base)
    store, weights = inputs.store, load_target_weights(Path(base.target.path))
    assert sorted(inputs.train_indices + inputs.held_out_indices) == list(range(len(store)))
    drafted = inputs.drafter.target_ids
    counts = store.token_counts(inputs.train_indices)
    assert set(counts.nonzero().flatten().tolist()) <= set(drafted.tolist())
    assert 2 in drafted.tolist()  # the end of a turn, though these answers never use it
    assert torch.equal(inputs.drafter.lm_head.weight, weights.lm_head[drafted])
    assert torch.equal(inputs.drafter.norm.weight, weights.norm)


@pytest.mark.parametrize("embeddings", ["device", "host"])
def test_devices_get_the_drafted_rows_of_the_head(base: TrainConfig, embeddings: Literal["device", "host"]) -> None:
    inputs = load_inputs(base)
    kept = device_weights(inputs.target, inputs.drafter.target_ids, embeddings)
    assert kept.embed_tokens.shape[0] == (320 if embeddings == "device" else 0)
    assert torch.equal(kept.lm_head, inputs.target.lm_head[inputs.drafter.target_ids])


def test_settings_are_checked_before_anything_is_read(base: TrainConfig) -> None:
    with pytest.raises(UserError, match=r"data\.samples_per_step must be at least 1, got 0"):
        load_inputs(with_data(base, samples_per_step=0, path="nowhere"))


def test_what_the_draft_vocabulary_costs_is_said(base: TrainConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        inputs = load_inputs(base)
    answers = [run for index in inputs.held_out_indices for run in inputs.store.answers(index)]
    ceiling = tau_ceiling(DraftVocab(inputs.drafter.d2t, inputs.drafter.t2d), answers, base.objective.ttt_steps)
    said = f"tau {ceiling.tau:.2f} of {ceiling.full_tau:.2f} with chains of {base.objective.ttt_steps}, "
    assert f"{said}{100 * ceiling.lost:.1f} % lost to the rest ({len(answers)} answers)" in caplog.text


def test_the_same_seed_makes_the_same_drafter(base: TrainConfig) -> None:
    first, second = (load_inputs(base).drafter.state_dict() for _ in range(2))
    other = load_inputs(dataclasses.replace(base, run=dataclasses.replace(base.run, seed=1))).drafter.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_the_largest_micro_batch_is_the_limit_or_the_longest_sample_or_a_step(base: TrainConfig) -> None:
    inputs, store = load_inputs(base), FeatureStore(base.data.path)
    samples = [store[index] for index in inputs.train_indices]
    lengths = sorted(sample.input_ids.numel() for sample in samples)

    def largest(num_sharing: int = 1, **changes: int) -> tuple[int, float]:
        data = dataclasses.replace(base.data, **changes)  # type: ignore[arg-type]
        return largest_micro_batch(inputs.store, inputs.train_indices, data, num_sharing)

    num_tokens, share = largest(batch_tokens=5)
    assert num_tokens == lengths[-1]
    assert share == pytest.approx(sum(sample.last_rows.numel() for sample in samples) / sum(lengths))
    assert largest(batch_tokens=40)[0] == 40
    assert largest(batch_tokens=4096, samples_per_step=3)[0] == sum(lengths[-3:])
    assert largest(batch_tokens=4, num_sharing=3)[0] == -(-num_tokens // 3)


def test_no_layers_are_not_the_default_ones(base: TrainConfig) -> None:
    with pytest.raises(UserError, match=r"target.capture_layers must strictly increase within 0\.\.7 .*, got \[\]"):
        load_inputs(with_target(base, capture_layers=[]))


def test_other_layers_are_refused_with_both_lists(base: TrainConfig) -> None:
    with pytest.raises(UserError, match=r"capture_layers must be \(2, 4, 5\), as captured from .*, got \(1, 4, 5\)"):
        load_inputs(with_target(base, capture_layers=[1, 4, 5]))


def test_the_default_layers_are_compared_too(base: TrainConfig) -> None:
    inputs = load_inputs(with_target(base, capture_layers=None))
    assert inputs.drafter.config.capture_layers == (2, 8 // 2, 8 - 3)


def test_another_target_is_refused_with_both_digests(base: TrainConfig, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", seed=1, rms_norm_eps=1e-6)
    manifest = FeatureStore(Path(base.data.path)).manifest
    with pytest.raises(UserError) as caught:
        load_inputs(with_target(base, path=str(other)))
    message = str(caught.value)
    assert f"target_config_digest must be '{manifest.target_config_digest}'" in message
    assert f"target_revision must be '{manifest.target_revision}'" in message
    assert "tokenizer_digest" not in message  # the two share it
    assert "change target.path or target.capture_layers, or capture a new store" in message


def test_another_tokenizer_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    target, store = write_target_and_store(tmp_path)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|other|>"
    tokenizer["model"]["vocab"]["<|other|>"] = tokenizer["model"]["vocab"].pop("<|endoftext|>")
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="tokenizer_digest must be '"):
        load_inputs(with_data(with_target(base, path=str(target)), path=str(store)))


@pytest.mark.parametrize(("share", "name"), [(0.0, "held-out"), (1.0, "training")])
def test_nothing_to_train_or_validate_on_is_an_error(base: TrainConfig, share: float, name: str) -> None:
    with pytest.raises(UserError, match=rf"the store must leave {name} samples, got none of its 30 with data\.held"):
        load_inputs(with_data(base, held_out_share=share))


def test_samples_left_out_are_counted(base: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = FeatureStore(Path(base.data.path)).manifest
    with FeatureWriter(tmp_path / "store", manifest, shard_bytes=2**20) as writer:
        for number in range(12):
            writer.write(random_sample(f"ok{number}", [0, 1, 1]))
        writer.write(random_sample("long", [0] + [1] * 40))
        writer.write(random_sample("one-token answers", [0, 1, 0, 1]))
    with caplog.at_level("INFO"):
        inputs = load_inputs(with_data(base, path=str(tmp_path / "store"), max_tokens=40, held_out_share=0.3))
    names = {inputs.store.entries[index].sample_id for index in inputs.train_indices + inputs.held_out_indices}
    assert names == {f"ok{number}" for number in range(12)}
    left_out = [record.args[1::2] for record in caplog.records if "left out" in record.message]  # type: ignore[index]
    assert len(left_out) == 2
    assert "1 longer than data.max_tokens=40" in caplog.text
    assert "1 without two supervised tokens in a row" in caplog.text
    assert 0 < len(inputs.held_out_indices) < 10
    few = f"{len(inputs.held_out_indices)} held-out samples can hardly tell one checkpoint from another"
    assert few in caplog.text
    caplog.clear()
    load_inputs(with_data(base, held_out_share=0.5))  # of 30
    assert "hardly tell" not in caplog.text


def test_every_end_token_of_the_target_can_be_drafted(base: TrainConfig, tmp_path: Path) -> None:
    target, store = write_target_and_store(tmp_path)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [317, 319]}))
    inputs = load_inputs(with_data(with_target(base, path=str(target)), path=str(store)))
    drafted = set(inputs.drafter.target_ids.tolist())
    assert {2, 317, 319} <= drafted
    assert 318 not in drafted


def test_no_changed_byte_of_a_manifest_makes_a_traceback(base: TrainConfig, tmp_path: Path) -> None:
    """Digits of its numbers, and bytes anywhere: verify and training read on, or say in a sentence what is wrong."""
    store = Path(shutil.copytree(base.data.path, tmp_path / "store"))
    manifest, chosen = store / "manifest.json", random.Random(0)
    whole = manifest.read_bytes()
    numbers = [whole.index(name) + at for name in (b'"vocab_size": 3', b'"hidden_size": 6') for at in range(14, 17)]
    places = [*numbers, *chosen.sample(range(len(whole)), 30)]
    num_refused = 0
    for place in places:
        changed = bytearray(whole)
        # What a number, a name or a bracket may turn into and still be JSON; and any byte.
        changed[place] = (
            chosen.choice(b'-.0123456789eFI_"[]{},') if place % 2 else whole[place] ^ chosen.randrange(1, 256)
        )
        manifest.write_bytes(changed)
        assert features(["verify", str(store)]) in (0, 1), place
        try:
            load_inputs(with_data(base, path=str(store)))
        except UserError:
            num_refused += 1
    assert num_refused > len(places) / 2
