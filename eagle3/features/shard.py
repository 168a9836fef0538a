"""One shard: a safetensors file of samples side by side on the token axis.

Its header carries the samples' entries, so the shards alone are the store: every index can be rebuilt from them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.location import Location, Piece
from eagle3.features.stored import COLUMNS, LAST_COLUMNS, OPTIONAL_COLUMNS, ColumnKind, StoredSample, bytes_of
from eagle3.files import sync

SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
# Upper bounds: a sample's entry without its id, a character of the id escaped twice, the rest of the header.
ENTRY_BYTES, ID_CHARACTER_BYTES, HEADER_BYTES = 400, 14, 2048
DISK_BLOCK = 8 * 2**20  # bytes that are sent to the disk at once, while a shard is written
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
REPAIR = "restore it from a copy, or delete it and index*.jsonl and run the same extraction again"


@dataclass(frozen=True)
class IndexEntry:
    """Where one sample lies."""

    sample_id: str
    shard: int
    offset: int  # its first row in the columns of T rows
    num_tokens: int  # T
    last_offset: int  # its first row in the columns of R rows
    num_last: int  # R
    num_supervised: int  # tokens under the loss mask
    checksum: str  # see `StoredSample.checksum`

    @classmethod
    def of(cls, shard: int, values: Mapping[str, Any]) -> "IndexEntry":
        """Makes an entry of what a header or an index says.

        Raises:
            TypeError, ValueError: it is no entry.
        """
        entry = cls(shard=shard, **values)
        # Without a loop over the fields: this runs a million times.
        texts = (entry.sample_id, entry.checksum)
        numbers = (entry.offset, entry.num_tokens, entry.last_offset, entry.num_last, entry.num_supervised)
        if [type(one) for one in texts] != [str, str] or [type(one) for one in numbers] != [int] * 5:
            raise TypeError(f"an entry of {texts} and {numbers}")
        if min(numbers) < 0:
            raise ValueError(f"an entry of {numbers}")
        entry.sample_id.encode()  # half of a surrogate pair is no text
        return entry


@dataclass(frozen=True)
class Column:
    """One tensor of a shard."""

    dtype: torch.dtype
    num_rows: int
    row_shape: tuple[int, ...]
    begin: int  # byte of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * (self.row_shape[0] if self.row_shape else 1)


def shard_name(number: int) -> str:
    """Returns the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def shard_path(store_path: Path, number: int) -> Path:
    """Returns where shard `number` of a store lies."""
    return store_path / shard_name(number)


def shard_number(name: str) -> int:
    """Returns the number in a shard's file name."""
    return int(name.removeprefix("shard-").removesuffix(".safetensors"))


def sample_num_bytes(sample: StoredSample) -> int:
    """Returns an upper bound of the bytes that a sample adds to a shard."""
    return sample.num_bytes + ENTRY_BYTES + ID_CHARACTER_BYTES * len(sample.sample_id)


def write_shard(path: Path, samples: Sequence[StoredSample], checksums: Sequence[str]) -> list[IndexEntry]:
    """Writes samples with the same columns to a new file and returns their entries, of shard 0 until it has a number.

    Its bytes are on the disk after `sync_shard` alone.
    """
    entries = _entries(samples, checksums)
    stored = [{name: value for name, value in asdict(entry).items() if name != "shard"} for entry in entries]
    columns = {name: [sample.columns[name] for sample in samples] for name in samples[0].columns}
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
        started = 0  # bytes that the disk has begun to take
        for tensors in columns.values():
            for tensor in tensors:
                file.write(bytes_of(tensor))
                if file.tell() - started >= DISK_BLOCK:
                    started = _start_to_disk(file, started)
    return entries


def sync_shard(path: Path) -> None:
    """Waits until a shard's bytes are on the disk."""
    sync(path)


def _start_to_disk(file: BinaryIO, started: int) -> int:
    """Has the kernel begin to write a file's bytes from `started` on, so that the disk works while it is filled."""
    file.flush()
    end = file.tell()
    # The advice drops clean pages alone: what was just written is sent to the disk and stays in memory.
    os.posix_fadvise(file.fileno(), started, end - started, os.POSIX_FADV_DONTNEED)
    return end


class Shard:
    """A shard whose header has been read; owns nothing, each read opens the file for itself."""

    def __init__(self, location: Location, number: int, num_bytes: int) -> None:
        """Reads the header of a file of `num_bytes`.

        Raises:
            UserError: the file is truncated, not in the format, or lists no samples.
        """
        self.number = number
        self._location = location
        self._name = shard_name(number)
        self.file = location.file(self._name)
        header = self._read_header(num_bytes)
        try:
            listed = json.loads(header.pop("__metadata__")["samples"])
            self.entries = [IndexEntry.of(number, values) for values in listed]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"a shard's header must list its samples, got {error!r} ({self.file}); {REPAIR}") from error
        data_begin = num_bytes - max((each["data_offsets"][1] for each in header.values()), default=0)
        self.columns = {name: _column(header[name], data_begin) for name in COLUMNS if name in header}
        self._check_places(sorted(header.keys() - self.columns.keys()))

    def check_columns(self, kinds: Mapping[str, ColumnKind]) -> None:
        """Compares the columns with those that its store's manifest asks for.

        Raises:
            UserError: the shard is of another store, or the manifest is not the one that was written.
        """
        problems = [f"no {name}" for name in kinds if name not in self.columns and name not in OPTIONAL_COLUMNS]
        for name, column in self.columns.items():
            seen = ColumnKind(column.dtype, column.row_shape)
            if seen != kinds.get(name):
                wanted = kinds.get(name)
                problems.append(
                    f"{name} {_kind_text(seen)} where {'none' if wanted is None else _kind_text(wanted)} is wanted"
                )
        if problems:
            raise UserError(
                f"a shard must have the columns of its store's codec, layers and sizes, got {'; '.join(problems)} "
                f"({self.file}); restore manifest.json if it was changed, or move a shard of another store away"
            )

    def read_sample(self, entry: IndexEntry) -> StoredSample:
        """Reads all columns of a sample."""
        columns = {name: self.empty_rows(name, self.rows_of(name, entry)[1]) for name in self.columns}
        self.read_into(entry, columns)
        return StoredSample(entry.sample_id, columns)

    def read_into(self, entry: IndexEntry, columns: dict[str, Tensor]) -> None:
        """Copies a sample's rows of some columns into tensors of their shapes, which must be contiguous."""
        self._read([(name, *self.rows_of(name, entry), tensor) for name, tensor in columns.items()])

    def read_column(self, name: str) -> Tensor:
        """Reads a column of all samples."""
        tensor = self.empty_rows(name, self.columns[name].num_rows)
        self._read([(name, 0, tensor.shape[0], tensor)])
        return tensor

    def empty_rows(self, name: str, num_rows: int) -> Tensor:
        """Returns memory for rows of a column."""
        return torch.empty(num_rows, *self.columns[name].row_shape, dtype=self.columns[name].dtype)

    @staticmethod
    def rows_of(name: str, entry: IndexEntry) -> tuple[int, int]:
        """Returns the first row and the number of rows of a sample in a column."""
        is_last = name in LAST_COLUMNS
        return (entry.last_offset, entry.num_last) if is_last else (entry.offset, entry.num_tokens)

    def _check_places(self, strangers: list[str]) -> None:
        """Compares the entries' rows, which lie one behind the other, with the columns'."""
        num_tokens, num_last = sum(e.num_tokens for e in self.entries), sum(e.num_last for e in self.entries)
        problems = [f"an unknown column {name!r}" for name in strangers]
        for name, column in self.columns.items():
            wanted = num_last if name in LAST_COLUMNS else num_tokens
            if column.num_rows != wanted:
                problems.append(f"{column.num_rows} rows of {name} for samples with {wanted}")
        offset = last_offset = 0
        for entry in self.entries:
            if (entry.offset, entry.last_offset) != (offset, last_offset):
                problems.append(f"{entry.sample_id!r} at rows {entry.offset} and {entry.last_offset}")
                break
            offset, last_offset = offset + entry.num_tokens, last_offset + entry.num_last
        if problems:
            raise UserError(
                f"a shard's samples must lie one behind the other, got {'; '.join(problems)} ({self.file}); {REPAIR}"
            )

    def _read(self, wanted: list[tuple[str, int, int, Tensor]]) -> None:
        pieces = []
        for name, first, count, tensor in wanted:
            column = self.columns[name]
            if first < 0 or count < 0 or first + count > column.num_rows:
                raise UserError(
                    f"rows of {name} must be within the {column.num_rows} of its shard, got {first} to "
                    f"{first + count} ({self.file}); {REPAIR}"
                )
            assert tensor.is_contiguous(), name
            assert tensor.dtype == column.dtype, (name, tensor.dtype, column.dtype)
            assert tensor.shape == (count, *column.row_shape), (name, tensor.shape, count, column.row_shape)
            if count:
                pieces.append(Piece(column.begin + first * column.row_bytes, bytes_of(tensor)))
        try:
            self._location.read_into(self._name, pieces)
        except (EOFError, FileNotFoundError) as error:
            raise UserError(f"a shard must be a whole file, got {error} ({self.file}); {REPAIR}") from error

    def _read_header(self, num_bytes: int) -> dict[str, Any]:
        try:
            header_bytes = int.from_bytes(self._bytes(0, 8, num_bytes), "little")
            if not 0 < header_bytes <= LARGEST_HEADER:
                raise ValueError(f"a header of {header_bytes} bytes")
            header: dict[str, Any] = json.loads(self._bytes(8, header_bytes, num_bytes))
            columns = [value for name, value in header.items() if name != "__metadata__"]
            seen = 8 + header_bytes + max((each["data_offsets"][1] for each in columns), default=0)
            if seen != num_bytes:
                raise ValueError(f"a header for {seen} bytes in a file of {num_bytes}")
            for value in columns:
                _column(value, 0)
        except (EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, FileNotFoundError) as error:
            raise UserError(
                f"a shard must be a whole safetensors file, got {error!r} ({self.file}); {REPAIR}"
            ) from error
        return header

    def _bytes(self, offset: int, count: int, num_bytes: int) -> bytes:
        if offset + count > num_bytes:
            raise EOFError(f"{num_bytes} bytes")
        content = bytearray(count)
        self._location.read_into(self._name, [Piece(offset, memoryview(content))])
        return bytes(content)


def _column(value: dict[str, Any], data_begin: int) -> Column:
    num_rows, *row_shape = value["shape"]
    begin, end = value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (num_rows, *row_shape, begin, end)):
        raise ValueError(f"a shape {value['shape']} at {value['data_offsets']}")
    column = Column(TORCH_DTYPES[value["dtype"]], num_rows, tuple(row_shape), data_begin + begin)
    if len(row_shape) > 1 or column.row_bytes * num_rows != end - begin:
        raise ValueError(f"{value['dtype']} of shape {value['shape']} in {end - begin} bytes")
    return column


def _kind_text(kind: ColumnKind) -> str:
    return f"{SAFETENSORS_DTYPES[kind.dtype]} rows of {kind.row_shape[0] if kind.row_shape else 1}"


def _entries(samples: Sequence[StoredSample], checksums: Sequence[str]) -> list[IndexEntry]:
    entries = []
    offset = last_offset = 0
    for sample, checksum in zip(samples, checksums, strict=True):
        num_tokens, num_last = len(sample.columns["input_ids"]), len(sample.columns["last_rows"])
        num_supervised = int(sample.columns["loss_mask"].sum())
        entries.append(
            IndexEntry(
                sample.sample_id,
                0,
                offset,
                num_tokens,
                last_offset,
                num_last,
                num_supervised,
                checksum,
            )
        )
        offset += num_tokens
        last_offset += num_last
    return entries
