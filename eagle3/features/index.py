"""Which sample lies where, made again from the shards whenever it does not fit them.

A reader that finds a shard without its line reads the shard's header instead, so a kill between writing a shard and
writing its line loses nothing.
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3.config import UserError
from eagle3.features.manifest import read_manifest
from eagle3.features.shard import (
    REPAIR,
    IndexEntry,
    open_shard,
    read_entries,
    read_sample,
    sample_checksum,
    shard_number,
    shard_path,
)
from eagle3.files import PRIVATE, write_whole

INDEX_NAME = "index.jsonl"  # one line per shard
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")


@dataclass(frozen=True)
class ShardRecord:
    """One line of the index."""

    number: int
    num_bytes: int  # of the file
    entries: list[IndexEntry]


def load_index(store_path: Path) -> list[ShardRecord]:
    """Returns the shards of a store in order, from the index where it has them, else from their headers.

    Raises:
        UserError: a shard is truncated, unreadable, missing or misnamed.
    """
    indexed = {record.number: record for record in _read_lines(store_path)}
    records = []
    for path in _shard_files(store_path):
        record = indexed.pop(shard_number(path), None) or _read_record(path)
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise UserError(
                f"a shard must have the {record.num_bytes} bytes that were written, got {num_bytes} ({path}); {REPAIR}"
            )
        records.append(record)
    if indexed:
        names = ", ".join(shard_path(store_path, number).name for number in sorted(indexed))
        num_samples = sum(len(record.entries) for record in indexed.values())
        raise UserError(
            f"every shard of {INDEX_NAME} must be there, got none of {names} ({store_path}); restore them, or delete "
            f"{INDEX_NAME} to go on without their {num_samples} samples"
        )
    return records


def append_to_index(store_path: Path, record: ShardRecord) -> None:
    """Adds a shard's line, down to the disk."""
    descriptor = os.open(store_path / INDEX_NAME, os.O_CREAT | os.O_WRONLY | os.O_APPEND, PRIVATE)
    with os.fdopen(descriptor, "w") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def write_index(store_path: Path, records: list[ShardRecord]) -> None:
    """Writes the whole index anew."""
    write_atomically(store_path / INDEX_NAME, "".join(map(_line, records)))


def rebuild_index(store_path: Path) -> None:
    """Writes a store's index anew from its shards alone.

    Raises:
        UserError: a shard is damaged.
    """
    write_index(store_path, [_read_record(path) for path in _shard_files(store_path)])


def verify_store(store_path: Path) -> list[str]:
    """Reads every byte of a store and returns what is wrong, one sentence each."""
    try:
        read_manifest(store_path)
        records = load_index(store_path)
    except UserError as error:
        return [str(error)]
    problems = []
    seen: set[str] = set()
    for record in records:
        path = shard_path(store_path, record.number)
        try:
            entries, mapped = read_entries(path), open_shard(path)
        except UserError as error:
            problems.append(str(error))
            continue
        if entries != record.entries:
            problems.append(f"the index must list the samples of its shards, got others ({path}); delete {INDEX_NAME}")
        for entry in entries:
            if entry.sample_id in seen:
                problems.append(f"a sample must be stored once, got {entry.sample_id!r} again ({path}); {REPAIR}")
            seen.add(entry.sample_id)
            checksum = sample_checksum(read_sample(mapped, entry))
            if checksum != entry.checksum:
                problems.append(
                    f"sample {entry.sample_id!r} must have the checksum {entry.checksum}, got {checksum} ({path}); "
                    f"{REPAIR}"
                )
    return problems


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file of a store as a whole; like all of them it is private."""
    write_whole(path, text, mode=PRIVATE)


def _shard_files(store_path: Path) -> list[Path]:
    paths = list(store_path.glob("shard-*.safetensors"))
    strangers = sorted(path.name for path in paths if not SHARD_PATTERN.fullmatch(path.name))
    if strangers:
        raise UserError(
            f"shards must be named shard-NNNNN.safetensors, got {', '.join(strangers)} ({store_path}); "
            f"move such files away"
        )
    return sorted(paths, key=shard_number)


def _read_lines(store_path: Path) -> list[ShardRecord]:
    path = store_path / INDEX_NAME
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            number = values["shard"]
            entries = [IndexEntry(shard=number, **entry) for entry in values["samples"]]
            records.append(ShardRecord(number, values["num_bytes"], entries))
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a kill, or damaged: the shard's header has it
    return records


def _read_record(path: Path) -> ShardRecord:
    return ShardRecord(shard_number(path), path.stat().st_size, read_entries(path))


def _line(record: ShardRecord) -> str:
    samples = [{name: value for name, value in asdict(entry).items() if name != "shard"} for entry in record.entries]
    return json.dumps({"shard": record.number, "num_bytes": record.num_bytes, "samples": samples}) + "\n"
