"""A server that would not run a drafter as it was trained does not start; the words say what is wrong."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3.capture.guard import (
    Guard,
    GuardError,
    captured_boundaries,
    check_algorithm,
    check_boundaries,
    load_and_check,
    trained_boundaries,
)


class Drafter(nn.Module):
    """Loads as SGLang's class does: unknown names are skipped, missing parameters stay as they are."""

    def __init__(self, draft_vocab_size: int | None = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=8, draft_vocab_size=draft_vocab_size)
        self.hot_token_id: Tensor | None = None
        self.norm = nn.LayerNorm(4, bias=False, dtype=dtype)
        self.qkv_proj = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.embed_tokens = nn.Embedding(8, 4)

    @staticmethod
    def load(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "d2t":
                model.hot_token_id = tensor
            elif name == "q_proj.weight":
                model.qkv_proj.weight.data[:2].copy_(tensor)
            elif name == "k_proj.weight":
                model.qkv_proj.weight.data[2:].copy_(tensor)
            elif name == "norm.weight":
                model.norm.weight.data.copy_(tensor)


WHOLE = {
    "d2t": torch.zeros(6, dtype=torch.int64),
    "t2d": torch.ones(8, dtype=torch.bool),
    "q_proj.weight": torch.ones(2, 4),
    "k_proj.weight": torch.ones(2, 4),
    "norm.weight": torch.ones(4),
}


def test_a_whole_file_is_loaded_as_it_is() -> None:
    model = Drafter()
    embedding = model.embed_tokens.weight.clone()
    assert load_and_check(Drafter.load, model, WHOLE.items()) == 5
    assert bool((model.qkv_proj.weight == 1).all())
    assert torch.equal(model.embed_tokens.weight, embedding)


@pytest.mark.parametrize(
    ("left_out", "added", "said"),
    [
        ("norm.weight", None, "every parameter must be in the file, got nothing, or NaN, for norm.weight; export it"),
        ("k_proj.weight", None, "got nothing, or NaN, for qkv_proj.weight"),
        (None, "draft.o_proj.weight", "must be one that SGLang uses, got draft.o_proj.weight as well; export it again"),
        ("norm.weight", "final_norm.weight", "got final_norm.weight as well; every parameter must be in the file"),
        ("d2t", None, "a draft vocabulary of its own must come with d2t, got none"),
    ],
)
def test_what_is_missing_or_unused_is_named(left_out: str | None, added: str | None, said: str) -> None:
    weights = {name: tensor for name, tensor in WHOLE.items() if name != left_out}
    if added is not None:
        weights[added] = torch.ones(4)
    with pytest.raises(GuardError, match="the drafter would not run as it was trained") as error:
        load_and_check(Drafter.load, Drafter(), weights.items())
    assert said in str(error.value)


def test_a_file_with_nan_is_named() -> None:
    weights = WHOLE | {"norm.weight": torch.full((4,), torch.nan)}
    with pytest.raises(GuardError, match=r"got nothing, or NaN, for norm\.weight; export"):
        load_and_check(Drafter.load, Drafter(), weights.items())


def test_a_quantised_drafter_is_left_alone() -> None:
    model = Drafter(dtype=torch.float64)
    assert load_and_check(Drafter.load, model, []) == 0
    assert bool(model.norm.weight.isfinite().all())


def target(model_class: type = SimpleNamespace, **layers: Any) -> Any:
    return model_class(model=SimpleNamespace(**layers))


def test_boundaries_are_read_off_every_kind_of_model() -> None:
    plain = [SimpleNamespace() for _ in range(6)]
    llama = target(layers=plain, layers_to_capture=[4, 2])
    assert captured_boundaries(llama) == [2, 4]
    llama.set_eagle3_layers_to_capture = None
    assert captured_boundaries(SimpleNamespace(language_model=llama)) == [2, 4]
    marked = [SimpleNamespace(_is_layer_to_capture=k in (1, 5)) for k in range(6)]
    assert captured_boundaries(target(layers=marked, layers_to_capture=[])) == [1, 5]


def test_other_boundaries_than_the_training_s_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eagle3": {"capture_layers": [2, 4]}}))
    assert trained_boundaries(tmp_path) == [2, 4]
    arguments = SimpleNamespace(speculative_draft_model_path=str(tmp_path), speculative_algorithm="EAGLE3")
    runner = SimpleNamespace(is_draft_worker=False, server_args=arguments)
    runner.model = target(layers=[], layers_to_capture=[2, 4])
    Guard().after_init_attention_backends(None, runner)
    runner.model.model.layers_to_capture = [3, 5]
    said = r"SimpleNamespace captures must be \[2, 4\], which the drafter was trained on, got \[3, 5\]; export it for"
    with pytest.raises(GuardError, match=said):
        Guard().after_init_attention_backends(None, runner)
    with pytest.raises(GuardError, match=r"Llama captures must be \[2\].*got \[\]"):
        check_boundaries([], [2], "Llama")
    runner.is_draft_worker = True
    Guard().after_init_attention_backends(None, runner)


def test_others_drafters_do_not_say_their_boundaries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trained_boundaries(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert trained_boundaries(tmp_path) is None
    arguments = SimpleNamespace(speculative_draft_model_path=str(tmp_path), speculative_algorithm="EAGLE3")
    runner = SimpleNamespace(is_draft_worker=False, server_args=arguments)
    runner.model = target(layers=[], layers_to_capture=[3, 5])
    Guard().after_init_attention_backends(None, runner)
    assert "does not say which layers it was trained on; it gets [3, 5]" in caplog.text


def test_another_algorithm_is_refused() -> None:
    check_algorithm("EAGLE3")
    with pytest.raises(
        GuardError, match="must be EAGLE3 for a drafter of class LlamaForCausalLMEagle3, got EAGLE: with"
    ):
        check_algorithm("EAGLE")


def test_models_that_are_no_drafter_of_ours_are_loaded_as_ever() -> None:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    for is_draft_worker in (False, True):
        runner = SimpleNamespace(is_draft_worker=is_draft_worker, model_config=config)
        assert Guard().around_load_model(lambda runner, x: x, runner, 7) == 7
