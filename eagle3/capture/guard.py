"""Inside SGLang: refuses to serve a drafter that would not run as it was trained.

SGLang skips tensors that it does not know, leaves random what it does not find, and captures what the layer ids say;
all of that costs acceptance and none of it is an error. With this package beside SGLang it is one: each weight of the
file must arrive, each parameter must be filled, and the boundaries must be those in the drafter's config.json.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
DRAFTER_CLASS = "LlamaForCausalLMEagle3"
RECORD_KEY = "eagle3"  # of config.json, as the exporter writes it; its module needs more than a server has
CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_PARAMETER = ("d2t", "t2d", "rotary_emb.inv_freq")  # SGLang makes something else of them


class GuardError(RuntimeError):
    """The server would not run the drafter as it was trained; raised while it starts, it ends the server."""


def register_guard() -> None:
    """Registers the hooks, which do nothing where no EAGLE-3 drafter is served."""
    # Imported here since this module must import where SGLang is not installed.
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    guard = Guard()
    HookRegistry.register(f"{RUNNER}.load_model", guard.around_load_model, HookType.AROUND)
    if hasattr(ModelRunner, "init_attention_backends"):  # where the target is told its layers; SGLang 0.5.23 has it
        HookRegistry.register(f"{RUNNER}.init_attention_backends", guard.after_init_attention_backends, HookType.AFTER)


class Guard:
    """The hooks of one process."""

    def around_load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Watches a drafter's weights while they are loaded.

        Raises:
            GuardError: some are not used, or some parameters get none.
        """
        if not runner.is_draft_worker or DRAFTER_CLASS not in (runner.model_config.hf_config.architectures or ()):
            return original(runner, *args, **kwargs)
        check_algorithm(runner.server_args.speculative_algorithm)
        from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

        load_weights = LlamaForCausalLMEagle3.load_weights

        def watched(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
            num_tensors = load_and_check(load_weights, model, weights)
            logger.info("eagle3 guard: the drafter's %d tensors are all used, and fill it", num_tensors)

        LlamaForCausalLMEagle3.load_weights = watched
        try:
            return original(runner, *args, **kwargs)
        finally:
            LlamaForCausalLMEagle3.load_weights = load_weights

    def after_init_attention_backends(self, _result: None, runner: Any) -> None:
        """Compares what a target was told to capture with what its drafter was trained on.

        Raises:
            GuardError: they differ.
        """
        path = runner.server_args.speculative_draft_model_path
        if runner.is_draft_worker or runner.server_args.speculative_algorithm != "EAGLE3" or path is None:
            return
        trained = trained_boundaries(Path(path))
        captured = captured_boundaries(runner.model)
        if trained is None:
            logger.warning("eagle3 guard: %s does not say which layers it was trained on; it gets %s", path, captured)
            return
        check_boundaries(captured, trained, type(runner.model).__name__)
        logger.info("eagle3 guard: the drafter gets the boundaries that it was trained on, %s", captured)


def check_algorithm(algorithm: str | None) -> None:
    """Raises a GuardError if an EAGLE-3 drafter is served as something else."""
    if algorithm != "EAGLE3":
        raise GuardError(
            f"--speculative-algorithm must be EAGLE3 for a drafter of class {DRAFTER_CLASS}, got {algorithm}: with it "
            f"the drafter gets one state instead of three, and nothing is accepted"
        )


def load_and_check(
    load_weights: Callable[[Any, Iterable[tuple[str, Tensor]]], None], model: Any, weights: Iterable[tuple[str, Tensor]]
) -> int:
    """Loads weights into parameters that are NaN before; returns how many tensors there were.

    Raises:
        GuardError: a tensor changed nothing, or a parameter was not filled; all are named.
    """
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith("embed_tokens.weight")}
    if any(parameter.dtype not in CHECKED_DTYPES for parameter in parameters.values()):
        logger.warning("eagle3 guard: the drafter is quantised; whether its tensors are used is not checked")
        load_weights(model, weights)
        return 0
    for parameter in parameters.values():
        parameter.data.fill_(math.nan)
    names: list[str] = []
    unused: list[str] = []

    def count_missing() -> int:
        return sum(int(parameter.data.isnan().sum()) for parameter in parameters.values())

    def watched() -> Iterator[tuple[str, Tensor]]:
        missing = count_missing()
        for name, tensor in weights:
            names.append(name)
            yield name, tensor
            left = count_missing()
            is_checked = "embed_tokens" not in name and not any(part in name for part in NO_PARAMETER)
            if is_checked and left == missing and not bool(tensor.isnan().any()):
                unused.append(name)
            missing = left

    load_weights(model, watched())
    problems = []
    if unused:
        problems.append(f"every tensor of the file must be one that SGLang uses, got {', '.join(unused)} as well")
    # What the target lends after loading may be empty until then.
    lent = {"lm_head.weight"} if getattr(model, "load_lm_head_from_target", False) else set()
    empty = [name for name, p in parameters.items() if name not in lent and bool(p.data.isnan().any())]
    if empty:
        problems.append(f"every parameter must be in the file, got nothing, or NaN, for {', '.join(empty)}")
    if model.config.draft_vocab_size not in (None, model.config.vocab_size) and model.hot_token_id is None:
        problems.append("a draft vocabulary of its own must come with d2t, got none")
    if problems:
        raise GuardError(
            f"eagle3 guard: the drafter would not run as it was trained: {'; '.join(problems)}; export it again, or "
            f"run `python -m eagle3 doctor` on it"
        )
    return len(names)


def trained_boundaries(drafter: Path) -> list[int] | None:
    """Returns the boundaries that an exported drafter was trained on; None for others' drafters."""
    path = drafter / "config.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8")).get(RECORD_KEY)
    return list(record["capture_layers"]) if isinstance(record, dict) and "capture_layers" in record else None


def captured_boundaries(model: Any) -> list[int]:
    """Returns the boundaries that a target has been told to capture."""
    inner: Any = getattr(model, "language_model", None)  # Kimi-K2.5 delegates to DeepSeek's class so
    body = (inner if hasattr(inner, "set_eagle3_layers_to_capture") else model).model
    # Qwen's MoE classes and a few others ask each layer instead of the list.
    marked = [k for k, layer in enumerate(body.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return marked or sorted(body.layers_to_capture)


def check_boundaries(captured: list[int], trained: list[int], model_class: str) -> None:
    """Raises a GuardError if a target captures other boundaries than its drafter was trained on."""
    if captured != trained:
        raise GuardError(
            f"eagle3 guard: the boundaries that {model_class} captures must be {trained}, which the drafter was "
            f"trained on, got {captured}; export it for this class and version of SGLang, or correct "
            f"eagle_aux_hidden_state_layer_ids in its config.json"
        )
