"""One shard: a safetensors file of samples side by side on the token axis.

Its header carries the samples' entries, so the shards alone are the store: every index can be rebuilt from them.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.record import FeatureSample

# In the order of the file: four-byte fields first, so that each field is aligned to its own width.
FIELDS = (
    "input_ids",
    "last_rows",
    "target_logprobs",
    "target_logz",
    "aux_hidden_states",
    "last_hidden_states",
    "loss_mask",
)
LAST_FIELDS = ("last_rows", "target_logz", "last_hidden_states")  # R rows; the others have T
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.bool: "BOOL"}
# Upper bounds: a sample's entry without its id, a character of the id escaped twice, the rest of the header.
ENTRY_BYTES, ID_CHARACTER_BYTES, HEADER_BYTES = 400, 14, 2048
REPAIR = "restore it from a copy, or delete it and index.jsonl and run the same extraction again"


@dataclass(frozen=True)
class IndexEntry:
    """Where one sample lies."""

    sample_id: str
    shard: int
    offset: int  # its first row in the fields of T rows
    num_tokens: int  # T
    last_offset: int  # its first row in the fields of R rows
    num_last: int  # R
    num_supervised: int  # tokens under the loss mask
    checksum: str  # see `sample_checksum`


def shard_path(store_path: Path, number: int) -> Path:
    """Returns where shard `number` of a store lies."""
    return store_path / f"shard-{number:05d}.safetensors"


def shard_number(path: Path) -> int:
    """Returns the number in a shard's file name."""
    return int(path.stem.removeprefix("shard-"))


def sample_num_bytes(sample: FeatureSample) -> int:
    """Returns an upper bound of the bytes that a sample adds to a shard."""
    data_bytes = sum(tensor.nbytes for tensor in _fields(sample).values())
    return data_bytes + ENTRY_BYTES + ID_CHARACTER_BYTES * len(sample.sample_id)


def sample_checksum(sample: FeatureSample) -> str:
    """Returns the xxh3_128 hex digest of a sample's id and fields."""
    digest = xxhash.xxh3_128(sample.sample_id.encode())
    for name, tensor in _fields(sample).items():
        digest.update(name.encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def write_shard(path: Path, number: int, samples: list[FeatureSample]) -> list[IndexEntry]:
    """Writes samples with the same fields to a new file, down to the disk, and returns their entries."""
    entries = _entries(number, samples)
    stored = [{name: value for name, value in asdict(entry).items() if name != "shard"} for entry in entries]
    columns = {name: [_fields(sample)[name] for sample in samples] for name in _fields(samples[0])}
    header: dict[str, Any] = {"__metadata__": {"samples": json.dumps(stored)}}
    begin = 0
    for name, tensors in columns.items():
        end = begin + sum(tensor.nbytes for tensor in tensors)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensors[0].dtype],
            "shape": [sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]],
            "data_offsets": [begin, end],
        }
        begin = end
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)  # the format aligns the data to eight bytes
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for tensors in columns.values():
            for tensor in tensors:
                file.write(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    return entries


def open_shard(path: Path) -> Any:
    """Maps a shard; its slices are views of the page cache until they are cloned.

    Raises:
        UserError: the file is truncated or not in the format.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"a shard must be a whole safetensors file, got {str(error)!r} ({path}); {REPAIR}") from error


def read_entries(path: Path) -> list[IndexEntry]:
    """Reads a shard's entries from its header.

    Raises:
        UserError: the file is truncated or holds no entries.
    """
    return entries_of(open_shard(path), path)


def entries_of(shard: Any, path: Path) -> list[IndexEntry]:
    """Returns the entries in the header of a mapped shard.

    Raises:
        UserError: it holds none.
    """
    metadata = shard.metadata() or {}
    try:
        return [IndexEntry(shard=shard_number(path), **values) for values in json.loads(metadata["samples"])]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"a shard's header must list its samples, got {error!r} ({path}); {REPAIR}") from error


def read_sample(shard: Any, entry: IndexEntry) -> FeatureSample:
    """Copies one sample out of a mapped shard."""
    fields = {}
    for name in shard.keys():  # noqa: SIM118 - not a dict
        offset, count = (entry.last_offset, entry.num_last) if name in LAST_FIELDS else (entry.offset, entry.num_tokens)
        fields[name] = read_rows(shard, name, offset, count)
    return FeatureSample(sample_id=entry.sample_id, **fields)


def read_rows(shard: Any, name: str, offset: int, count: int) -> Tensor:
    """Copies rows of one field out of a mapped shard: the only copy, after which the file may go."""
    return shard.get_slice(name)[offset : offset + count].clone()


def _entries(number: int, samples: list[FeatureSample]) -> list[IndexEntry]:
    entries = []
    offset = last_offset = 0
    for sample in samples:
        num_tokens, num_last = sample.input_ids.numel(), sample.last_rows.numel()
        num_supervised = int(sample.loss_mask.sum())
        entries.append(
            IndexEntry(
                sample.sample_id,
                number,
                offset,
                num_tokens,
                last_offset,
                num_last,
                num_supervised,
                sample_checksum(sample),
            )
        )
        offset += num_tokens
        last_offset += num_last
    return entries


def _fields(sample: FeatureSample) -> dict[str, Tensor]:
    fields = {name: getattr(sample, name) for name in FIELDS}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data
