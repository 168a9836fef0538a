"""Files of features that other programs wrote, as they are: SpecForge's .ckpt, vLLM's and speculators' .safetensors.

A .ckpt is a pickle: only its tensors are taken, and one that would run code is refused.
"""

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.config import UserError

SHOWN_TENSORS = 6  # of a file that is none of features: a model's has hundreds
SUFFIXES = {".ckpt": "SpecForge", ".ckpt.gz": "SpecForge", ".safetensors": "vLLM"}


@dataclass(frozen=True)
class Foreign:
    """One file, as it is."""

    input_ids: Tensor  # (T,)
    loss_mask: Tensor | None  # (T,) bool
    aux: Tensor  # (T, A, D)
    last: Tensor  # (T, D)


def kind_of(path: Path) -> str:
    """Returns the ending that says which program wrote a file; empty for others."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def id_of(path: Path, source: Path) -> str:
    """Returns what a file's sample is called: its path below `source`, without the ending."""
    return str(path.relative_to(source)).removesuffix(kind_of(path))


def find_files(source: Path) -> list[Path]:
    """Returns a directory's files of features, in order.

    Raises:
        UserError: there is none, or there are files of both programs, or two would have one id.
    """
    files = sorted(path for path in source.rglob("*") if kind_of(path) and path.is_file())
    programs = {SUFFIXES[kind_of(path)] for path in files}
    if len(programs) != 1:
        raise UserError(
            f"features to import must be .ckpt, .ckpt.gz or .safetensors files of one program under a directory, got "
            f"{'none' if not programs else 'both'} ({source}); correct the path"
        )
    by_id: dict[str, Path] = {}
    for path in files:
        name = id_of(path, source)
        if not name.isprintable():
            raise UserError(f"a file must have a name that can be printed, got {str(path)!r}; rename it")
        other = by_id.setdefault(name, path)
        if other != path:
            raise UserError(f"a sample must be in one file, got {other} and {path}; move one of them away")
    return files


def read_foreign(path: Path) -> Foreign:
    """Reads one file.

    Raises:
        UserError: it is damaged, would run code, or lacks a tensor.
    """
    values = _read_values(path)
    try:
        input_ids = values["input_ids"] if "input_ids" in values else values["token_ids"]
        if "aux_hidden_state" in values:
            last = _only(values["hidden_state"], 2)  # (T, D)
            aux = _only(values["aux_hidden_state"], 2).unflatten(1, (-1, last.shape[1]))  # (T, A, D)
        else:
            states = _only(values["hidden_states"], 3)  # (T, A + 1, D)
            aux, last = states[:, :-1], states[:, -1]
        mask = values.get("loss_mask")
        foreign = Foreign(_only(input_ids, 1), None if mask is None else _only(mask, 1).bool(), aux, last)
        sizes = {len(foreign.input_ids), len(aux), len(last), *([] if mask is None else [len(_only(mask, 1))])}
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
        raise UserError(
            f"a file of features must hold one sequence: input_ids or token_ids, and aux_hidden_state (1, T, A*D) "
            f"with hidden_state (1, T, D), or hidden_states (T, A+1, D), got {_shapes(values)} ({path}); "
            f"move such files away"
        ) from error
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(f"ids, mask and states must be equally many, got {_shapes(values)} ({path}); extract it again")
    if foreign.input_ids.is_floating_point() or not (aux.is_floating_point() and last.dtype == aux.dtype):
        raise UserError(
            f"ids must be integers and states numbers of one floating dtype, got {foreign.input_ids.dtype}, "
            f"{aux.dtype} and {last.dtype} ({path}); extract it again"
        )
    return foreign


def _read_values(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".gz":
            unpacked = io.BytesIO(gzip.decompress(path.read_bytes()))
            values = torch.load(unpacked, map_location="cpu", weights_only=True)
        elif path.suffix == ".ckpt":
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            values = load_file(path)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError, zlib.error) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"a file of features must be readable without running its code, got {reason!r} ({path}); "
            f"extract it again, or move it away"
        ) from error
    return values


def _only(tensor: Tensor, num_dims: int) -> Tensor:
    """Returns the one sequence of a tensor that may have a dimension for batches."""
    if tensor.dim() == num_dims + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != num_dims:
        raise ValueError(tensor.shape)
    return tensor


def _shapes(values: object) -> str:
    if not isinstance(values, dict):
        return type(values).__name__
    kinds = {name: list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for name, one in values.items()}
    shown = [f"{name} {kind}" for name, kind in kinds.items()]
    more = [f"{len(shown) - SHOWN_TENSORS} more"] if len(shown) > SHOWN_TENSORS else []
    return ", ".join([*shown[:SHOWN_TENSORS], *more])
