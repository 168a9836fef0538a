"""Features that other programs extracted, as a store: SpecForge's .ckpt files, vLLM's and speculators' .safetensors.

Such files do not say which layer a state is of, nor whether the last one is from before the target's final norm. Both
are asked for, and the gates of capture then hold the answers against the target.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.capture.engine import Captured
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.parity import GATE_SAMPLES, GATE_TOKENS, ParityReport, check_parity
from eagle3.capture.pipeline import find_fault
from eagle3.config import TargetConfig, UserError
from eagle3.draft.target_weights import (
    TargetWeights,
    check_capture_layers,
    load_target_config,
    load_target_weights,
    log_normaliser,
)
from eagle3.features.codec import EXACT_CODECS, Codec
from eagle3.features.manifest import DTYPES, Manifest, digest_target_config, digest_target_weights
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest

logger = logging.getLogger(__name__)

Last = Literal["after-norm", "before-norm"]
LossMask = Literal["file", "all"]
SUFFIXES = {".ckpt": "SpecForge", ".safetensors": "vLLM"}


@dataclass(frozen=True)
class Meaning:
    """What the files do not say."""

    layers: tuple[int, ...]  # boundaries, in the order of the stored states
    last: Last
    loss_mask: LossMask  # all: every token but the first is taken for the target's


@dataclass(frozen=True)
class Foreign:
    """One file, as it is."""

    input_ids: Tensor  # (T,)
    loss_mask: Tensor | None  # (T,)
    aux: Tensor  # (T, A, D)
    last: Tensor  # (T, D)


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    num_files: int
    num_written: int
    num_before: int
    faults: list[str]  # of samples that were left out, one sentence each


def find_files(source: Path) -> list[Path]:
    """Returns a directory's files of features, in order.

    Raises:
        UserError: there is none, or there are files of both kinds.
    """
    files = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1:
        raise UserError(
            f"features to import must be .ckpt or .safetensors files under one directory, got "
            f"{'none' if not kinds else 'both'} ({source}); correct the path"
        )
    return files


def check_meaning(path: Path, layers: list[int] | None, last: str | None, loss_mask: str) -> None:
    """Asks for what the first file does not say.

    Raises:
        UserError: something is missing, with all that is to be answered.
    """
    foreign = read_foreign(path)
    num_tokens, num_aux, hidden_size = foreign.aux.shape
    problems = []
    if layers is None or len(layers) != num_aux:
        problems.append(
            f"  --layers must name {num_aux} boundaries, one for each state besides the last, got {layers}: "
            f"boundary k is what enters layer k (0-based), the output of layer k-1"
        )
    if last is None:
        problems.append(
            "  --last must be after-norm or before-norm, got none: SpecForge's hidden_state is from after the target's "
            "final norm, vLLM's last layer from before it"
        )
    if foreign.loss_mask is None and loss_mask == "file":
        problems.append(
            "  --loss-mask must be all, got file: the files have none, so that prompts would count as answers; "
            "add loss_mask (T,) to them if they hold prompts"
        )
    if problems:
        raise UserError(
            f"the meaning of the states must be told; {path} has {num_tokens} tokens with {num_aux} states and a last "
            f"one, of D {hidden_size}:\n" + "\n".join(problems)
        )


def read_foreign(path: Path) -> Foreign:
    """Reads one file.

    Raises:
        UserError: it is damaged, would run code, or lacks a tensor.
    """
    try:
        if path.suffix == ".ckpt":
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            values = load_file(path)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"a file of features must be readable without running its code, got {reason!r} ({path}); "
            f"extract it again, or move it away"
        ) from error
    try:
        input_ids = values["input_ids"] if "input_ids" in values else values["token_ids"]
        if "aux_hidden_state" in values:
            last = values["hidden_state"].flatten(0, -2)  # (T, D)
            aux = values["aux_hidden_state"].flatten(0, -2).unflatten(1, (-1, last.shape[1]))  # (T, A, D)
        else:
            states = values["hidden_states"]  # (T, A + 1, D)
            aux, last = states[:, :-1], states[:, -1]
        foreign = Foreign(input_ids.flatten(), _flat_mask(values.get("loss_mask")), aux, last)
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise UserError(
            f"a file of features must hold input_ids or token_ids, and aux_hidden_state (1, T, A*D) with hidden_state "
            f"(1, T, D), or hidden_states (T, A+1, D), got {_shapes(values)} ({path}); move such files away"
        ) from error
    lengths = {len(foreign.input_ids), len(foreign.aux), len(foreign.last)}
    lengths |= set() if foreign.loss_mask is None else {len(foreign.loss_mask)}
    if len(lengths) != 1:
        raise UserError(f"ids, mask and states must be equally many, got {_shapes(values)} ({path}); extract it again")
    return foreign


def build_import_manifest(target: Path, files: list[Path], source: Path, meaning: Meaning, codec: str) -> Manifest:
    """Returns what the store of an import says of itself.

    Raises:
        UserError: the target has no such layers, or another size than the states.
    """
    config = load_target_config(target)
    check_capture_layers(meaning.layers, config["num_hidden_layers"])
    first = read_foreign(files[0])
    if first.last.shape[1] != config["hidden_size"]:
        raise UserError(
            f"states must have the target's hidden_size={config['hidden_size']}, got {first.last.shape[1]} "
            f"({files[0]}); name the target that they are of"
        )
    # fp16 has no codec of its own, and fits fp32 exactly.
    dtype = "bfloat16" if first.last.dtype == torch.bfloat16 else "float32"
    exact = EXACT_CODECS[DTYPES[dtype]]
    chosen: Codec = exact if codec == "exact" else "int8" if codec == "int8" else "fp8"
    names = "".join(f"{path.relative_to(source)} {path.stat().st_size}\n" for path in files)
    return Manifest(
        target_path=str(target.absolute()),
        target_config_digest=digest_target_config(target),
        target_revision=digest_target_weights(target),
        target_quantization=(config.get("quantization_config") or {}).get("quant_method"),
        engine="imported",
        engine_version=SUFFIXES[files[0].suffix],
        capture_layers=meaning.layers,
        dtype=dtype,
        codec=chosen,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tokenizer_digest=tokenizer_digest(load_tokenizer(str(target), trust_remote_code=False)),
        chat_template_digest="imported",
        prompts_digest=xxhash.xxh3_128_hexdigest(names.encode()),
        last_rows="supervised",
    )


def run_gates(
    files: list[Path], target_path: Path, meaning: Meaning, target: TargetWeights, manifest: Manifest
) -> ParityReport:
    """Holds the first files against the target, which is loaded for it.

    Raises:
        ParityError: a state is another layer's, or the last one does not give the target's tokens.
    """
    config = TargetConfig(path=str(target_path), dtype="bfloat16" if manifest.dtype == "bfloat16" else "float32")
    tokenizer = load_tokenizer(str(target_path), trust_remote_code=False)
    engine = TransformersEngine(config, manifest.capture_layers, tokenizer)
    captured, sequences = [], []
    for path in files[:GATE_SAMPLES]:
        sample = to_sample(path, path.stem, meaning, target, manifest, all_rows=True)
        sequences.append(sample.input_ids.tolist())
        captured.append(Captured(sample.aux_hidden_states[:GATE_TOKENS], sample.last_hidden_states[:GATE_TOKENS]))
    return check_parity(engine, config, sequences, None, captured=captured)


def to_sample(
    path: Path, sample_id: str, meaning: Meaning, target: TargetWeights, manifest: Manifest, *, all_rows: bool = False
) -> FeatureSample:
    """Reads one file as a sample; the target's head gives its log-normaliser."""
    foreign, dtype = read_foreign(path), DTYPES[manifest.dtype]
    num_tokens = foreign.input_ids.numel()
    loss_mask = torch.arange(num_tokens) > 0 if meaning.loss_mask == "all" else foreign.loss_mask
    assert loss_mask is not None, path
    rows = torch.arange(num_tokens, dtype=torch.int32) if all_rows else supervised_rows(loss_mask)
    last = foreign.last[rows].to(dtype)  # (R, D)
    if meaning.last == "before-norm":
        size, eps = (last.shape[1],), target.rms_norm_eps
        last = F.rms_norm(last.float(), size, target.norm.float().to(last.device), eps).to(dtype)
    logz = log_normaliser(target, last.to(target.lm_head.device, target.lm_head.dtype)).cpu()
    return FeatureSample(
        sample_id=sample_id,
        input_ids=foreign.input_ids.to(torch.int32),
        loss_mask=loss_mask,
        aux_hidden_states=foreign.aux.flatten(1).to(dtype),
        last_hidden_states=last,
        last_rows=rows,
        target_logz=logz,
    )


def import_features(
    source: Path,
    out: Path,
    target_path: Path,
    meaning: Meaning,
    *,
    codec: str,
    shard_bytes: int,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda num_files: None,
) -> Imported:
    """Runs the gates and writes a store, or goes on with it; `advance` is told of files done.

    Raises:
        UserError: the files, the target and the meaning do not belong together, or a gate failed.
    """
    files = find_files(source)
    check_meaning(files[0], list(meaning.layers), meaning.last, meaning.loss_mask)
    manifest = build_import_manifest(target_path, files, source, meaning, codec)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target_weights(target_path).to(device, DTYPES[manifest.dtype])
    report = run_gates(files, target_path, meaning, target, manifest)
    logger.info(
        "parity: states of layers %s are within %.2g of transformers' own, greedy tokens agree on %.1f %% of %d",
        report.capture_layers,
        max(report.relative_error),
        100 * report.agreement,
        report.num_clear,
    )
    if dry_run:
        return Imported(len(files), 0, 0, [])
    faults = []
    with FeatureWriter(out, manifest, shard_bytes) as writer:
        num_before = len(writer.stored_ids)
        for path in files:
            sample_id = str(path.relative_to(source).with_suffix(""))
            if sample_id not in writer.stored_ids:
                sample = to_sample(path, sample_id, meaning, target, manifest)
                fault = find_fault(sample)
                if fault is None:
                    writer.write(sample)
                else:
                    faults.append(f"{path}: {fault}")
            advance(1)
        return Imported(len(files), len(writer.stored_ids) - num_before, num_before, faults)


def _flat_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.flatten().bool()


def _shapes(values: object) -> str:
    if not isinstance(values, dict):
        return type(values).__name__
    kinds = {name: list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for name, one in values.items()}
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items())
