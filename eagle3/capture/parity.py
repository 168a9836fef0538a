"""Gates: are these the states, and is this the model.

A wrong boundary or a state from before the final norm trains a drafter that looks well and is not accepted; both are
cheap to see before the first sample is stored.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.capture.engine import Captured, Engine, TopTwo
from eagle3.capture.inprocess import TransformersEngine
from eagle3.config import TargetConfig, UserError
from eagle3.draft.target_weights import (
    check_capture_layers,
    default_capture_layers,
    load_target_config,
    load_target_weights,
)
from eagle3.prompts.tokenizers import load_tokenizer
from eagle3.words import counted, readable_bytes

logger = logging.getLogger(__name__)

GATE_SAMPLES = 8
GATE_TOKENS = 192  # of each sample: prompt and the beginning of the answer
REFERENCE_SAMPLES = 4  # of them, whose states are compared with transformers': a large target runs on CPU cores then
REFERENCE_MEMORY = 2.5  # of the weights' bytes on disk, to hold them in fp32 and run them
# Mean over rows, of a row's norm. In one process SmolLM2's 30 layers in bf16 show 0.0005 to 0.0007, another batch's
# rounding included; a random DeepSeek-V3 in bf16, whose experts flip, 0.08 between SGLang and transformers, and 0.5
# to the next layer.
MAX_RELATIVE_ERROR = {"bfloat16": 0.15, "float32": 1e-3}
MIN_AGREEMENT = 0.99
WANTED_CLEAR_POSITIONS = 200
NOISE_QUANTILE = 0.99


class ParityError(UserError):
    """The captured states are not the target's: the run must not go on."""


@dataclass(frozen=True)
class TargetFacts:
    """What capturing depends on."""

    capture_layers: list[int]  # boundaries
    hidden_size: int  # D
    vocab_size: int  # V
    max_tokens: int  # of the longest sequence that the target was made for
    quantization: str | None  # quant_method


@dataclass(frozen=True)
class ParityReport:
    """What the gates saw."""

    num_samples: int
    num_positions: int
    capture_layers: list[int]
    states_skipped: str | None  # why the states were not compared with transformers'; null: they were
    cosine: list[float]  # mean over rows, captured state against transformers' hidden_states; the last state at the end
    relative_error: list[float]  # mean over rows, likewise
    # 99th percentile of the likeliest tokens' change between batch 1 and all samples, see `_noise`; of coded states, at
    # least what rounding may change
    logit_noise: float
    num_clear: int  # positions whose top-two margin is above twice the noise
    agreement: float  # of argmax(lm_head(last)) with the engine's greedy token, at clear positions
    agreement_everywhere: float  # likewise, at all positions
    num_recorded: int  # clear positions whose next token was generated greedily
    recorded_agreement: float | None  # of that token with the engine's greedy token; null without any


def read_target(target: TargetConfig) -> TargetFacts:
    """Reads from a target's config what capturing depends on, without loading the target.

    Raises:
        UserError: the config cannot be read, or has no such layers as `target.capture_layers`.
    """
    config = load_target_config(Path(target.path))
    layers = target.capture_layers
    if layers is None:
        layers = default_capture_layers(config["num_hidden_layers"])
    check_capture_layers(layers, config["num_hidden_layers"])
    return TargetFacts(
        capture_layers=layers,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_tokens=config["max_position_embeddings"],
        quantization=(config.get("quantization_config") or {}).get("quant_method"),
    )


def check_parity(
    engine: Engine,
    target: TargetConfig,
    sequences: Sequence[Sequence[int]],
    greedy_masks: Sequence[Sequence[bool]] | None,
    captured: Sequence[Captured] | None = None,
) -> ParityReport:
    """Compares what is captured from the first samples with transformers' own outputs, and with the target's files.

    `greedy_masks` mark the tokens of `sequences` that the engine generated greedily, if it did; `captured` are states
    of the first GATE_TOKENS of each sequence, where others than the engine's are to be compared.

    Raises:
        ParityError: a state is another layer's, or lm_head(last) does not give the engine's greedy tokens.
    """
    gate_ids = [list(sequence[:GATE_TOKENS]) for sequence in sequences[:GATE_SAMPLES]]
    captured = list(captured or engine.capture(gate_ids))
    reference = engine if isinstance(engine, TransformersEngine) else load_reference(target, engine.capture_layers)
    cosine: list[float] = []
    relative_error: list[float] = []
    if isinstance(reference, TransformersEngine):
        cosine, relative_error = _compare_states(reference, target, gate_ids[:REFERENCE_SAMPLES], captured)

    # The head as its file has it, not as the engine does: this also tells whether it is the same model.
    lm_head = load_target_weights(Path(target.path)).lm_head
    last = torch.cat([each.last_hidden_states for each in captured])  # (N, D)
    highest = (last @ lm_head.to(last.dtype).T).max(dim=-1)  # (N,) of the logits that the states give
    alone, batched = engine.top_two(gate_ids, together=False), engine.top_two(gate_ids, together=True)
    logit_noise = max(_noise(alone, batched, highest.values), _coding_noise(captured, lm_head, highest.indices))
    greedy = torch.cat([top.ids[:, 0] for top in alone])  # (N,)
    is_clear = torch.cat([top.logprobs[:, 0] - top.logprobs[:, 1] for top in alone]) > 2 * logit_noise  # (N,)
    is_same = highest.indices == greedy  # (N,)
    recorded = _recorded(gate_ids, greedy_masks, is_clear)
    next_ids = torch.tensor([token for ids in gate_ids for token in [*ids[1:], 0]])  # (N,)

    report = ParityReport(
        num_samples=len(gate_ids),
        num_positions=len(greedy),
        capture_layers=engine.capture_layers,
        states_skipped=reference if isinstance(reference, str) else None,
        cosine=cosine,
        relative_error=relative_error,
        logit_noise=logit_noise,
        num_clear=int(is_clear.sum()),
        agreement=_share(is_same, is_clear),
        agreement_everywhere=_share(is_same, torch.ones_like(is_clear)),
        num_recorded=int(recorded.sum()),
        recorded_agreement=_share(next_ids == greedy, recorded) if recorded.any() else None,
    )
    _check_agreement(report)
    return report


def load_reference(target: TargetConfig, capture_layers: Sequence[int]) -> TransformersEngine | str:
    """Loads the target into this process, beside a server, to compare with; returns why not where it cannot."""
    path = Path(target.path)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    needed, free = round(REFERENCE_MEMORY * num_bytes), available_memory()
    quantization = read_target(target).quantization
    if quantization is not None:
        return f"the target is quantised ({quantization}), which transformers does not run on a CPU"
    if needed > free:
        return f"transformers needs {readable_bytes(needed)} of memory for this target, {readable_bytes(free)} are free"
    try:
        # On CPU cores: the server has the GPU.
        tokenizer = load_tokenizer(target.path, target.trust_remote_code)
        return TransformersEngine(replace(target, device="cpu"), capture_layers, tokenizer)
    except UserError as error:
        return str(error)


def available_memory() -> int:
    """Returns the bytes of memory that this process may still take, as the machine and its control group say."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free


def _compare_states(
    reference: TransformersEngine, target: TargetConfig, gate_ids: list[list[int]], captured: list[Captured]
) -> tuple[list[float], list[float]]:
    """Returns mean cosines and relative errors, one per captured layer and one for the last state."""
    captured = captured[: len(gate_ids)]
    own = [reference.hidden_states(ids) for ids in gate_ids]
    boundaries = [torch.cat(states).float() for states in zip(*own, strict=True)]  # L+1 of (N, D)
    aux = torch.cat([each.aux_hidden_states for each in captured]).float()  # (N, A*D)
    last = torch.cat([each.last_hidden_states for each in captured]).float()  # (N, D)
    wanted = [*reference.capture_layers, len(boundaries) - 1]
    states = [*aux.split(last.shape[1], dim=1), last]
    cosines, errors = [], []
    for layer, state, rounding in zip(wanted, states, _coding_errors(captured, states), strict=True):
        distances = [float(((state - own_).norm(dim=1) / own_.norm(dim=1)).mean()) for own_ in boundaries]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        limit = MAX_RELATIVE_ERROR[target.dtype] + rounding
        if distances[nearest] < distances[layer] or not distances[layer] <= limit:
            name = f"captured layer {layer}" if layer < wanted[-1] else "the last hidden state"
            raise ParityError(
                f"{name} must be the target's hidden_states[{layer}] within a relative error of {limit}, got "
                f"{distances[layer]:.3g}, and the nearest is hidden_states[{nearest}] at {distances[nearest]:.3g} "
                f"({target.path}); this model class needs support of its own, report it"
            )
        cosines.append(float(torch.cosine_similarity(state, boundaries[layer], dim=1).mean()))
        errors.append(distances[layer])
    return cosines, errors


def _coding_errors(captured: list[Captured], states: list[Tensor]) -> list[float]:  # A+1 of (N, D)
    """Returns the relative error of each state that its codec may cause, mean over rows; 0 of states as they were."""
    pairs = [(each.aux_steps, each.last_steps) for each in captured]
    steps = [torch.cat([aux, last], dim=1) for aux, last in pairs if aux is not None and last is not None]
    if not steps:
        return [0.0] * len(states)
    # Half a step at each number, at most.
    sized = zip(torch.cat(steps).split(states[0].shape[1], dim=1), states, strict=True)
    return [float((step.norm(dim=1) / 2 / state.norm(dim=1)).mean()) for step, state in sized]


def _coding_noise(captured: list[Captured], lm_head: Tensor, ids: Tensor) -> float:  # (V, D), (N,)
    """Returns how far rounding by a codec moves the logits of `ids`: twice its deviation, 99th percentile."""
    steps = [each.last_steps for each in captured if each.last_steps is not None]
    if not steps:
        return 0.0
    # Rounding is even within a step, whose variance is a twelfth of its square.
    moved = 2 * (torch.cat(steps) * lm_head[ids].float()).norm(dim=1) / math.sqrt(12)  # (N,)
    return float(moved.kthvalue(max(1, round(NOISE_QUANTILE * moved.numel()))).values)


def _noise(alone: Sequence[TopTwo], batched: Sequence[TopTwo], highest: Tensor) -> float:  # (N,) logits
    """Returns the 99th percentile of the likeliest tokens' change with the batch, at least the rounding of a logit.

    At least, since an engine whose prefill does not depend on the batch still rounds otherwise when it decodes.
    """
    changes = torch.cat(
        [(a.logprobs - b.logprobs)[a.ids == b.ids].abs() for a, b in zip(alone, batched, strict=True)]
    )  # (up to 2N,)
    rounding = torch.finfo(highest.dtype).eps * float(highest.abs().float().mean())
    rank = max(1, round(NOISE_QUANTILE * changes.numel()))
    return max(rounding, float(changes.kthvalue(rank).values) if changes.numel() else 0.0)


def _recorded(
    gate_ids: list[list[int]], greedy_masks: Sequence[Sequence[bool]] | None, is_clear: Tensor
) -> Tensor:  # (N,)
    """Returns the clear positions whose next token was generated greedily."""
    if greedy_masks is None:
        return torch.zeros_like(is_clear)
    flags = [flag for ids, mask in zip(gate_ids, greedy_masks, strict=False) for flag in [*mask[1 : len(ids)], False]]
    return is_clear & torch.tensor(flags)


def _share(matches: Tensor, where: Tensor) -> float:  # (N,), (N,)
    return float((matches & where).sum() / where.sum().clamp(min=1))


def _check_agreement(report: ParityReport) -> None:
    if report.num_clear < WANTED_CLEAR_POSITIONS:
        logger.warning(
            "parity: %s clear of noise, %d wanted: the gate says little about this target",
            counted(report.num_clear, "position"),
            WANTED_CLEAR_POSITIONS,
        )
    for what, share, count in (
        ("argmax(lm_head(last)), with the head of the target's files,", report.agreement, report.num_clear),
        ("the answers' recorded tokens", report.recorded_agreement, report.num_recorded),
    ):
        if share is not None and count and share < MIN_AGREEMENT:
            raise ParityError(
                f"{what} must be the engine's greedy tokens on {MIN_AGREEMENT:.0%} of the positions whose margin is "
                f"above twice the noise of {report.logit_noise:.3g}, got {share:.1%} of {count}; the engine does not "
                f"run the model that these files hold, or the states are not its last ones"
            )
