"""Inside SGLang: records the hidden states of each prefill.

SGLang loads it in each of its processes through the entry point group `sglang.srt.plugins`, and it records nothing
unless EAGLE3_CAPTURE_DIR names a directory. Two hooks: after a model is loaded its EAGLE-3 capture is switched on, and
around the target's LogitsProcessor the states of all tokens are copied, coded before that if EAGLE3_CAPTURE_CODEC
names a codec. Layers are boundaries: k is the residual stream that enters layer k, whatever the model class adds to
the ids that it is given.
"""

import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.capture.guard import register_guard
from eagle3.capture.handover import Handover
from eagle3.capture.recordable import (
    BOUNDARY_0_VERSION,
    CaptureError,
    EngineSettings,
    capture_boundaries,
    capturing_model,
    check_engine,
    parse_boundaries,
    parse_codec,
    version_numbers,
)
from eagle3.capture.staging import (
    AUX_NAME,
    BESIDE,
    CODEC_KEY,
    CODEC_VARIABLE,
    DIRECTORY_VARIABLE,
    DTYPE_KEY,
    LAST_NAME,
    LAYERS_VARIABLE,
    Part,
    tokens_of,
    write_json,
)
from eagle3.features.codec import Codec, encode

logger = logging.getLogger(__name__)

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS_FORWARD = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
# In the others a row is a token that was generated, drafted or made up.
PREFILL_MODES = {"EXTEND", "MIXED", "SPLIT_PREFILL"}


def register() -> None:
    """Registers the hooks, if EAGLE3_CAPTURE_DIR names a directory; SGLang calls it in each of its processes.

    A server that does not record may serve a drafter, and gets the guard instead.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        register_guard()
        return
    # Imported here since this module must import where SGLang is not installed.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # What is wrong with the variables is said when a model is loaded: SGLang only logs an error that is raised here.
    recorder = Recorder(Path(directory), os.environ.get(LAYERS_VARIABLE, ""), os.environ.get(CODEC_VARIABLE, ""))
    HookRegistry.register(LOAD_MODEL, recorder.after_load_model, HookType.AFTER)
    HookRegistry.register(LOGITS_FORWARD, recorder.around_logits, HookType.AROUND)


class Recorder:
    """The two hooks of one process."""

    def __init__(self, directory: Path, layers: str, codec: str = "") -> None:
        self._directory = directory
        self._layers = layers
        self._codec_name = codec
        self._codec: Codec | None = None  # None: states leave as they are
        self._processor: Any = None  # the target's own, on the ranks that write
        self._handover: Handover | None = None

    def after_load_model(self, _result: None, model_runner: Any) -> None:
        """Switches a target's capture on; a draft model is left alone.

        Raises:
            CaptureError: this server cannot be recorded, or not at these boundaries.
        """
        if model_runner.is_draft_worker:
            return
        engine = engine_settings(model_runner.server_args)
        check_engine(engine)
        model = capturing_model(model_runner.model)
        lowest = 0 if version_numbers(engine.version) >= BOUNDARY_0_VERSION else 1
        boundaries = parse_boundaries(self._layers, lowest=lowest, num_layers=len(model.model.layers))
        self._codec = parse_codec(self._codec_name)
        capture_boundaries(model, boundaries)
        logger.info(
            "eagle3 records what enters layers %s of %s into %s, %s (attention rank %d of %d, %s)",
            boundaries,
            type(model).__name__,
            self._directory,
            f"coded as {self._codec}" if self._codec else "as it is",
            engine.attention_rank,
            engine.num_attention_ranks,
            "which writes" if engine.attention_rank == 0 else "which does not write",
        )
        if engine.attention_rank > 0:
            return
        if not self._directory.is_dir():
            raise CaptureError(f"{DIRECTORY_VARIABLE} must be a directory, got {str(self._directory)!r}; make it")
        self._handover = Handover(self._directory)
        self._processor = model.logits_processor
        marker = {
            "boundaries": boundaries,
            "engine_version": engine.version,
            "model_class": type(model).__name__,
            "hidden_size": model_runner.model_config.hidden_size,
            "dtype": str(model_runner.model_config.dtype).removeprefix("torch."),
            "tensor_parallel_rank": engine.tensor_parallel_rank,
            "pid": os.getpid(),
        }
        write_json(self._directory / f"plugin-{os.getpid()}.json", marker)

    def around_logits(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Tensor | None,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Tensor | list[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Copies the rows of our requests, if this is a prefill of the target, and goes on."""
        if processor is self._processor and logits_metadata.forward_mode.name in PREFILL_MODES:
            parts = find_parts(logits_metadata)
            if parts:
                # A multimodal wrapper hands over embeddings in their place, and keeps the ids in its batch.
                ids = input_ids if input_ids is not None else logits_metadata.input_ids
                self._record(parts, ids, hidden_states, aux_hidden_states)
        return original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs
        )

    def _record(
        self, parts: list[Part], input_ids: Tensor, last: Tensor, aux: Tensor | list[Tensor] | None
    ) -> None:  # (N,), (N, D), and (N, A*D) or A of (N, D)
        pieces = [aux] if isinstance(aux, Tensor) else aux or []
        tensors = {"input_ids": input_ids, LAST_NAME: last}
        tensors |= {f"{AUX_NAME}.{i}": piece for i, piece in enumerate(pieces)}
        num_rows = parts[-1].first_row + parts[-1].num_rows  # what comes after is padding or somebody else's
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if not pieces or any(shape[0] < num_rows for shape in shapes.values()):
            raise CaptureError(
                f"the engine must hand over the states of {num_rows} tokens, got {shapes}; "
                f"start the server without options that split tokens over ranks"
            )
        assert self._handover is not None
        rows = {name: tensor[:num_rows] for name, tensor in tensors.items()}
        if self._codec is None:
            self._handover.submit(parts, rows)
        else:
            metadata = {CODEC_KEY: self._codec, DTYPE_KEY: str(last.dtype).removeprefix("torch.")}
            self._handover.submit(parts, code_rows(rows, self._codec), metadata)


def engine_settings(server_args: Any) -> EngineSettings:
    """Reads what this server does, in SGLang 0.5.11 to 0.5.23."""
    from sglang.srt.distributed import parallel_state

    try:
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
    except ImportError:  # before 0.5.14
        prefill_graphs = not (server_args.disable_cuda_graph or server_args.disable_piecewise_cuda_graph)
    else:
        prefill_graphs = not check_cuda_graph_backend("prefill", "disabled")
    return EngineSettings(
        version=version("sglang"),
        speculation=server_args.speculative_algorithm,
        num_pipeline_stages=server_args.pp_size,
        num_context_ranks=server_args.attn_cp_size,
        two_batch_overlap=server_args.enable_two_batch_overlap,
        prefill_graphs=prefill_graphs,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        attention_rank=parallel_state.get_attn_tensor_model_parallel_rank(),
        num_attention_ranks=parallel_state.get_attn_tensor_model_parallel_world_size(),
    )


def code_rows(tensors: dict[str, Tensor], codec: Codec) -> dict[str, Tensor]:
    """Codes the states of a forward where they lie; wider numbers first, so that each is aligned in its file."""
    hidden_size = tensors[LAST_NAME].shape[1]
    coded = {name: encode(each, hidden_size, codec) for name, each in tensors.items() if name != "input_ids"}
    beside = {f"{name}.{kind}": getattr(each, kind) for name, each in coded.items() for kind in BESIDE}
    return {"input_ids": tensors["input_ids"], **beside, **{name: each.codes for name, each in coded.items()}}


def find_parts(batch: Any) -> list[Part]:
    """Returns the rows of our requests in a prefill batch; lists on the host, so nothing waits for the device."""
    parts = []
    first_row = 0
    for rid, start, num_rows in zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False):
        num_tokens = tokens_of(rid)
        # A row at or after num_tokens is a token of the answer, decoded in a mixed batch.
        if num_tokens is not None and start < num_tokens and num_rows:
            parts.append(Part(rid, num_tokens, start, first_row, num_rows))
        first_row += num_rows
    return parts
