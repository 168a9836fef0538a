"""Reads a store: its samples decoded, or their columns as they are stored, straight to where they are wanted."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.codec import CodedStates
from eagle3.features.index import INDEX_NAME, REMAKE, fault_of, load_index, open_shard, verify_store
from eagle3.features.location import Location
from eagle3.features.manifest import load_manifest
from eagle3.features.record import FeatureSample
from eagle3.features.samples import Samples
from eagle3.features.shard import IndexEntry, Shard, shard_name
from eagle3.features.stored import StoredSample, coded_states, decode_sample


class FeatureStore(Samples):
    """The samples of a store, by number; may be read by several threads."""

    def __init__(self, where: Path | str, cache_bytes: int = 0) -> None:
        """Opens the store of a directory or URL; what is read is kept in memory while it fits `cache_bytes`.

        The page cache does that for a local disk by itself, and for all processes of the machine.

        Raises:
            UserError: there is none, or it is damaged.
        """
        self.location = Location(where)
        manifest = load_manifest(self.location)
        self._records = {record.number: record for record in load_index(self.location)}
        super().__init__(where, manifest, [entry for record in self._records.values() for entry in record.entries])
        self._shards: dict[int, Shard] = {}
        self._normalisers: dict[int, Tensor] = {}  # by shard: what it lacks
        self._latest_columns: dict[str, tuple[int, Tensor]] = {}  # by name: a shard's number, and its column
        self._checked: set[int] = set()  # samples whose checksum was right
        self._cache: dict[int, StoredSample] = {}
        self._cache_room = cache_bytes
        self._cache_lock = threading.Lock()
        _check_ids(self.entries, self.location)

    def __getitem__(self, index: int) -> FeatureSample:
        """Reads a sample and decodes it; the first time, its checksum is compared too.

        Raises:
            UserError: the sample is not what was written.
        """
        return decode_sample(self.read_stored(index), self.manifest.hidden_size, self.dtype)

    def read_stored(self, index: int) -> StoredSample:
        """Reads a sample as it is stored; the first time, its checksum is compared too.

        Raises:
            UserError: the sample is not what was written.
        """
        entry = self.entries[index]
        shard = self.shard(entry.shard)
        columns = {name: shard.empty_rows(name, shard.rows_of(name, entry)[1]) for name in shard.columns}
        self.read_into(index, columns)
        return StoredSample(entry.sample_id, columns)

    def read_into(self, index: int, columns: dict[str, Tensor]) -> None:
        """Copies the columns of a sample into contiguous tensors: once, from the page cache or from ours.

        All columns must be asked for, or the checksum would not be that of the sample.

        Raises:
            UserError: the sample is not what was written.
        """
        cached = self._cache.get(index)
        if cached is not None:
            for name, tensor in columns.items():
                tensor.copy_(cached.columns[name])
            return
        entry = self.entries[index]
        shard = self.shard(entry.shard)
        assert columns.keys() == shard.columns.keys(), (list(columns), list(shard.columns))
        shard.read_into(entry, columns)
        stored = StoredSample(entry.sample_id, columns)
        if index not in self._checked:
            fault = fault_of(entry, stored, shard.file)
            if fault is not None:
                raise UserError(fault)
            self._checked.add(index)
        self._keep(index, stored)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(record.num_bytes for record in self._records.values())

    def verify(self, advance: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
        """Reads every byte and returns what is wrong, one sentence each."""
        return verify_store(self.path, advance)

    def input_ids(self, index: int) -> Tensor:
        """Reads the token ids (T,) of a sample, and nothing else of it."""
        return self._read_column(index, "input_ids")

    def loss_mask(self, index: int) -> Tensor:
        """Reads the loss mask (T,) of a sample, and nothing else of it."""
        return self._read_column(index, "loss_mask")

    def shards_without_normalisers(self, indices: list[int]) -> list[int]:
        """Returns the shards of the samples at `indices` that have no `target_logz`, stored or kept."""
        numbers = sorted({self.entries[index].shard for index in indices} - self._normalisers.keys())
        return [number for number in numbers if "target_logz" not in self.shard(number).columns]

    def keep_normalisers(self, normalisers: dict[int, Tensor]) -> None:
        """Keeps in memory what shards lack: by number, (R,) fp32 of all their last states."""
        self._normalisers |= normalisers

    def normalisers(self, index: int) -> Tensor | None:  # (R,) fp32
        """Returns a sample's `target_logz`, stored or kept."""
        entry = self.entries[index]
        if entry.shard in self._normalisers:
            first, count = Shard.rows_of("target_logz", entry)
            return self._normalisers[entry.shard][first : first + count]
        return self._read_column(index, "target_logz") if "target_logz" in self.shard(entry.shard).columns else None

    def last_states(self, number: int) -> CodedStates:
        """Reads the last states of a whole shard, as they are stored; no checksum is compared."""
        shard = self.shard(number)
        names = [name for name in shard.columns if name.startswith("last_") and name != "last_rows"]
        return coded_states({name: shard.read_column(name) for name in names}, "last")

    def shard(self, number: int) -> Shard:
        """Returns a shard with its header read.

        Raises:
            UserError: it is damaged, or the index lists other samples.
        """
        shard = self._shards.get(number)
        if shard is None:
            record = self._records[number]
            shard = open_shard(self.location, self.manifest, number, record.num_bytes)
            if shard.entries != record.entries:
                raise UserError(
                    f"{INDEX_NAME} must list the samples of its shards as they are, got others ({shard.file}); {REMAKE}"
                )
            self._shards[number] = shard
        return shard

    def _read_column(self, index: int, name: str) -> Tensor:
        """Reads a small column of one sample: of its whole shard, once, since its neighbours are asked for next."""
        entry = self.entries[index]
        shard = self.shard(entry.shard)
        number, rows = self._latest_columns.get(name, (-1, torch.empty(0)))
        if number != entry.shard:
            rows = shard.read_column(name)
            self._latest_columns[name] = (entry.shard, rows)
        first, count = shard.rows_of(name, entry)
        return rows[first : first + count]

    def _keep(self, index: int, stored: StoredSample) -> None:
        if stored.num_bytes > self._cache_room:
            return
        kept = StoredSample(stored.sample_id, {name: tensor.clone() for name, tensor in stored.columns.items()})
        with self._cache_lock:
            if index not in self._cache and stored.num_bytes <= self._cache_room:
                self._cache[index] = kept
                self._cache_room -= stored.num_bytes


def digest_store(store: Samples) -> str:
    """Returns an xxh3_128 hex digest of what is in a store: manifest, samples in order, their checksums."""
    digest = xxhash.xxh3_128(json.dumps(dataclasses.asdict(store.manifest), sort_keys=True).encode())
    for entry in store.entries:
        digest.update(f"\n{entry.sample_id} {entry.checksum}".encode())
    return digest.hexdigest()


def _check_ids(entries: list[IndexEntry], location: Location) -> None:
    shards: dict[str, int] = {}
    for entry in entries:
        first = shards.setdefault(entry.sample_id, entry.shard)
        if first != entry.shard:
            raise UserError(
                f"a sample must be stored once, got {entry.sample_id!r} in {shard_name(first)} and "
                f"{shard_name(entry.shard)} ({location}); move the shard that is a copy away, and delete {INDEX_NAME}"
            )
