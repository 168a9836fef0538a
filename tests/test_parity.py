"""The gates pass for the right states and name what is wrong with others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture.engine import Captured
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.parity import ParityError, TargetFacts, check_parity, read_target
from eagle3.config import RegenerateConfig, TargetConfig, UserError
from eagle3.features.codec import Codec, decode, encode, rounding_steps
from eagle3.prompts.tokenizers import load_tokenizer

LAYERS = [2, 4, 5]


def load(path: Path, dtype: Any = "float32") -> tuple[TransformersEngine, TargetConfig]:
    target = TargetConfig(str(path), dtype=dtype)
    return TransformersEngine(target, LAYERS, load_tokenizer(str(path), False)), target


def make_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 300, (40 + length,), generator=generator).tolist() for length in range(10)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_states_pass(tiny_target: Path, dtype: str) -> None:
    engine, target = load(tiny_target, dtype)
    prompts = make_sequences()
    answers = engine.generate(prompts, RegenerateConfig(max_new_tokens=20, cut_loops=False))
    sequences = [prompt + answer.ids for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [[False] * len(prompt) + [True] * len(answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
    report = check_parity(engine, target, sequences, masks)
    assert report.num_samples == 8
    assert report.num_positions == sum(len(sequence) for sequence in sequences[:8])
    assert report.capture_layers == LAYERS
    assert report.agreement == 1.0
    assert report.recorded_agreement == 1.0
    assert len(report.cosine) == len(report.relative_error) == 4
    if dtype == "float32":
        assert report.logit_noise < 1e-4
        assert report.num_clear >= report.num_positions - 2
        assert report.num_recorded >= sum(sum(mask) for mask in masks[:8]) - 2
        assert report.agreement_everywhere == 1.0
        assert max(report.relative_error) < 1e-5
        assert min(report.cosine) > 0.9999
    else:
        assert 1e-3 < report.logit_noise < 1
        assert report.agreement_everywhere < 1.0  # near-ties flip, and are no fault


def test_given_answers_have_no_recorded_tokens(tiny_target: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, target = load(tiny_target)
    report = check_parity(engine, target, make_sequences()[:1], None)
    assert (report.num_recorded, report.recorded_agreement) == (0, None)
    assert "40 positions clear of noise, 200 wanted" in caplog.text


def spoil(engine: TransformersEngine, change: Callable[[Captured], Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine.capture

    def capture(sequences: Sequence[Sequence[int]]) -> list[Captured]:
        return [change(each) for each in whole(sequences)]

    monkeypatch.setattr(engine, "capture", capture)


def code(captured: Captured, codec: Codec) -> Captured:
    """Codes states and decodes them, as they come from a server that codes."""
    hidden_size, dtype = captured.last_hidden_states.shape[1], captured.last_hidden_states.dtype
    aux, last = (encode(each, hidden_size, codec) for each in (captured.aux_hidden_states, captured.last_hidden_states))
    return Captured(
        decode(aux, hidden_size, dtype),
        decode(last, hidden_size, dtype),
        rounding_steps(aux, hidden_size),
        rounding_steps(last, hidden_size),
    )


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_states_pass_when_they_are_coded_and_others_do_not(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec, dtype: str
) -> None:
    engine, target = load(tiny_target, dtype)
    sequences = make_sequences()
    exact = check_parity(engine, target, sequences, None)
    spoil(engine, lambda each: code(each, codec), monkeypatch)
    report = check_parity(engine, target, sequences, None)
    assert report.agreement >= 0.99
    assert 0.002 < max(report.relative_error) < 0.05
    assert 0.99 * exact.logit_noise < report.logit_noise  # the rounding of a logit goes with its size
    assert exact.num_clear / 3 < report.num_clear <= exact.num_clear
    shifted, _ = load(tiny_target, dtype)
    shifted.capture_layers = [3, 5, 6]
    monkeypatch.setattr(engine, "capture", shifted.capture)
    spoil(engine, lambda each: code(each, codec), monkeypatch)
    with pytest.raises(ParityError, match=r"captured layer 2 must be .*nearest is hidden_states\[3\]"):
        check_parity(engine, target, sequences, None)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_another_models_head_is_noticed_when_states_are_coded(
    tiny_target: Path, make_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    engine, target = load(tiny_target)
    other = make_target(tmp_path / "other", seed=9)
    spoil(engine, lambda each: code(each, codec), monkeypatch)
    with pytest.raises(
        ParityError, match=r"argmax\(lm_head\(last\)\).* must be the engine's greedy tokens on 99%.*got"
    ):
        check_parity(engine, replace(target, path=str(other)), make_sequences(), None)


def test_a_boundary_that_is_off_by_one_is_named(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = load(tiny_target)
    shifted, _ = load(tiny_target)
    shifted.capture_layers = [3, 5, 6]
    monkeypatch.setattr(engine, "capture", shifted.capture)
    with pytest.raises(
        ParityError, match=r"captured layer 2 must be .*hidden_states\[2\].*nearest is hidden_states\[3\]"
    ):
        check_parity(engine, target, make_sequences(), None)


def test_a_last_state_from_before_the_norm_is_named(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = load(tiny_target)
    unnormed, _ = load(tiny_target)
    unnormed.model.get_decoder().norm = torch.nn.Identity()
    monkeypatch.setattr(engine, "capture", unnormed.capture)
    with pytest.raises(
        ParityError,
        match=r"the last hidden state must be .*hidden_states\[8\] within .* got 1.*nearest is hidden_states\[7\]",
    ):
        check_parity(engine, target, make_sequences(), None)


def test_states_that_are_not_finite_do_not_pass(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = load(tiny_target)
    spoil(engine, lambda each: replace(each, aux_hidden_states=each.aux_hidden_states * float("nan")), monkeypatch)
    with pytest.raises(ParityError, match=r"captured layer 2 must be .* got nan"):
        check_parity(engine, target, make_sequences(), None)


def test_another_models_head_is_noticed(tiny_target: Path, make_target: Callable[..., Path], tmp_path: Path) -> None:
    engine, target = load(tiny_target)
    other = make_target(tmp_path / "other", seed=9)
    with pytest.raises(
        ParityError, match=r"argmax\(lm_head\(last\)\).* must be the engine's greedy tokens on 99%.*got"
    ):
        check_parity(engine, replace(target, path=str(other)), make_sequences(), None)


def test_recorded_tokens_that_are_not_the_engines_are_noticed(tiny_target: Path) -> None:
    engine, target = load(tiny_target)
    sequences = make_sequences()
    masks = [[True] * len(sequence) for sequence in sequences]  # random ids, said to be generated
    with pytest.raises(ParityError, match=r"the answers' recorded tokens must be the engine's greedy tokens"):
        check_parity(engine, target, sequences, masks)


def test_boundaries_come_from_the_config_or_the_default(tiny_target: Path) -> None:
    facts = read_target(TargetConfig(str(tiny_target)))
    assert facts == TargetFacts([2, 4, 5], hidden_size=64, vocab_size=320, max_tokens=512, quantization=None)
    assert read_target(TargetConfig(str(tiny_target), capture_layers=[0, 7])).capture_layers == [0, 7]
    with pytest.raises(UserError, match=r"must strictly increase within 0..7"):
        read_target(TargetConfig(str(tiny_target), capture_layers=[2, 8]))
