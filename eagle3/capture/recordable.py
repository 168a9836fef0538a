"""What of SGLang can be recorded: which settings, which classes of models, and which boundaries of theirs.

Runs inside SGLang, but imports nothing of it: what is looked at comes as an argument.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.capture.staging import CODEC_VARIABLE, LAYERS_VARIABLE
from eagle3.features.codec import LARGEST_CODE, Codec

# Before it, Llama's class fails at the first forward: there is no residual yet before layer 0.
BOUNDARY_0_VERSION = (0, 5, 22)


class CaptureError(RuntimeError):
    """The server cannot record what it was asked to; raised while a model is loaded or run, it ends the server."""


@dataclass(frozen=True)
class EngineSettings:
    """What decides whether this server can be recorded, and by which of its processes."""

    version: str
    speculation: str | None  # speculative algorithm
    num_pipeline_stages: int
    num_context_ranks: int  # that share the tokens of one prompt
    two_batch_overlap: bool
    prefill_graphs: bool  # CUDA graphs replay prefills
    tensor_parallel_rank: int
    attention_rank: int  # of the ranks that hold the same rows; 0 writes
    num_attention_ranks: int


def check_engine(engine: EngineSettings) -> None:
    """Refuses a server that would record nothing, or not everything.

    Raises:
        CaptureError: all that is in the way.
    """
    problems = []
    if engine.speculation is not None:
        problems.append(
            f"speculation must be off, got {engine.speculation}: with it the engine captures for the drafter that it "
            f"serves; start the server without --speculative-algorithm"
        )
    if engine.num_pipeline_stages > 1:
        problems.append(
            f"pipeline parallel size must be 1, got {engine.num_pipeline_stages}: the boundaries lie on several "
            f"ranks; use --tp-size"
        )
    if engine.num_context_ranks > 1:
        problems.append(
            f"attention context parallel size must be 1, got {engine.num_context_ranks}: each rank has some of a "
            f"prompt's tokens; use --tp-size"
        )
    if engine.two_batch_overlap:
        problems.append("two-batch overlap must be off: it bypasses capture; drop --enable-two-batch-overlap")
    if engine.prefill_graphs:
        problems.append(
            "prefill CUDA graphs must be off: Python does not run when they are replayed; add "
            "--cuda-graph-backend-prefill disabled (--disable-piecewise-cuda-graph before SGLang 0.5.14)"
        )
    if problems:
        raise CaptureError(f"eagle3 cannot record this server (SGLang {engine.version}): " + "; ".join(problems))


def capturing_model(model: Any) -> Any:
    """Returns the model that captures: a multimodal wrapper's language model, else the model itself.

    Raises:
        CaptureError: its class has no EAGLE-3 capture, or keeps the layers of it where we do not know them.
    """
    inner = getattr(model, "language_model", None)  # Kimi-K2.5 delegates to DeepSeek's class so
    candidate = inner if hasattr(inner, "set_eagle3_layers_to_capture") else model
    if not hasattr(candidate, "set_eagle3_layers_to_capture"):
        raise CaptureError(
            f"the target's class must have set_eagle3_layers_to_capture, got {type(model).__name__}: "
            f"this version of SGLang cannot capture it, nor serve it with an EAGLE-3 drafter; use one that can"
        )
    if not hasattr(getattr(candidate, "model", None), "layers_to_capture"):
        raise CaptureError(
            f"the target's class must keep layers_to_capture in its `model`, got {type(candidate).__name__}; "
            f"add the class to eagle3/capture/recordable.py"
        )
    return candidate


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns (0, 5, 12) of `0.5.12.post1`."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    assert numbers is not None, version
    return tuple(int(number) for number in numbers[0].split("."))


def parse_boundaries(text: str, *, lowest: int, num_layers: int) -> list[int]:
    """Reads boundaries such as `3,31,59`.

    Raises:
        CaptureError: they are not increasing numbers within lowest..num_layers-1.
    """
    boundaries = [int(number) for number in text.split(",")] if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) else []
    increasing = all(low < high for low, high in itertools.pairwise(boundaries))
    if not boundaries or not increasing or boundaries[0] < lowest or boundaries[-1] >= num_layers:
        raise CaptureError(
            f"{LAYERS_VARIABLE} must be boundaries that increase within {lowest}..{num_layers - 1}, such as 3,31,59, "
            f"got {text!r}; boundary {num_layers}, the last layer's output, cannot be captured, and boundary 0, the "
            f"embedding, not before SGLang {'.'.join(map(str, BOUNDARY_0_VERSION))}"
        )
    return boundaries


def parse_codec(text: str) -> Codec | None:
    """Reads a codec's name; None for none.

    Raises:
        CaptureError: there is no such codec.
    """
    if not text:
        return None
    for codec in LARGEST_CODE:
        if codec == text:
            return codec
    raise CaptureError(
        f"{CODEC_VARIABLE} must be {' or '.join(LARGEST_CODE)}, or empty for states as they are, got {text!r}"
    )


def capture_boundaries(model: Any, boundaries: Sequence[int]) -> None:
    """Switches a model's capture on, at exactly these boundaries."""
    # The setter switches capture on and marks layers; most classes add 1 to each id, DeepSeek's since 0.5.13 do not.
    model.set_eagle3_layers_to_capture([boundary - 1 for boundary in boundaries])
    model.model.layers_to_capture = list(boundaries)
    # Qwen's MoE classes and a few others ask each layer instead of the list.
    if any(getattr(layer, "_is_layer_to_capture", False) for layer in model.model.layers):
        for k, layer in enumerate(model.model.layers):
            layer._is_layer_to_capture = k in boundaries
