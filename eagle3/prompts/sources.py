"""Files, folders, globs and data sets -> raw rows, in constant memory.

What a file is, its first bytes tell before its name does: a download often has lost its ending.
"""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow
import pyarrow.parquet
import xxhash

from eagle3.config import UserError
from eagle3.prompts.raw_rows import RawRow, text_rows, too_large
from eagle3.words import one_line

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
COMPRESSED_SUFFIXES = (".gz", ".zst")
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by the first bytes
PARQUET_MAGIC = b"PAR1"
# What people have and what is not read: by the first bytes, or by the name.
FOREIGN_MAGIC = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"ARROW1": "Arrow", b"\x89HDF": "HDF5"}
FOREIGN_SUFFIXES = {".csv": "a table of text", ".tsv": "a table of text", ".txt": "plain text", ".md": "plain text"}
# Beside the data of those who save or download data sets, and no rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HUB_PREFIX = "hf:"  # hf:OWNER/NAME[:CONFIG][@SPLIT]
PARQUET_ROWS = 64  # decoded at once: a row of text is seldom above a megabyte
PARQUET_BUFFER_BYTES = 2**20  # read ahead of each column, instead of all that a group of rows has of it


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
    if not pattern:
        raise UserError("prompts must be a file, a folder or a data set, got an empty name; name one")
    if pattern.startswith(HUB_PREFIX):
        return [Source(pattern, "hub")]
    path = Path(pattern)
    if path.is_dir():
        found = [_file(each) if each.is_file() else Source(str(each), "arrow") for each in _in_folder(path)]
        if not found:
            raise UserError(
                f"prompts must be a file, or a directory with files of {', '.join(FORMATS)}, got a directory without "
                f"any ({str(path)!r}); name another"
            )
        return found
    if path.exists() or not glob.has_magic(pattern):
        return [_file(path)]
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    found = [_file(each) for each in paths if each.is_file()]
    if not found:
        raise UserError(f"prompts must match at least one file, got none for {pattern!r}; check the pattern")
    return found


def unread_files(pattern: str) -> list[str]:
    """Returns the files of a folder that hold no rows in a form that is read, and the splits that are not."""
    path = Path(pattern)
    if pattern.startswith(HUB_PREFIX) or not path.is_dir():
        return []
    read = list(_in_folder(path))
    saved = [each for each in read if each.is_dir()]
    unread = [
        str(each)
        for each in sorted(path.rglob("*"))
        if each.is_file()
        and each not in read
        and each.name not in DESCRIPTIONS
        and not _is_hidden(each.relative_to(path))
        and not any(each.is_relative_to(folder) for folder in saved)
    ]
    for folder in saved:
        if (folder / "dataset_dict.json").is_file():
            unread += [str(each) for each in _splits(folder) if each.name != "train"]
    return unread


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
            rows = _data_set_rows(source, file, max_row_bytes)
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


def _in_folder(folder: Path) -> Iterator[Path]:
    """Yields the files with rows below a folder, and the folders of saved data sets, sorted."""
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        yield folder
        return
    for each in sorted(folder.iterdir()):
        if _is_hidden(Path(each.name)):
            continue
        if each.is_dir() and not each.is_symlink():
            yield from _in_folder(each)
        elif each.is_file() and each.name not in DESCRIPTIONS and _kind_of(each) is not None:
            yield each


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _splits(folder: Path) -> list[Path]:
    """Returns the data sets of a saved one that has several."""
    return sorted(each.parent for each in folder.glob("*/state.json"))


def _kind_of(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix.lower() in COMPRESSED_SUFFIXES else path.suffix
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
    with path.open("rb") as file:
        beginning = file.read(8)
    foreign = next((name for magic, name in FOREIGN_MAGIC.items() if beginning.startswith(magic)), None)
    foreign = foreign or FOREIGN_SUFFIXES.get(path.suffix.lower())
    if foreign is not None:
        raise UserError(
            f"prompts must be JSONL, JSON or Parquet, as they are or compressed by gzip or zstd, got {foreign} "
            f'({str(path)!r}); write each row as JSON on a line of its own, such as {{"prompt": ...}}'
        )
    if beginning.startswith(PARQUET_MAGIC):
        return Source(str(path), "parquet")
    compression = next((name for magic, name in COMPRESSIONS.items() if beginning.startswith(magic)), None)
    # A name that says nothing is taken for JSONL: its first line tells whether that was right.
    return Source(str(path), _kind_of(path) or "jsonl", compression)


def open_source(source: Source) -> IO[bytes]:
    """Opens a file of text, which is decompressed as it is read."""
    if source.compression is None:
        return Path(source.name).open("rb")
    return pyarrow.CompressedInputStream(pyarrow.OSFile(source.name), source.compression)


def _text_rows(source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    stream = open_source(source)
    try:
        with stream:
            yield from text_rows(
                stream,
                name=source.name,
                may_be_a_list=source.kind == "json",
                file=file,
                max_row_bytes=max_row_bytes,
            )
    except (OSError, EOFError) as error:
        if source.compression is None:
            raise
        raise UserError(
            f"{source.name} must be whole {source.compression} data, got {one_line(error)}; compress the file again"
        ) from error


def _parquet_rows(source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(source.name, buffer_size=PARQUET_BUFFER_BYTES)
        for batch in table.iter_batches(batch_size=PARQUET_ROWS):
            for i in range(batch.num_rows):
                row += 1
                yield _table_row(batch.slice(i, 1), row, file, max_row_bytes)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{source.name} must be a Parquet file, got {one_line(error)} (behind row {row}); write it again"
        ) from error


def _table_row(table: Any, row: int, file: str | None, max_row_bytes: int) -> RawRow:
    """Returns the one row of a slice of a table; a value that Python has no place for is that row's problem."""
    try:
        (content,) = table.to_pylist()
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        return RawRow(row, None, file, f"row must have values that can be read, got {one_line(error)}")
    return _sized(content, row, file, max_row_bytes)


def _sized(content: dict[str, Any], row: int, file: str | None, max_row_bytes: int) -> RawRow:
    size = _num_bytes(content)
    if size > max_row_bytes:
        return RawRow(row, None, file, too_large(max_row_bytes, size))
    return RawRow(row, _without_nulls(content), file)


def _data_set_rows(source: Source, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    row = 0
    try:
        for row, content in enumerate(_data_set(source), start=1):
            yield _sized(dict(content), row, file, max_row_bytes)
    except UserError:
        raise
    except Exception as error:  # the library and the hub's client raise whatever they like
        raise UserError(
            f"prompts must be a data set that can be read, got {source.name!r} ({one_line(error)}, behind row {row}); "
            f"check its name and split, or download it and name the folder"
        ) from error


def _data_set(source: Source) -> Any:
    """Opens a data set of the `datasets` library, saved on disk or streamed from the hub."""
    name, _, split = source.name.removeprefix(HUB_PREFIX).partition("@")
    if source.kind == "hub":
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
    folder = Path(source.name)
    loaded = datasets.load_from_disk(source.name)
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if "train" not in loaded:
        raise UserError(
            f"prompts must be a data set with a split 'train', got {', '.join(map(repr, loaded))} ({source.name!r}); "
            f"name the folder of one, such as {str(folder / next(iter(loaded), 'train'))!r}"
        )
    return loaded["train"]


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
