"""The three tensors read from the shards are those that transformers loads."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig

from eagle3.config import UserError
from eagle3.draft import target_weights
from eagle3.draft.target_weights import (
    TargetWeights,
    check_capture_layers,
    default_capture_layers,
    load_target_config,
    load_target_weights,
    log_normaliser,
    rope_parameters,
)

MakeTarget = Callable[..., Path]


def rename_tensors(directory: Path, rename: Callable[[str], str]) -> None:
    weights = {rename(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors")


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(edit(config)))


def assert_same_weights(weights: TargetWeights, expected: TargetWeights) -> None:
    assert torch.equal(weights.embed_tokens, expected.embed_tokens)
    assert torch.equal(weights.lm_head, expected.lm_head)
    assert torch.equal(weights.norm, expected.norm)
    assert weights.rms_norm_eps == expected.rms_norm_eps


def test_weights_are_those_transformers_loads(tiny_target: Path) -> None:
    weights = load_target_weights(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    assert torch.equal(weights.embed_tokens, model.model.embed_tokens.weight)
    assert torch.equal(weights.lm_head, model.lm_head.weight)
    assert torch.equal(weights.norm, model.model.norm.weight)
    assert weights.rms_norm_eps == 1e-5


def test_head_and_norm_reproduce_the_logits(tiny_target: Path) -> None:
    weights = load_target_weights(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    logits = model(torch.arange(20)[None]).logits[0]  # (20, V)
    normed = hidden[0][0] * torch.rsqrt(hidden[0][0].square().mean(-1, keepdim=True) + weights.rms_norm_eps)
    # fp32, another order of operations
    torch.testing.assert_close((normed * weights.norm) @ weights.lm_head.T, logits, rtol=1e-5, atol=1e-5)


def test_shards_hold_the_same_as_one_file(tiny_target: Path, tiny_target_sharded: Path) -> None:
    assert_same_weights(load_target_weights(tiny_target_sharded), load_target_weights(tiny_target))


def test_only_the_shards_needed_are_opened(tmp_path: Path, make_target: MakeTarget, tiny_target: Path) -> None:
    target = make_target(tmp_path / "target", num_shards=4)
    (target / "model-00002-of-00004.safetensors").unlink()  # layers only
    assert_same_weights(load_target_weights(target), load_target_weights(tiny_target))


@pytest.mark.parametrize("wrapper", ["language_model.{}", "model.language_model.{}"])
def test_nested_names_and_text_config(tmp_path: Path, make_target: MakeTarget, tiny_target: Path, wrapper: str) -> None:
    target = make_target(tmp_path / "target")

    def nest(name: str) -> str:
        inner = name.removeprefix("model.") if wrapper.startswith("model.") else name
        return name if name == "lm_head.weight" else wrapper.format(inner)

    rename_tensors(target, nest)
    edit_config(target, lambda config: {"architectures": ["WrapperForAll"], "model_type": "w", "text_config": config})
    assert_same_weights(load_target_weights(target), load_target_weights(tiny_target))
    assert load_target_config(target)["architectures"] == ["WrapperForAll"]
    assert load_target_config(target)["hidden_size"] == 64


def test_an_int4_mixture_of_experts_is_read_under_its_nested_names(tmp_path: Path, tiny_target: Path) -> None:
    """As Kimi-K2.5 is stored: packed experts, plain head, embedding and norm, each in the shard that the index says."""
    expected = load_target_weights(tiny_target)
    target = tmp_path / "target"
    target.mkdir()
    inner = json.loads((tiny_target / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    text_config = inner | {"quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(config | {"text_config": text_config}))
    expert = "language_model.model.layers.1.mlp.experts.0.up_proj"
    shards = {
        "model-00001-of-000003.safetensors": {
            "language_model.model.embed_tokens.weight": expected.embed_tokens.bfloat16()
        },
        "model-00003-of-000003.safetensors": {
            "language_model.lm_head.weight": expected.lm_head.bfloat16(),
            "language_model.model.norm.weight": expected.norm.bfloat16(),
            f"{expert}.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
            f"{expert}.weight_scale": torch.ones(4, 2, dtype=torch.bfloat16),
            "vision_tower.encoder.final_layernorm.weight": torch.zeros(3),
        },
    }
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    # The experts' own shards are many, and need not even be there.
    weight_map[f"{expert}.weight_shape"] = "model-00002-of-000003.safetensors"
    for file, tensors in shards.items():
        save_file(tensors, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = load_target_weights(target)
    assert_same_weights(weights, expected.to("cpu", torch.bfloat16))
    assert {weights.embed_tokens.dtype, weights.lm_head.dtype, weights.norm.dtype} == {torch.bfloat16}


def test_multi_token_prediction_layers_are_not_taken(
    tmp_path: Path, make_target: MakeTarget, tiny_target: Path
) -> None:
    target = make_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    for extra in ("model.layers.8.embed_tokens", "model.layers.8.shared_head.norm", "mtp.norm", "vision_tower.norm"):
        weights[extra + ".weight"] = torch.zeros(3)
    save_file(weights, target / "model.safetensors")
    assert_same_weights(load_target_weights(target), load_target_weights(tiny_target))


@pytest.mark.parametrize("said", [True, None])
def test_tied_head_is_the_embedding(tmp_path: Path, make_target: MakeTarget, said: bool | None) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=True)
    if said is None:
        edit_config(target, lambda config: {k: v for k, v in config.items() if k != "tie_word_embeddings"})
    weights = load_target_weights(target)
    assert weights.lm_head is weights.embed_tokens
    moved = weights.to("cpu", torch.bfloat16)
    assert moved.lm_head is moved.embed_tokens
    assert moved.norm.dtype == torch.bfloat16


def test_drafted_rows_of_the_head_leave_the_rest(tiny_target: Path) -> None:
    weights = load_target_weights(tiny_target)
    token_ids = torch.tensor([2, 7, 319])
    drafted = weights.drafted(token_ids)
    assert torch.equal(drafted.lm_head, weights.lm_head[[2, 7, 319]])
    assert drafted.lm_head.untyped_storage().nbytes() == 3 * 64 * 4  # nothing else is kept alive by them
    assert drafted.embed_tokens is weights.embed_tokens
    assert drafted.drafted(token_ids) is drafted
    assert weights.drafted(torch.arange(320)) is weights


def test_wrapper_says_whether_the_head_is_tied(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")

    def nest(config: dict[str, Any]) -> dict[str, Any]:
        config.pop("tie_word_embeddings")
        return {"architectures": ["Wrapper"], "tie_word_embeddings": True, "text_config": config}

    edit_config(target, nest)
    weights = load_target_weights(target)
    assert weights.lm_head is weights.embed_tokens


def test_norm_that_multiplies_by_one_plus_weight(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=None,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "gemma")
    weights = load_target_weights(tmp_path / "gemma")
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + weights.rms_norm_eps)
    torch.testing.assert_close(normed * weights.norm, model.model.norm(hidden))


def test_log_normaliser_by_chunks(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_target_weights(tiny_target)
    last = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    expected = (last.double() @ weights.lm_head.double().T).exp().sum(-1).log()
    monkeypatch.setattr(target_weights, "LOGITS_PER_CHUNK", 3 * 320)  # chunks of 3, 3, 3 and 2 rows
    logz = log_normaliser(weights, last)
    assert logz.dtype == torch.float32
    torch.testing.assert_close(logz.double(), expected, rtol=1e-5, atol=1e-5)  # fp32 against fp64
    assert log_normaliser(weights, last[:0]).shape == (0,)


def test_capture_layers_default() -> None:
    assert default_capture_layers(61) == [2, 30, 58]
    assert default_capture_layers(7) == [2, 3, 4]
    with pytest.raises(
        UserError, match=r"must be given for a target of 6 layers, got none and the default \[2, 3, 3\]"
    ):
        default_capture_layers(6)


def test_capture_layers_strictly_increase_within_the_model() -> None:
    check_capture_layers([3, 31, 59], 61)
    check_capture_layers([0, 1, 60], 61)
    for layers in ([], [2, 2, 5], [5, 3, 2], [-1, 2, 3], [2, 3, 62]):
        with pytest.raises(UserError, match=r"must strictly increase within 0\.\.60") as error:
            check_capture_layers(layers, 61)
        assert f"got {layers}; change" in str(error.value)
    with pytest.raises(UserError, match="boundary 61, the last layer's output, cannot be captured"):
        check_capture_layers([2, 30, 61], 61)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_theta": 1e6},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
            },
        },
    ],
)  # fmt: skip
def test_rope_is_what_transformers_makes_of_it(config: dict[str, Any]) -> None:
    llama = LlamaConfig(**copy.deepcopy(config), max_position_embeddings=512).to_dict()
    expected = {key: value for key, value in llama["rope_parameters"].items() if key != "type"}
    assert rope_parameters(config | {"max_position_embeddings": 512}) == expected


def test_rope_by_layer_type_is_that_of_full_attention() -> None:
    full = {"rope_type": "default", "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config = {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}
    assert rope_parameters(config) == full


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.path must be a Hugging Face directory, got '.*/none'"):
        load_target_weights(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json must be JSON, got .* \(.*config\.json\)"),
        ("[]", r"config\.json must be an object, got a list"),
        ('{"text_config": 5}', r"text_config must be an object, got 5"),
        (
            '{"hidden_size": 0, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 9, '
            '"max_position_embeddings": 64}',
            r"as integers of 1 or more, got none for hidden_size",
        ),
        (
            '{"architectures": ["LlamaForCausalLMEagle3"]}',
            r"must be a target's directory, got a drafter's .*\['LlamaForCausalLMEagle3'\]\); give the model",
        ),
        (
            '{"hidden_size": 64}',
            "got none for num_hidden_layers, num_attention_heads, vocab_size, max_position_embeddings",
        ),
    ],
)
def test_unusable_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_target_config(tmp_path)


def test_missing_tensor_names_what_was_looked_for(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")
    rename_tensors(target, lambda name: name.replace("model.norm.", "transformer.ln_f."))
    with pytest.raises(UserError, match=r"one tensor named 'model\.norm\.weight'.*got none among 75 tensors"):
        load_target_weights(target)


def test_missing_head_of_an_untied_target(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")
    rename_tensors(target, lambda name: name.replace("lm_head.weight", "lm_head.weight_packed"))
    with pytest.raises(UserError, match=r"one tensor named 'lm_head\.weight'.*got none"):
        load_target_weights(target)


def test_ambiguous_tensor_names_both(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["talker.model.norm.weight"] = torch.ones(64)
    save_file(weights, target / "model.safetensors")
    with pytest.raises(UserError, match=r"got \['model\.norm\.weight', 'talker\.model\.norm\.weight'\]"):
        load_target_weights(target)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_misshapen_or_quantised_tensor(tmp_path: Path, make_target: MakeTarget, change: str) -> None:
    target = make_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head[:300].clone() if change == "shape" else head.to(torch.float8_e4m3fn)
    save_file(weights, target / "model.safetensors")
    seen = r"got \(300, 64\) in torch\.float32" if change == "shape" else r"got \(320, 64\) in torch\.float8_e4m3fn"
    with pytest.raises(UserError, match=rf"'lm_head\.weight' must be \(320, 64\) in float32.*{seen}"):
        load_target_weights(target)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"), ({"logit_scale": 0.06}, "logit_scale=0.06")],
)
def test_target_that_changes_its_logits_is_refused(
    tmp_path: Path, make_target: MakeTarget, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"must be lm_head\(last hidden state\), got {message} as well"):
        load_target_weights(make_target(tmp_path / "target", **change))


def test_head_with_a_bias_is_refused(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    save_file(weights | {"lm_head.bias": torch.zeros(320)}, target / "model.safetensors")
    with pytest.raises(UserError, match=r"got lm_head\.bias as well"):
        load_target_weights(target)


def test_weights_that_are_not_safetensors(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target")
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"a model.s weights must be model\.safetensors.*got \['pytorch_model\.bin'\]"):
        load_target_weights(target)


def test_broken_shards_are_named(tmp_path: Path, make_target: MakeTarget) -> None:
    target = make_target(tmp_path / "target", num_shards=3)
    shard = target / "model-00001-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"must be whole and readable.*model-00001-of-00003\.safetensors"):
        load_target_weights(target)
    shard.unlink()
    with pytest.raises(UserError, match=r"must be whole and readable.*model-00001-of-00003\.safetensors"):
        load_target_weights(target)
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(UserError, match=r"'model\.embed_tokens\.weight' must be in .*as the index says"):
        load_target_weights(target)
    (target / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"must be JSON with a weight_map, got KeyError"):
        load_target_weights(target)


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "target" / "config.json").mkdir(parents=True)
    for path in (tmp_path / "file", tmp_path / "target"):
        with pytest.raises(UserError, match=r"must be a Hugging Face directory, got '.*' without a config.json"):
            load_target_config(path)
