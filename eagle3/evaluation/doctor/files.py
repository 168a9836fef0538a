"""A drafter's directory as it is, whole or broken.

Nothing here stops at the first fault, and files that nobody could load are described all the same.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.export import our_spelling
from eagle3.draft.target_weights import open_tensors, tensor_files

POINTER_START = b"version https://git-lfs"


@dataclass(frozen=True)
class Finding:
    """One thing that lowers acceptance, or keeps a drafter from being served."""

    name: str  # what it is called wherever it is found, such as d2t-absolute
    what: str  # what was seen, and what it does
    remedy: str


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter's directory as it is."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # by our spelling of their names, mapped: read when they are used


@dataclass(frozen=True)
class Reading:
    """What could be read, and what stood in the way of the rest."""

    files: DrafterFiles | None  # None: not enough for any other check
    findings: list[Finding]


def read_drafter_files(directory: Path) -> Reading:
    """Opens whatever is in a drafter's directory.

    Raises:
        UserError: there is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"a drafter must be a directory with config.json and weights, got {str(directory)!r}; check it")
    config = _read_config(directory)
    if isinstance(config, Finding):
        return Reading(None, [config])
    broken = [finding for file in sorted(directory.glob("*.safetensors")) if (finding := _broken_file(file))]
    if broken:
        return Reading(None, broken)
    try:
        files = tensor_files(directory)
        tensors = {}
        for stored_name, file in files.items():
            with open_tensors(file) as stored:
                tensors[our_spelling(stored_name)] = stored.get_tensor(stored_name)
    except UserError as error:
        remedy = "save the weights as safetensors in one directory; a .bin is loaded and saved again by its trainer"
        return Reading(None, [Finding("no-weights", str(error), remedy)])
    return Reading(DrafterFiles(directory, config, tensors), [])


def _read_config(directory: Path) -> dict[str, Any] | Finding:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        exported = directory / "drafter"
        remedy = "copy the drafter's config.json there"
        if (exported / "config.json").is_file():
            remedy = f"this is the directory of a training: give what it exported, {exported}"
        return Finding("no-config", f"there is no config.json in {directory}", remedy)
    except ValueError as error:
        return Finding("no-config", f"config.json is no JSON ({error})", "download or export it again")
    if not isinstance(config, dict):
        return Finding("no-config", f"config.json is a {type(config).__name__}, no object", "export it again")
    return config


def _broken_file(path: Path) -> Finding | None:
    """Compares a safetensors file's size with what its header promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(POINTER_START))
        if start == POINTER_START:
            what = f"{path.name} is a Git LFS pointer of {size} bytes, not the weights"
            return Finding("git-lfs-pointer", what, "run `git lfs pull` in the repository, or download the file itself")
        file.seek(0)
        try:
            (header_size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_size)) if header_size < size else {}
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            promised = 8 + header_size + max(ends, default=0)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            promised = None
    if promised == size:
        return None
    promise = "has no readable header" if promised is None else f"promises {promised}"
    what = f"{path.name} is {size} bytes long and its header {promise}: it was cut off or damaged"
    return Finding("truncated-file", what, "download or copy the file again, and compare its size with the source's")
