"""What a store says of itself: target, engine, layers, digests.

Two captures may share a store only if every field agrees but the commit and the facts of the first run's engine,
which are notes.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from eagle3.config import UserError
from eagle3.features.codec import CODE_DTYPES, EXACT_CODECS, LARGEST_CODE, Codec
from eagle3.features.location import Location

FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MANIFEST_NAME = "manifest.json"
ANSWERS_NAME = "answers.jsonl"  # beside the samples, or in a writer's own directory: what the target answered
CODED_BEFORE = "coded_before"  # in engine_facts: lossy codecs that a store's states went through before its own
PROVENANCE_ONLY = {"engine_facts", "git_commit"}
TEXTS = (
    "target_path",
    "target_config_digest",
    "target_revision",
    "engine",
    "engine_version",
    "tokenizer_digest",
    "chat_template_digest",
    "prompts_digest",
)
TEXTS_OR_NULL = ("target_quantization", "git_commit")
# Written by whatever saved the config last; says nothing about the model.
VOLATILE_CONFIG_KEYS = {"transformers_version", "_name_or_path"}
# Ends and middle of each weight file: a fine-tune moves every tensor, and 1 TB of weights is not read twice.
FINGERPRINT_BYTES = 2**16


@dataclass(frozen=True)
class Manifest:
    """The target, engine and text that a store's features come from."""

    target_path: str
    target_config_digest: str  # xxh3_128 of config.json, see `digest_target_config`
    target_revision: str  # see `digest_target_weights`
    target_quantization: str | None  # the config's quant_method
    engine: str
    engine_version: str
    capture_layers: tuple[int, ...]  # boundaries: the state entering layer k, 0-based
    dtype: str  # of the running target
    codec: Codec  # of the stored states
    hidden_size: int  # D
    vocab_size: int  # V
    tokenizer_digest: str
    chat_template_digest: str
    prompts_digest: str  # xxh3_128 of the prompts file's bytes
    last_rows: Literal["supervised", "all"]
    generation: dict[str, Any] = field(default_factory=dict)  # settings of regenerated answers; empty: answers as given
    engine_facts: dict[str, Any] = field(default_factory=dict)  # of the run that began the store, see `describe`
    git_commit: str | None = None
    format_version: int = FORMAT_VERSION


def manifest_text(manifest: Manifest) -> str:
    """Returns the manifest as the JSON text that `read_manifest` reads."""
    return json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"


def read_manifest(store_path: Path) -> Manifest:
    """Reads a store's manifest.

    Raises:
        UserError: there is no store, or it is of another format, or its manifest is damaged.
    """
    return load_manifest(Location(store_path))


def load_manifest(location: Location) -> Manifest:
    """Reads the manifest of a store that may lie anywhere.

    Raises:
        UserError: as `read_manifest`.
    """
    path = location.file(MANIFEST_NAME)
    if MANIFEST_NAME not in location.sizes():
        raise UserError(
            f"a feature store must hold {MANIFEST_NAME}, got a path without one ({location}); "
            f"make the store with extract.py, or correct the path"
        )
    try:
        values = json.loads(location.read(MANIFEST_NAME))
        version = values["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{MANIFEST_NAME} must be JSON with a format_version, got {error!r} ({path}); restore it from a copy"
        ) from error
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"format_version must be {FORMAT_VERSION}, got {version!r} ({path}); "
            f"capture the store again, or use the version of this package that wrote it"
        )
    known = {each.name for each in dataclasses.fields(Manifest)}
    missing = sorted(known - {"engine_facts"} - set(values))  # which stores of before do not have
    unknown = sorted(set(values) - known)
    if missing or unknown:
        raise UserError(
            f"{MANIFEST_NAME} must have the fields of format {FORMAT_VERSION}, got "
            f"{', '.join([f'no {name}' for name in missing] + [f'an unknown {name}' for name in unknown])} ({path}); "
            f"restore it from a copy"
        )
    problems = [
        f"{name} must be {wanted}, got {values[name]!r}"
        for name, wanted, is_right in (
            *((name, "text", isinstance(values[name], str)) for name in TEXTS),
            *((name, "text or null", isinstance(values[name], str | None)) for name in TEXTS_OR_NULL),
            ("capture_layers", "a list of integers", _are_integers(values["capture_layers"], least=0)),
            ("hidden_size", "a positive integer", _are_integers([values["hidden_size"]], least=1)),
            ("vocab_size", "a positive integer", _are_integers([values["vocab_size"]], least=1)),
            ("last_rows", "supervised or all", values["last_rows"] in ["supervised", "all"]),
            ("codec", f"one of {', '.join(CODE_DTYPES)}", values["codec"] in list(CODE_DTYPES)),
            ("dtype", f"one of {', '.join(DTYPES)}", values["dtype"] in list(DTYPES)),
            ("generation", "an object", isinstance(values["generation"], dict)),
            ("engine_facts", "an object", isinstance(values.get("engine_facts", {}), dict)),
        )
        if not is_right
    ]
    if not problems:
        exact = EXACT_CODECS[DTYPES[values["dtype"]]]
        if values["codec"] not in (exact, *LARGEST_CODE):
            problems.append(
                f"codec must be {exact}, int8 or fp8 for states in {values['dtype']}, got {values['codec']}"
            )
    if problems:
        raise UserError(f"{'; '.join(problems)} ({path}); restore it from a copy")
    return Manifest(**{**values, "capture_layers": tuple(values["capture_layers"])})


def check_same_capture(stored: Manifest, wanted: Manifest, store_path: Path) -> None:
    """Refuses to mix two captures in one store.

    Raises:
        UserError: names each field that differs with both values.
    """
    before, now = _flat(stored), _flat(wanted)
    differing = [
        f"  {name} must be {before.get(name)!r}, as stored, got {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in PROVENANCE_ONLY
    ]
    if differing:
        # A gate that failed, or a target that could not be loaded, leaves a store that was only begun.
        kept = [*store_path.glob("shard-*"), *store_path.glob(f"**/{ANSWERS_NAME}")]
        advice = "use the stored settings, or another store.path"
        if not any(each.stat().st_size for each in kept):
            advice = f"delete {store_path}, which holds no sample and no answer yet, or use the stored settings"
        raise UserError(
            f"a store goes on only with the settings it was begun with ({store_path}):\n"
            + "\n".join(differing)
            + f"\n{advice}"
        )


def check_same_target(
    manifest: Manifest, store_path: Path | str, target_path: Path, *, expected: Mapping[str, Any], advice: str
) -> None:
    """Compares what a store says of its target with the target at hand, and with `expected` values of other fields.

    Raises:
        UserError: names each field that differs with both values, and says `advice`.
    """
    here = {
        "target_config_digest": digest_target_config(target_path),
        "target_revision": digest_target_weights(target_path),
        **expected,
    }
    differing = [
        f"  {name} must be {getattr(manifest, name)!r}, as captured from {manifest.target_path}, got {value!r}"
        for name, value in here.items()
        if getattr(manifest, name) != value
    ]
    if differing:
        raise UserError(
            f"the features in {store_path} must be those of the target and layers at hand, got others "
            f"({target_path}):\n" + "\n".join(differing) + f"\n{advice}"
        )


def digest_target_config(target_path: Path) -> str:
    """Returns the xxh3_128 hex digest of a target's config.json, independent of key order and of who saved it."""
    values = json.loads((target_path / "config.json").read_text())
    kept = {key: value for key, value in values.items() if key not in VOLATILE_CONFIG_KEYS}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())


def digest_target_weights(target_path: Path) -> str:
    """Returns an xxh3_128 hex digest over name, size, ends and middle of each weight file of a target.

    A directory has no revision of its own, and two fine-tunes share a config; reading a terabyte to tell them apart
    would cost minutes.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(target_path.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - FINGERPRINT_BYTES)):
                file.seek(offset)
                digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def _are_integers(values: Any, least: int) -> bool:
    # True is an int to isinstance, and an empty list has no layer.
    return isinstance(values, list) and bool(values) and all(type(one) is int and one >= least for one in values)


def _flat(manifest: Manifest) -> dict[str, Any]:
    values = dataclasses.asdict(manifest)
    for name, value in values.pop("generation").items():
        values[f"generation.{name}"] = value
    return values
