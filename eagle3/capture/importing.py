"""Features that other programs extracted, as a store: SpecForge's .ckpt files, vLLM's and speculators' .safetensors.

Such files do not say which layer a state is of, nor whether the last one is from before the target's final norm. Both
are asked for, and the gates of capture then hold the answers against the target.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import xxhash

from eagle3.capture.engine import Captured
from eagle3.capture.faults import find_fault
from eagle3.capture.foreign import SUFFIXES, Foreign, find_files, id_of, kind_of, read_foreign
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.parity import GATE_SAMPLES, GATE_TOKENS, ParityError, ParityReport, check_parity
from eagle3.config import TargetConfig, UserError
from eagle3.draft.target_weights import (
    TargetWeights,
    check_capture_layers,
    load_target_config,
    load_target_weights,
    log_normaliser,
)
from eagle3.features.codec import CodecName, codec_named
from eagle3.features.manifest import (
    DTYPES,
    MANIFEST_NAME,
    Manifest,
    check_same_capture,
    digest_target_config,
    digest_target_weights,
    read_manifest,
)
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest
from eagle3.words import counted

logger = logging.getLogger(__name__)

Last = Literal["after-norm", "before-norm"]
LossMask = Literal["file", "all"]


@dataclass(frozen=True)
class Meaning:
    """What the files do not say."""

    layers: tuple[int, ...]  # boundaries, in the order of the stored states
    last: Last
    loss_mask: LossMask  # all: every token but the first is taken for the target's


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    num_files: int
    num_written: int
    num_before: int
    faults: list[str]  # of samples that were left out, one sentence each


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
            f"the meaning of the states must be told; {path} has {counted(num_tokens, 'token')} with "
            f"{counted(num_aux, 'state')} and a last "
            f"one, of D {hidden_size}:\n" + "\n".join(problems)
        )


def build_import_manifest(
    target: Path, files: list[Path], source: Path, meaning: Meaning, codec: CodecName
) -> Manifest:
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
    dtype = dtype_of(first)
    names = "".join(f"{path.relative_to(source)} {path.stat().st_size}\n" for path in files)
    return Manifest(
        target_path=str(target.absolute()),
        target_config_digest=digest_target_config(target),
        target_revision=digest_target_weights(target),
        target_quantization=(config.get("quantization_config") or {}).get("quant_method"),
        engine="imported",
        engine_version=SUFFIXES[kind_of(files[0])],
        capture_layers=meaning.layers,
        dtype=dtype,
        codec=codec_named(codec, DTYPES[dtype]),
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tokenizer_digest=tokenizer_digest(load_tokenizer(str(target), trust_remote_code=False)),
        chat_template_digest="imported",
        prompts_digest=xxhash.xxh3_128_hexdigest(names.encode()),
        last_rows="supervised",
    )


def dtype_of(foreign: Foreign) -> str:
    """Returns the dtype that a file's states are stored in: fp16 has no codec of its own, and fits fp32 exactly."""
    return "bfloat16" if foreign.last.dtype == torch.bfloat16 else "float32"


def run_gates(
    files: list[Path], target_path: Path, meaning: Meaning, target: TargetWeights, manifest: Manifest
) -> ParityReport:
    """Holds some of the files, from the first to the last, against the target, which is loaded for it.

    Raises:
        ParityError: a state is another layer's, or the last one does not give the target's tokens.
    """
    config = TargetConfig(path=str(target_path), dtype="bfloat16" if manifest.dtype == "bfloat16" else "float32")
    tokenizer = load_tokenizer(str(target_path), trust_remote_code=False)
    engine = TransformersEngine(config, manifest.capture_layers, tokenizer)
    captured, sequences = [], []
    count = min(GATE_SAMPLES, len(files))
    spread = [files[number * (len(files) - 1) // max(1, count - 1)] for number in range(count)]
    for path in [*spread[::2], *spread[1::2]]:  # the first half of them has its states compared: from everywhere too
        try:
            sample = to_sample(path, path.stem, meaning, target, manifest, all_rows=True)
        except UserError:  # will be left out and named
            continue
        if find_fault(sample) is not None:
            continue
        sequences.append(sample.input_ids.tolist())
        captured.append(Captured(sample.aux_hidden_states[:GATE_TOKENS], sample.last_hidden_states[:GATE_TOKENS]))
    if not sequences:
        raise UserError(
            f"some of the files must be readable, got none of {count} ({files[0].parent}); extract them again"
        )
    try:
        return check_parity(engine, config, sequences, None, captured=captured)
    except ParityError as error:  # its remedy is for capture
        raise ParityError(
            f"{str(error).rpartition(';')[0]}; correct --layers, --last or --target to those of the extraction"
        ) from error


def to_sample(
    path: Path, sample_id: str, meaning: Meaning, target: TargetWeights, manifest: Manifest, *, all_rows: bool = False
) -> FeatureSample:
    """Reads one file as a sample; the target's head gives its log-normaliser.

    Raises:
        UserError: the file is damaged, or not of the kind that the manifest says.
    """
    foreign, dtype = read_foreign(path), DTYPES[manifest.dtype]
    _check_kind(path, foreign, meaning, manifest)
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
    codec: CodecName,
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
    if (out / MANIFEST_NAME).exists():
        check_same_capture(read_manifest(out), manifest, out)  # before the gates, which load the target
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
            sample_id = id_of(path, source)
            if sample_id not in writer.stored_ids:
                try:
                    sample = to_sample(path, sample_id, meaning, target, manifest)
                    fault = find_fault(sample)
                except UserError as error:
                    fault = str(error)
                if fault is None:
                    writer.write(sample)
                else:
                    faults.append(f"{path}: {fault}")
            advance(1)
        return Imported(len(files), len(writer.stored_ids) - num_before, num_before, faults)


def _check_kind(path: Path, foreign: Foreign, meaning: Meaning, manifest: Manifest) -> None:
    """Compares a file with the first one, whose kind the manifest has."""
    problems = []
    wanted = (len(manifest.capture_layers), manifest.hidden_size)
    if foreign.aux.shape[1:] != wanted:
        problems.append(f"{foreign.aux.shape[1]} states of {foreign.aux.shape[2]} where {wanted[0]} of {wanted[1]} are")
    if dtype_of(foreign) != manifest.dtype:
        problems.append(f"states in {foreign.last.dtype} where {manifest.dtype} is")
    if foreign.loss_mask is None and meaning.loss_mask == "file":
        problems.append("no loss_mask")
    low, high = int(foreign.input_ids.min()), int(foreign.input_ids.max())
    if low < 0 or high >= manifest.vocab_size:
        problems.append(f"token ids from {low} to {high} in a vocabulary of {manifest.vocab_size}")
    if problems:
        raise UserError(
            f"files of features must be like the first one, and of the target, got {'; '.join(problems)} ({path}); "
            f"import what differs into a store of its own"
        )
