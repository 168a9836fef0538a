"""The captured states are the ones that were asked for, whatever else is in the batch."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3.capture.inprocess import TransformersEngine, batches_by_length
from eagle3.config import RegenerateConfig, TargetConfig, UserError
from eagle3.prompts.tokenizers import load_tokenizer

LAYERS = [0, 3, 7]  # both ends can be captured


def load(path: Path, layers: list[int] = LAYERS) -> TransformersEngine:
    return TransformersEngine(TargetConfig(str(path), dtype="float32"), layers, load_tokenizer(str(path), False))


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> TransformersEngine:
    return load(tiny_target)


def make_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (12, 31, 1, 20)]


def test_states_are_those_of_transformers_for_each_sequence_alone(engine: TransformersEngine) -> None:
    in_batch = engine.logits(make_sequences())
    for sequence, captured, logits in zip(make_sequences(), engine.capture(make_sequences()), in_batch, strict=True):
        hidden_states = engine.hidden_states(sequence)
        wanted = torch.cat([hidden_states[layer] for layer in LAYERS], dim=-1)
        # fp32, another batch shape: other summation order.
        torch.testing.assert_close(captured.aux_hidden_states, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(captured.last_hidden_states, hidden_states[-1], rtol=1e-4, atol=1e-5)
        head = engine.model.get_output_embeddings().weight.detach()
        torch.testing.assert_close(captured.last_hidden_states @ head.T, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(engine.logits([sequence])[0], logits, rtol=1e-4, atol=1e-4)


def test_a_boundary_is_the_state_that_enters_the_layer(tiny_target: Path) -> None:
    engine = load(tiny_target)
    body = engine.model.get_decoder()
    for k, layer in enumerate(body.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        layer.register_forward_hook(lambda module, args, output, k=k: output + 10.0**k)
    torch.nn.init.zeros_(body.embed_tokens.weight)
    (captured,) = engine.capture([[5, 6]])
    # Layer i adds 10^i, so the state that enters layer k is k ones: 0, 111, 1111111.
    assert captured.aux_hidden_states.view(2, 3, -1)[:, :, 0].tolist() == [[0.0, 111.0, 1111111.0]] * 2


def test_captures_leave_no_hooks_behind(engine: TransformersEngine) -> None:
    engine.capture(make_sequences())
    assert not any(layer._forward_pre_hooks for layer in engine.model.get_decoder().layers)


def test_log_normaliser_is_the_log_sum_exp_of_the_logits(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.capture.inprocess.LOGITS_PER_CHUNK", 7 * 320)  # seven rows at a time
    (captured,) = engine.capture(make_sequences()[:1])
    (logits,) = engine.logits(make_sequences()[:1])
    torch.testing.assert_close(engine.log_normaliser(captured.last_hidden_states), logits.logsumexp(-1))


def test_an_answer_ends_with_any_of_the_end_tokens(make_target: Callable[..., Path], tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", eos_token_id=[9, 11])
    (target / "generation_config.json").write_text('{"eos_token_id": 12}')
    assert load(target).end_ids == {2, 9, 11, 12}


def test_sequences_beyond_the_targets_positions_are_refused(engine: TransformersEngine) -> None:
    message = r"at most the target's max_position_embeddings=512 tokens, got 513"
    with pytest.raises(UserError, match=message):
        engine.capture([[1] * 513])
    with pytest.raises(UserError, match=message):
        engine.generate([[1] * 512], RegenerateConfig())


def test_answers_end_at_the_limit(engine: TransformersEngine) -> None:
    settings = RegenerateConfig(max_new_tokens=50, cut_loops=False)
    engine.end_ids, before = frozenset(), engine.end_ids
    at_512, short = engine.generate([[1] * 500, [1] * 3], settings)
    at_10 = engine.generate([[1] * 3], settings, max_tokens=10)[0]
    engine.end_ids = before
    assert (len(at_512.ids), len(short.ids), len(at_10.ids)) == (12, 50, 7)


def test_a_directory_that_does_not_load_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target), False)
    with pytest.raises(UserError, match=r"must be a model that transformers loads, got '.*nothing'"):
        TransformersEngine(TargetConfig(str(tmp_path / "nothing")), LAYERS, tokenizer)


def test_weights_that_were_cut_short_are_refused(make_target: Callable[..., Path], tmp_path: Path) -> None:
    weights = make_target(tmp_path / "target") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(
        UserError, match=r"must be a model that transformers loads, got '.*target' \(.*not fully covered"
    ):
        load(tmp_path / "target")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 9}, {"intermediate_size": 100}])
def test_weights_of_another_config_are_refused(
    make_target: Callable[..., Path], tmp_path: Path, change: dict[str, int]
) -> None:
    """transformers makes up the weights of a layer that the files lack, and goes on."""
    path = make_target(tmp_path / "target") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = "must hold every weight .* got none for model.layers.8" if 9 in change.values() else "transformers loads"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "target")


def test_a_gpu_that_is_not_there_is_named(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tokenizer = load_tokenizer(str(tiny_target), False)
    with pytest.raises(UserError, match=r"target\.device must be a device of this machine, got 'cuda' without a GPU"):
        TransformersEngine(TargetConfig(str(tiny_target), device="cuda"), LAYERS, tokenizer)


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, r"got \['linear_attention'\]"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128},
            r"must fit the target's attention window of 128 tokens to generate in this process, got 259",
        ),
    ],
)
def test_targets_that_cannot_be_decoded_here_are_refused(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, text_config: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(engine, "_text_config", SimpleNamespace(max_position_embeddings=512, **text_config))
    with pytest.raises(UserError, match=message + r".*set regenerate.enabled=false"):
        engine.generate([[1, 2, 3]], RegenerateConfig(max_new_tokens=256))


@pytest.mark.parametrize("batch_tokens", [1, 50, 1000])
def test_batches_hold_each_sequence_once_within_the_padded_limit(batch_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (40,), generator=generator).tolist()
    batches = batches_by_length(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(40))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= batch_tokens or len(batch) == 1
    assert len(batches) == 40 if batch_tokens == 1 else len(batches) < 40
