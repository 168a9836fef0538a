"""Which sample lies where, made again from the shards whenever it does not fit them.

A reader that finds a shard without its line reads the shard's header instead, so a kill between writing a shard and
writing its line loses nothing. Each writer of a store has an index of its own; a reader takes them all.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3.config import UserError
from eagle3.features.location import Location
from eagle3.features.manifest import Manifest, load_manifest
from eagle3.features.shard import REPAIR, IndexEntry, Shard, shard_name, shard_number
from eagle3.features.stored import StoredSample, column_kinds
from eagle3.files import PRIVATE, write_whole

INDEX_NAME = "index.jsonl"  # one line per shard; of the first writer
REMAKE = "delete index*.jsonl: they are made again from the shards"
INDEX_PATTERN = re.compile(r"index(-\d+)?\.jsonl")
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")


@dataclass(frozen=True)
class ShardRecord:
    """One line of an index."""

    number: int
    num_bytes: int  # of the file
    entries: list[IndexEntry]


def index_name(writer: int) -> str:
    """Returns the file that writer 0, 1, ... keeps its index in."""
    return INDEX_NAME if writer == 0 else f"index-{writer}.jsonl"


def load_index(location: Location) -> list[ShardRecord]:
    """Returns the shards of a store in order, from its indexes where they have them, else from their headers.

    Raises:
        UserError: a shard is truncated, unreadable, missing or misnamed.
    """
    # Lines before files: a shard that another writer adds in between has no line yet, and is read from its header.
    names = sorted(name for name in location.sizes() if INDEX_PATTERN.fullmatch(name))
    indexed = {record.number: record for name in names for record in read_lines(location, name)}
    records = []
    for number, num_bytes in shard_sizes(location).items():
        record = indexed.pop(number, None)
        if record is None or num_bytes != record.num_bytes:
            # A header says how long its file is: one that was cut short is refused here.
            shard = Shard(location, number, num_bytes)
            if record is not None:
                raise UserError(
                    f"{INDEX_NAME} must say how long its shards are, got {record.num_bytes} bytes for a whole one of "
                    f"{num_bytes} ({shard.file}); {REMAKE}"
                )
            record = ShardRecord(number, num_bytes, shard.entries)
        records.append(record)
    if indexed:
        missing = ", ".join(shard_name(number) for number in sorted(indexed))
        num_samples = sum(len(record.entries) for record in indexed.values())
        raise UserError(
            f"every shard of {INDEX_NAME} must be there, got none of {missing} ({location}); restore them, or delete "
            f"{', '.join(names)} to go on without their {num_samples} samples"
        )
    return records


def read_lines(location: Location, name: str) -> list[ShardRecord]:
    """Returns the whole lines of one index; what is damaged is in the shards' headers."""
    records = []
    for line in location.read(name).splitlines():
        try:
            values = json.loads(line)
            number, num_bytes = values["shard"], values["num_bytes"]
            if any(type(each) is not int or each < 0 for each in (number, num_bytes)):
                raise ValueError(line)
            records.append(ShardRecord(number, num_bytes, [IndexEntry.of(number, each) for each in values["samples"]]))
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a kill, or damaged
    return records


def shard_sizes(location: Location) -> dict[int, int]:
    """Returns the bytes of each shard file, by number and in order.

    Raises:
        UserError: a file is called like a shard but for its number.
    """
    sizes = {n: size for n, size in location.sizes().items() if n.startswith("shard-") and n.endswith(".safetensors")}
    strangers = sorted(name for name in sizes if not SHARD_PATTERN.fullmatch(name))
    if strangers:
        raise UserError(
            f"shards must be named shard-NNNNN.safetensors, got {', '.join(strangers)} ({location}); "
            f"move such files away"
        )
    return dict(sorted((shard_number(name), size) for name, size in sizes.items()))


def append_to_index(store_path: Path, writer: int, record: ShardRecord) -> None:
    """Adds a shard's line, which a power cut may take away: the shard says the same, and its name is on the disk."""
    descriptor = os.open(store_path / index_name(writer), os.O_CREAT | os.O_WRONLY | os.O_APPEND, PRIVATE)
    with os.fdopen(descriptor, "w") as file:
        file.write(_line(record))


def write_index(store_path: Path, records: Iterable[ShardRecord], writer: int = 0) -> None:
    """Writes a writer's whole index anew."""
    write_atomically(store_path / index_name(writer), "".join(map(_line, records)))


def verify_store(where: Path | str, advance: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Reads every byte of a store and returns what is wrong, one sentence each; `advance` is told of shards done."""
    try:
        location = Location(where)
        manifest = load_manifest(location)
        records = load_index(location)
    except UserError as error:
        return [str(error)]
    problems = []
    seen: set[str] = set()
    for record in records:
        problems += _verify_shard(location, manifest, record, seen)
        advance(record.num_bytes)
    return problems


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file of a store as a whole; like all of them it is private."""
    write_whole(path, text, mode=PRIVATE)


def open_shard(location: Location, manifest: Manifest, number: int, num_bytes: int) -> Shard:
    """Returns a shard of a store, its header read and held against the manifest.

    Raises:
        UserError: it is damaged, or of another store.
    """
    shard = Shard(location, number, num_bytes)
    shard.check_columns(column_kinds(manifest.codec, manifest.hidden_size, len(manifest.capture_layers)))
    return shard


def fault_of(entry: IndexEntry, stored: StoredSample, file: str) -> str | None:
    """Says in what a sample is not what was written."""
    checksum, num_supervised = stored.checksum(), int(stored.columns["loss_mask"].sum())
    if checksum != entry.checksum:
        return f"sample {entry.sample_id!r} must have the checksum {entry.checksum}, got {checksum} ({file}); {REPAIR}"
    if num_supervised != entry.num_supervised:
        return (
            f"sample {entry.sample_id!r} must have {entry.num_supervised} supervised tokens, as its shard's header "
            f"says, got {num_supervised} ({file}); {REPAIR}"
        )
    return None


def _verify_shard(location: Location, manifest: Manifest, record: ShardRecord, seen: set[str]) -> list[str]:
    try:
        shard = open_shard(location, manifest, record.number, record.num_bytes)
    except UserError as error:
        return [str(error)]
    problems = []
    if shard.entries != record.entries:
        problems.append(f"the index must list the samples of its shards, got others ({shard.file}); {REMAKE}")
    for entry in shard.entries:
        if entry.sample_id in seen:
            problems.append(f"a sample must be stored once, got {entry.sample_id!r} again ({shard.file}); {REPAIR}")
        seen.add(entry.sample_id)
        try:
            fault = fault_of(entry, shard.read_sample(entry), shard.file)
        except UserError as error:
            fault = str(error)
        problems += [] if fault is None else [fault]
    return problems


def _line(record: ShardRecord) -> str:
    samples = [{name: value for name, value in asdict(entry).items() if name != "shard"} for entry in record.entries]
    return json.dumps({"shard": record.number, "num_bytes": record.num_bytes, "samples": samples}) + "\n"
