"""The plugin switches the right boundaries on, copies the right rows, and refuses what it cannot record."""

import importlib.metadata
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from sglang_servers import wait_for_file
from torch import Tensor, nn

from eagle3.capture import plugin
from eagle3.capture.handover import Handover
from eagle3.capture.plugin import Recorder, find_parts, register
from eagle3.capture.recordable import (
    CaptureError,
    EngineSettings,
    capture_boundaries,
    capturing_model,
    check_engine,
    parse_boundaries,
    parse_codec,
)
from eagle3.capture.staging import DIRECTORY_VARIABLE, Part, request_id, sample_path
from eagle3.capture.staging_area import read_sample
from eagle3.features.codec import encode

SETTINGS = EngineSettings(
    version="0.5.23",
    speculation=None,
    num_pipeline_stages=1,
    num_context_ranks=1,
    two_batch_overlap=False,
    prefill_graphs=False,
    tensor_parallel_rank=0,
    attention_rank=0,
    num_attention_ranks=1,
)
NUM_LAYERS = 8


class MarkedLayer(nn.Module):
    """A decoder layer that Qwen's MoE classes ask."""

    _is_layer_to_capture: bool = False


class Body(nn.Module):
    """The part of an SGLang model that holds the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MarkedLayer() for _ in range(NUM_LAYERS))
        self.layers_to_capture: list[int] = []


class AddsOne(nn.Module):
    """Stores each id plus one, as Llama's class."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


class TakesAsGiven(AddsOne):
    """Stores the ids, unless the first is 1, as DeepSeek's class since 0.5.13."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        add = layer_ids[0] == 1
        self.model.layers_to_capture = [layer + add for layer in layer_ids]


class MarksLayers(AddsOne):
    """Asks each layer whether it is captured, as Qwen's MoE classes."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        super().set_eagle3_layers_to_capture(layer_ids)
        for k in self.model.layers_to_capture:
            layer = self.model.layers[k]
            assert isinstance(layer, MarkedLayer)
            layer._is_layer_to_capture = True


class Wrapper(nn.Module):
    """A multimodal model around a language model, as Kimi-K2.5's."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model


@pytest.mark.parametrize("boundaries", [[0, 3, 7], [1, 2, 3], [2, 4, 6]])
@pytest.mark.parametrize("model_class", [AddsOne, TakesAsGiven, MarksLayers])
def test_boundaries_are_set_exactly_whatever_the_class_adds(model_class: type[AddsOne], boundaries: list[int]) -> None:
    model = model_class()
    capture_boundaries(model, boundaries)
    assert model.capture_aux_hidden_states
    assert model.model.layers_to_capture == boundaries
    marked = [k for k, layer in enumerate(model.model.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert marked == (boundaries if model_class is MarksLayers else [])


def test_wrapper_captures_in_its_language_model() -> None:
    inner = TakesAsGiven()
    assert capturing_model(Wrapper(inner)) is inner
    assert capturing_model(inner) is inner


def test_class_without_capture_is_refused() -> None:
    with pytest.raises(CaptureError, match="class must have set_eagle3_layers_to_capture, got Wrapper"):
        capturing_model(Wrapper(nn.Identity()))


def test_class_that_keeps_its_layers_elsewhere_is_refused() -> None:
    model = AddsOne()
    del model.model.layers_to_capture
    with pytest.raises(CaptureError, match="must keep layers_to_capture in its `model`, got AddsOne"):
        capturing_model(model)


@pytest.mark.parametrize("text", ["", "3,1", "2,2", "0,8", "a,b", "1, 2", "-1,2"])
def test_boundaries_outside_the_model_are_refused(text: str) -> None:
    with pytest.raises(CaptureError, match=rf"boundaries that increase within 0\.\.7.*got {re.escape(repr(text))}"):
        parse_boundaries(text, lowest=0, num_layers=NUM_LAYERS)
    assert parse_boundaries("0,3,7", lowest=0, num_layers=NUM_LAYERS) == [0, 3, 7]


@pytest.mark.parametrize(("version", "is_captured"), [("0.5.21", False), ("0.5.12.post1", False), ("0.5.22", True)])
def test_embedding_is_captured_where_the_engine_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_captured: bool
) -> None:
    settings = replace(SETTINGS, version=version, attention_rank=1)
    monkeypatch.setattr("eagle3.capture.plugin.engine_settings", lambda server_args: settings)
    runner = SimpleNamespace(is_draft_worker=False, server_args=None, model=AddsOne())
    if is_captured:
        Recorder(tmp_path, "0,2").after_load_model(None, runner)
        assert runner.model.model.layers_to_capture == [0, 2]
        return
    with pytest.raises(
        CaptureError, match=r"within 1\.\.7.*got '0,2'.*boundary 0, the embedding, not before SGLang 0\.5\.22"
    ):
        Recorder(tmp_path, "0,2").after_load_model(None, runner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation": "EAGLE3"}, "speculation must be off, got EAGLE3"),
        ({"num_pipeline_stages": 2}, "pipeline parallel size must be 1, got 2"),
        ({"num_context_ranks": 4}, "attention context parallel size must be 1, got 4"),
        ({"two_batch_overlap": True}, "two-batch overlap must be off"),
        ({"prefill_graphs": True}, "prefill CUDA graphs must be off: Python does not run when they are replayed"),
    ],
)
def test_server_that_cannot_be_recorded_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"cannot record this server .SGLang 0\.5\.23.: {message}"):
        check_engine(replace(SETTINGS, **change))
    check_engine(SETTINGS)


def test_all_reasons_are_said_at_once() -> None:
    with pytest.raises(CaptureError, match=r"speculation must be off.*; pipeline parallel size must be 1"):
        check_engine(replace(SETTINGS, speculation="NGRAM", num_pipeline_stages=2))


def batch_of(mode: str, *requests: tuple[str, int, int]) -> SimpleNamespace:
    """Returns a prefill batch of (request id, tokens before, tokens now)."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=[request for request, _, _ in requests],
        extend_prefix_lens_cpu=[prefix for _, prefix, _ in requests],
        extend_seq_lens_cpu=[length for _, _, length in requests],
    )


def test_rows_of_others_and_answers_are_passed_over() -> None:
    ours, chunked = request_id(4, "ours"), request_id(10, "chunked")
    batch = batch_of("MIXED", ("theirs", 0, 3), (ours, 0, 4), (chunked, 6, 4), (request_id(2, "answer"), 2, 1))
    assert find_parts(batch) == [Part(ours, 4, 0, 3, 4), Part(chunked, 10, 6, 7, 4)]


def recorder_of(directory: Path, processor: object) -> Recorder:
    recorder = Recorder(directory, "1,2")
    recorder._processor = processor
    recorder._handover = Handover(directory)
    return recorder


def run_logits(recorder: Recorder, processor: object, batch: SimpleNamespace, aux: Tensor | list[Tensor] | None) -> Any:
    """Calls the hook as SGLang does; the original returns its arguments."""
    num_rows = 6  # of which one is padding
    input_ids, last = torch.arange(num_rows), torch.arange(num_rows * 2.0).view(num_rows, 2)
    return recorder.around_logits(lambda *args: args, processor, input_ids, last, "head", batch, aux)


@pytest.mark.parametrize("is_packed", [False, True])
def test_prefill_of_the_target_is_recorded(tmp_path: Path, is_packed: bool) -> None:
    processor, request = object(), request_id(5, "x")
    aux = [torch.full((6, 2), float(k)) for k in range(3)]
    recorder = recorder_of(tmp_path, processor)
    states: Tensor | list[Tensor] = torch.cat(aux, dim=1) if is_packed else aux
    returned = run_logits(recorder, processor, batch_of("EXTEND", (request, 0, 5)), states)
    assert returned[0] is processor
    assert returned[3] == "head"
    assert returned[5] is states
    sample = read_sample(wait_for_file(sample_path(tmp_path, request)))
    assert sample.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(sample.last.codes, torch.arange(10.0).view(5, 2))
    assert torch.equal(sample.aux.codes, torch.cat(aux, dim=1)[:5])


@pytest.mark.parametrize("is_packed", [False, True])
def test_states_are_coded_before_they_are_handed_over(tmp_path: Path, is_packed: bool) -> None:
    processor, request = object(), request_id(5, "x")
    aux = [torch.randn(6, 2, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    recorder = recorder_of(tmp_path, processor)
    recorder._codec = "int8"
    states: Tensor | list[Tensor] = torch.cat(aux, dim=1) if is_packed else aux
    returned = run_logits(recorder, processor, batch_of("EXTEND", (request, 0, 5)), states)
    assert returned[5] is states  # the model goes on with its own
    sample = read_sample(wait_for_file(sample_path(tmp_path, request)))
    assert sample.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert (sample.codec, sample.dtype) == ("int8", "float32")
    wanted = {
        "aux": encode(torch.cat(aux, dim=1)[:5], 2, "int8"),
        "last": encode(torch.arange(10.0).view(5, 2), 2, "int8"),
    }
    for part, coded in wanted.items():
        for name, tensor in vars(coded).items():
            assert torch.equal(getattr(getattr(sample, part), name), tensor), (part, name)


def test_codecs_are_those_that_take_a_byte_a_number() -> None:
    assert [parse_codec(text) for text in ("", "int8", "fp8")] == [None, "int8", "fp8"]
    with pytest.raises(CaptureError, match=r"EAGLE3_CAPTURE_CODEC must be int8 or fp8, or empty .*, got 'bf16'"):
        parse_codec("bf16")


def test_ids_of_a_multimodal_wrapper_are_those_of_its_batch(tmp_path: Path) -> None:
    processor, request = object(), request_id(5, "x")
    recorder = recorder_of(tmp_path, processor)
    batch = batch_of("EXTEND", (request, 0, 5))
    batch.input_ids = torch.arange(10, 16)
    rows = torch.zeros(6, 2)
    recorder.around_logits(lambda *args: args, processor, None, rows, "head", batch, [rows])
    sample = read_sample(wait_for_file(sample_path(tmp_path, request)))
    assert sample.input_ids.tolist() == [10, 11, 12, 13, 14]


def test_other_forwards_are_left_alone(tmp_path: Path) -> None:
    processor, request = object(), request_id(5, "x")
    recorder = recorder_of(tmp_path, processor)
    run_logits(recorder, object(), batch_of("EXTEND", (request, 0, 5)), None)  # a drafter's processor
    run_logits(recorder, processor, batch_of("DECODE", (request, 0, 5)), None)
    run_logits(recorder, processor, batch_of("EXTEND", ("theirs", 0, 5)), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("aux", [None, [], [torch.zeros(3, 2)]])
def test_missing_states_end_the_server(tmp_path: Path, aux: list[Tensor] | None) -> None:
    processor = object()
    recorder = recorder_of(tmp_path, processor)
    with pytest.raises(CaptureError, match="must hand over the states of 5 tokens, got"):
        run_logits(recorder, processor, batch_of("EXTEND", (request_id(5, "x"), 0, 5)), aux)


def test_draft_models_are_left_alone(tmp_path: Path) -> None:
    runner = SimpleNamespace(is_draft_worker=True)
    Recorder(tmp_path, "1,2").after_load_model(None, runner)
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.capture.plugin.engine_settings", lambda server_args: SETTINGS)
    runner = SimpleNamespace(is_draft_worker=False, server_args=None, model=AddsOne())
    with pytest.raises(CaptureError, match=rf"{DIRECTORY_VARIABLE} must be a directory, got '{tmp_path}/none'"):
        Recorder(tmp_path / "none", "1,2").after_load_model(None, runner)


def test_a_server_records_or_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[None] = []
    monkeypatch.setattr(plugin, "register_guard", lambda: guards.append(None))
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    register()
    assert len(guards) == 1
    monkeypatch.setenv(DIRECTORY_VARIABLE, "somewhere")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        register()  # sglang is not installed here
    assert len(guards) == 1


def test_imports_beside_torch_and_safetensors_alone(tmp_path: Path) -> None:
    names, todo = set(), ["torch", "safetensors"]
    while todo:  # with what they need themselves
        distribution = importlib.metadata.distribution(todo.pop())
        if distribution.name in names:
            continue
        names.add(distribution.name)
        for file in distribution.files or []:
            top = tmp_path / file.parts[0]
            if file.parts[0] != ".." and not top.exists():
                top.symlink_to(Path(str(distribution.locate_file(file.parts[0]))))
        todo += [
            re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
            for requirement in distribution.requires or []
            if "extra ==" not in requirement and _is_installed(requirement)
        ]
    assert not (tmp_path / "numpy").exists()
    (tmp_path / "eagle3").symlink_to(REPOSITORY / "eagle3")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import eagle3.capture.plugin"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _is_installed(requirement: str) -> bool:
    try:
        importlib.metadata.distribution(re.split(r"[^A-Za-z0-9_.-]", requirement)[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
