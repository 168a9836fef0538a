"""Files, folders, globs and data sets -> raw rows, in constant memory.

A row is not parsed here further than its container asks: a line of JSONL stays bytes, so that parsing can be done
elsewhere. What is no row, such as a line that never ends, is an answer with its place and reason.
"""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow
import pyarrow.parquet
import xxhash

from eagle3.cli import one_line
from eagle3.config import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
HUB_PREFIX = "hf:"  # hf:OWNER/NAME[:CONFIG][@SPLIT]
READ_BYTES = 2**18
PARQUET_ROWS = 64  # decoded at once: a row of text is seldom above a megabyte


@dataclass(frozen=True)
class RawRow:
    """One row as its file has it; `problem` says why there is no content."""

    line: int  # 1-based; in a file without lines the number of the row
    content: bytes | dict[str, Any] | None  # JSON as bytes, or the columns of a table
    file: str | None = None  # which of several; None where there is one
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """One file or data set that holds rows, and how it is read."""

    name: str  # a path, or HUB_PREFIX and the rest
    kind: str  # jsonl | json | parquet | arrow | hub
    compression: str | None = None


def find_sources(pattern: str) -> list[Source]:
    """Returns the files behind a path, a glob, a folder or the name of a data set, sorted by name.

    Raises:
        UserError: nothing is there, or something that cannot be read twice or is in no format that is read.
    """
    if pattern.startswith(HUB_PREFIX):
        return [Source(pattern, "hub")]
    path = Path(pattern)
    if path.is_dir():
        return _in_folder(path)
    if path.exists() or not glob.has_magic(pattern):
        return [_file(path)]
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    found = [_file(each) for each in paths if each.is_file()]
    if not found:
        raise UserError(f"prompts must match at least one file, got none for {pattern!r}; check the pattern")
    return found


def read_rows(sources: list[Source], max_row_bytes: int) -> Iterator[RawRow]:
    """Yields the rows of all sources, one after the other; one of more than `max_row_bytes` comes as a problem.

    Raises:
        UserError: a file is not what its name says, or a data set cannot be opened.
    """
    for source in sources:
        file = source.name if len(sources) > 1 else None
        if source.kind in ("jsonl", "json"):
            rows = _text_rows(source, file, max_row_bytes)
        elif source.kind == "parquet":
            rows = _parquet_rows(source, file, max_row_bytes)
        else:
            rows = _data_set_rows(source, file)
        yield from rows


def digest_sources(sources: list[Source]) -> str:
    """Returns the xxh3_128 hex digest of the files' bytes; of a data set on the hub, of its name alone."""
    digest = xxhash.xxh3_128()
    for source in sources:
        path = Path(source.name)
        paths = sorted(each for each in path.rglob("*") if each.is_file()) if source.kind == "arrow" else [path]
        if source.kind == "hub":
            digest.update(source.name.encode())
            continue
        for each in paths:
            with each.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
    return digest.hexdigest()


def _in_folder(path: Path) -> list[Source]:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return [Source(str(path), "arrow")]
    found = [each for each in sorted(path.rglob("*")) if each.is_file() and _kind_of(each) is not None]
    if not found:
        raise UserError(
            f"prompts must be a file, or a directory with files of {', '.join(FORMATS)}, got a directory without any "
            f"({str(path)!r}); name another"
        )
    return [_file(each) for each in found]


def _kind_of(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return FORMATS.get(suffix.lower())


def _file(path: Path) -> Source:
    if not path.exists():
        raise UserError(
            f"prompts must be a file, got no file at {str(path)!r}; check the path (a data set on the hub is "
            f"{HUB_PREFIX}OWNER/NAME)"
        )
    if not path.is_file():
        raise UserError(
            f"prompts must be a file, got a device or a pipe, which cannot be read twice ({str(path)!r}); "
            f"save the rows as a file"
        )
    # A name that says nothing is taken for JSONL: its first line tells whether that was right.
    return Source(str(path), _kind_of(path) or "jsonl", COMPRESSIONS.get(path.suffix))


def _open(source: Source) -> IO[bytes]:
    if source.compression is None:
        return Path(source.name).open("rb")
    return pyarrow.CompressedInputStream(pyarrow.OSFile(source.name), source.compression)


def _text_rows(source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    stream = _open(source)
    try:
        with stream:
            reader = _Reader(stream)
            if source.kind == "json" and reader.opens_a_list():
                yield from _list_rows(reader, source, file, max_row_bytes)
            else:
                yield from _line_rows(reader, file, max_row_bytes)
    except (OSError, EOFError) as error:
        if source.compression is None:
            raise
        raise UserError(
            f"{source.name} must be whole {source.compression} data, got {error}; compress the file again"
        ) from error


def _line_rows(reader: "_Reader", file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    line = 0
    while (raw := reader.line(max_row_bytes)) is not None:
        line += 1
        if raw.num_bytes > max_row_bytes:
            yield RawRow(line, None, file, _too_large(max_row_bytes, raw.num_bytes))
        elif stripped := raw.content.strip():
            yield RawRow(line, stripped, file)


def _list_rows(reader: "_Reader", source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    """Yields the elements of one JSON list, holding no more than one of them."""
    decoder = json.JSONDecoder()
    row, separator = 0, b"["
    while True:
        found = reader.skip_blank()
        if found == b"]":
            return
        if found != separator or (separator == b"[" and row):
            raise UserError(
                f"{source.name} must be a JSON list of rows, got {found!r} behind row {row}; correct the file"
            )
        reader.take(1)
        if separator == b"[" and reader.skip_blank() == b"]":
            return
        separator = b","
        row += 1
        size = reader.element(decoder, max_row_bytes)
        if size is None:
            raise UserError(
                f"{source.name} must be a JSON list of rows of at most {max_row_bytes} bytes, got none that ends "
                f"behind row {row - 1}; correct the file, or raise prompts.max_row_bytes"
            )
        yield RawRow(row, reader.take(size), file)


@dataclass(frozen=True)
class _Line:
    content: bytes  # nothing where it is too long
    num_bytes: int


class _Reader:
    """A stream of bytes with a look ahead; it holds one row and one read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._start = 0  # what lies before it has been taken
        self._is_at_end = False

    def line(self, max_bytes: int) -> _Line | None:
        """Takes one line, None at the end; one of more than `max_bytes` is read past and not kept."""
        num_dropped, searched = 0, self._start
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                size = end - self._start
                content = b"" if num_dropped + size > max_bytes else bytes(self._buffer[self._start : end])
                self._start = end + 1
                return _Line(content, num_dropped + size)
            waiting = len(self._buffer) - self._start
            if num_dropped + waiting > max_bytes:
                num_dropped += waiting
                self._start = len(self._buffer)
            searched_bytes = len(self._buffer) - self._start
            if not self._fill():
                content = self.take(len(self._buffer) - self._start)
                if not content and not num_dropped:
                    return None
                return _Line(content if not num_dropped else b"", num_dropped + len(content))
            searched = self._start + searched_bytes

    def opens_a_list(self) -> bool:
        """Tells whether the first character is a bracket; a byte order mark before it is taken."""
        while len(self._buffer) < 3 and self._fill():
            pass
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._start = 3
        return self.skip_blank() == b"["

    def skip_blank(self) -> bytes:
        """Takes white space, and returns the byte behind it without taking it; nothing at the end."""
        while True:
            while self._start < len(self._buffer):
                byte = self._buffer[self._start : self._start + 1]
                if not byte.isspace():
                    return bytes(byte)
                self._start += 1
            if not self._fill():
                return b""

    def element(self, decoder: json.JSONDecoder, max_bytes: int) -> int | None:
        """Returns the bytes of the JSON value that comes next; None if it does not end within `max_bytes`."""
        self.skip_blank()
        wanted = 4096
        while True:
            while len(self._buffer) - self._start < wanted and self._fill():
                pass
            text = self._buffer[self._start : self._start + wanted].decode("utf-8", errors="surrogateescape")
            try:
                _, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                end = None
            # A number at the end of what was read may go on.
            if end is not None and (end < len(text) or self._is_at_end):
                size = len(text[:end].encode("utf-8", errors="surrogateescape"))
                return size if size <= max_bytes else None
            if wanted > max_bytes or (self._is_at_end and len(self._buffer) - self._start <= wanted):
                return None
            wanted *= 2

    def take(self, size: int) -> bytes:
        taken = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        return taken

    def _fill(self) -> bool:
        """Reads on; False at the end."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        block = b"" if self._is_at_end else self._stream.read(READ_BYTES)
        self._is_at_end = not block
        self._buffer += block
        return bool(block)


def _parquet_rows(source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(source.name)
        for batch in table.iter_batches(batch_size=PARQUET_ROWS):
            for content in batch.to_pylist():
                row += 1
                size = _num_bytes(content)
                if size > max_row_bytes:
                    yield RawRow(row, None, file, _too_large(max_row_bytes, size))
                else:
                    yield RawRow(row, _without_nulls(content), file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{source.name} must be a Parquet file, got {error}; write it again") from error


def _data_set_rows(source: Source, file: str | None) -> Iterator[RawRow]:
    for row, content in enumerate(_data_set(source), start=1):
        yield RawRow(row, _without_nulls(dict(content)), file)


def _data_set(source: Source) -> Any:
    """Opens a data set of the `datasets` library, saved on disk or streamed from the hub."""
    name, _, split = source.name.removeprefix(HUB_PREFIX).partition("@")
    try:
        if source.kind == "arrow":
            loaded = datasets.load_from_disk(source.name)
            return loaded["train"] if isinstance(loaded, datasets.DatasetDict) else loaded
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the library and the hub's client raise whatever they like
        raise UserError(
            f"prompts must be a data set that opens, got {source.name!r} ({one_line(error)}); "
            f"check its name and split, or download it and name the folder"
        ) from error


def _num_bytes(value: Any) -> int:
    """Returns about how many bytes a row's text has."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_bytes(each) for each in value.values())
    if isinstance(value, list):
        return sum(_num_bytes(each) for each in value) if value and not isinstance(value[0], int) else 4 * len(value)
    return 8


def _without_nulls(value: Any) -> Any:
    """Drops the fields that a table fills with nulls since another row has them; a null content is told apart later."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _too_large(max_row_bytes: int, num_bytes: int) -> str:
    return (
        f"row must have at most {max_row_bytes} bytes, got {num_bytes}; cut it, or raise prompts.max_row_bytes "
        f"(tokenizing a megabyte takes about a second)"
    )
