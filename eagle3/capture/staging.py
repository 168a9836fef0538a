"""Files between an SGLang server and the extraction: one per sample, whole or not there.

The names that both sides agree on. The server's side imports this module too, so it needs the standard library alone.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "EAGLE3_CAPTURE_DIR"  # names the staging directory and switches the plugin on
LAYERS_VARIABLE = "EAGLE3_CAPTURE_LAYERS"  # boundaries, such as 3,31,59
CODEC_VARIABLE = "EAGLE3_CAPTURE_CODEC"  # int8 or fp8: states leave the device coded; empty: as they are
# Of a sample's file: its states, the first name with the number of a piece behind it. Where the metadata name a codec,
# and the dtype that states had, these are the codes, and a name with one of BESIDE behind it is what lies beside them.
AUX_NAME, LAST_NAME = "aux_hidden_states", "last_hidden_states"
BESIDE = ("scales", "outlier_columns", "outliers")
CODEC_KEY, DTYPE_KEY = "codec", "dtype"
REQUEST_ID = re.compile(r"eagle3-([1-9][0-9]*)-[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Part:
    """Rows of one request in one forward."""

    request_id: str
    num_tokens: int  # T of the whole sample
    start: int  # place of the first row in the sample
    first_row: int  # place of the first row in the forward
    num_rows: int


def request_id(num_tokens: int, name: str) -> str:
    """Returns the id of a request that is to be recorded; it tells the writer when a sample is whole."""
    made = f"eagle3-{num_tokens}-{name}"
    assert REQUEST_ID.fullmatch(made), made
    return made


def tokens_of(request_id: str) -> int | None:
    """Returns the number of tokens that a request's id announces, None for a request of somebody else."""
    match = REQUEST_ID.fullmatch(request_id)
    return int(match[1]) if match else None


def sample_path(directory: Path, request_id: str) -> Path:
    """Returns where a sample appears once it is whole."""
    return directory / f"{request_id}.safetensors"


def error_path(directory: Path, request_id: str) -> Path:
    """Returns where the reason appears if a sample cannot be whole."""
    return directory / f"{request_id}.error.json"


def partial_path(directory: Path, request_id: str) -> Path:
    """Returns where a sample lies while its parts arrive."""
    return directory / f"{request_id}.partial"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a small file whole or not at all, for its owner alone."""
    temporary = path.with_name(f".{path.name}")
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        json.dump(content, file)
    temporary.rename(path)
