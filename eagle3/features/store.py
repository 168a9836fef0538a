"""A directory of shards with a manifest and an index: crash-safe writer, memory-mapped reader.

A shard appears whole or not at all (temp file, fsync, rename), so a sample that is in one is done, exactly once.
"""

import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.index import (
    INDEX_NAME,
    ShardRecord,
    append_to_index,
    load_index,
    verify_store,
    write_atomically,
    write_index,
)
from eagle3.features.manifest import MANIFEST_NAME, Manifest, check_same_capture, manifest_text, read_manifest
from eagle3.features.record import FeatureSample, is_held_out
from eagle3.features.shard import (
    HEADER_BYTES,
    REPAIR,
    IndexEntry,
    entries_of,
    open_shard,
    read_rows,
    read_sample,
    sample_checksum,
    sample_num_bytes,
    shard_path,
    write_shard,
)
from eagle3.files import sync

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
CODEC_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class QuotaReached(UserError):  # noqa: N818 - a clean end, not an error
    """The next sample would take the store past its quota; what was written before is safe."""


class FeatureWriter:
    """Writes samples to a store, which it creates or goes on with.

    Leaving its `with` block, also by an exception, writes what is buffered.
    """

    def __init__(self, path: Path, manifest: Manifest, shard_bytes: int, quota_bytes: int | None = None) -> None:
        """Opens the store for this process alone.

        Raises:
            UserError: another writer is at work, the store was begun with other settings or is damaged, or the
                directory holds something else.
        """
        self.path = path
        self.manifest = manifest
        self._shard_bytes = shard_bytes
        self._quota_bytes = quota_bytes
        self._buffer: list[FeatureSample] = []
        self._buffer_bytes = HEADER_BYTES
        self._flush_failed = False
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(path)
        try:
            records = _open_for_writing(path, manifest)
        except BaseException:
            self._lock.close()
            raise
        self.stored_ids = {entry.sample_id for record in records for entry in record.entries}  # buffered ones too
        self.num_bytes = sum(record.num_bytes for record in records)  # of the shards on disk
        self._next_number = max((record.number for record in records), default=-1) + 1

    def write(self, sample: FeatureSample) -> None:
        """Buffers a sample, and writes a shard when the buffer is full.

        Raises:
            QuotaReached: the sample does not fit; everything before it was written.
            UserError: the disk cannot take the shard; the store is as it was before it.
        """
        _check_sample(sample, self.manifest)
        assert sample.sample_id not in self.stored_ids, f"sample {sample.sample_id!r} is stored already"
        num_bytes = sample_num_bytes(sample)
        total = self.num_bytes + self._buffer_bytes + num_bytes
        if self._quota_bytes is not None and total > self._quota_bytes:
            self.flush()
            raise QuotaReached(
                f"the store must stay within store.quota_bytes={self._quota_bytes}, got {total} bytes with the next "
                f"sample ({self.path}); raise the quota and run the same command again: it goes on from here"
            )
        self._buffer.append(sample)
        self._buffer_bytes += num_bytes
        self.stored_ids.add(sample.sample_id)
        if self._buffer_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered samples as one shard.

        Raises:
            UserError: the disk cannot take it; the store is as it was before.
        """
        if not self._buffer:
            return
        self._flush_failed = True
        free = shutil.disk_usage(self.path).free
        if free < self._buffer_bytes:
            raise self._disk_full(f"{free} bytes free")
        final = shard_path(self.path, self._next_number)
        temporary = final.with_suffix(".tmp")
        try:
            entries = write_shard(temporary, self._next_number, self._buffer)
            os.replace(temporary, final)
            sync(self.path)
            record = ShardRecord(self._next_number, final.stat().st_size, entries)
            append_to_index(self.path, record)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full(str(error)) from error
            raise
        self.num_bytes += record.num_bytes
        self._next_number += 1
        self._buffer, self._buffer_bytes = [], HEADER_BYTES
        self._flush_failed = False

    def close(self) -> None:
        """Writes what is buffered and lets other writers in; a flush that failed is not tried again."""
        try:
            if not self._flush_failed:
                self.flush()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _disk_full(self, seen: str) -> UserError:
        return UserError(
            f"the disk must take the next shard of {self._buffer_bytes} bytes, got {seen} ({self.path}); free some "
            f"space and run the same command again: it goes on from the last whole shard"
        )


class FeatureStore:
    """Reads a store; samples come out of the mapped shards with one copy."""

    def __init__(self, path: Path) -> None:
        """Opens the store.

        Raises:
            UserError: there is none, or it is damaged.
        """
        self.path = path
        self.manifest = read_manifest(path)
        self._records = {record.number: record for record in load_index(path)}
        self.entries = [entry for record in self._records.values() for entry in record.entries]
        self._mapped: dict[int, Any] = {}  # by shard number
        self._checked: set[int] = set()  # samples whose checksum was right
        _check_ids(self.entries, path)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> FeatureSample:
        """Reads a sample; the first time, its checksum too.

        Raises:
            UserError: the sample is not what was written.
        """
        entry = self.entries[index]
        sample = read_sample(self._shard(entry.shard), entry)
        if index not in self._checked:
            checksum = sample_checksum(sample)
            if checksum != entry.checksum:
                path = shard_path(self.path, entry.shard)
                raise UserError(
                    f"sample {entry.sample_id!r} must have the checksum {entry.checksum}, got {checksum} ({path}); "
                    f"{REPAIR}"
                )
            self._checked.add(index)
        return sample

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(entry.num_tokens for entry in self.entries)

    def verify(self) -> list[str]:
        """Reads every byte and returns what is wrong, one sentence each."""
        return verify_store(self.path)

    def split(self, held_out_share: float) -> tuple[list[int], list[int]]:
        """Returns the indices of the training and of the held-out samples."""
        held_out = [is_held_out(entry.sample_id, held_out_share) for entry in self.entries]
        return [i for i, out in enumerate(held_out) if not out], [i for i, out in enumerate(held_out) if out]

    def loss_mask(self, index: int) -> Tensor:
        """Reads the loss mask (T,) of a sample, and nothing else of it."""
        entry = self.entries[index]
        return read_rows(self._shard(entry.shard), "loss_mask", entry.offset, entry.num_tokens)

    def token_counts(self, indices: list[int]) -> Tensor:
        """Returns how often each token occurs under the loss masks of the samples at `indices`, (V,) int64."""
        counts = torch.zeros(self.manifest.vocab_size, dtype=torch.int64)  # (V,)
        for entry in (self.entries[index] for index in indices):
            shard = self._shard(entry.shard)
            input_ids = read_rows(shard, "input_ids", entry.offset, entry.num_tokens)  # (T,)
            loss_mask = read_rows(shard, "loss_mask", entry.offset, entry.num_tokens)  # (T,)
            counts += torch.bincount(input_ids[loss_mask], minlength=counts.numel())
        return counts

    def _shard(self, number: int) -> Any:
        if number not in self._mapped:
            path = shard_path(self.path, number)
            shard = open_shard(path)
            if entries_of(shard, path) != self._records[number].entries:
                raise UserError(
                    f"{INDEX_NAME} must list the samples of its shards as they are, got others ({path}); "
                    f"delete {INDEX_NAME}: it is made again from the shards"
                )
            self._mapped[number] = shard
        return self._mapped[number]


def _check_ids(entries: list[IndexEntry], path: Path) -> None:
    shards: dict[str, int] = {}
    for entry in entries:
        first = shards.setdefault(entry.sample_id, entry.shard)
        if first != entry.shard:
            names = f"{shard_path(path, first).name} and {shard_path(path, entry.shard).name}"
            raise UserError(
                f"a sample must be stored once, got {entry.sample_id!r} in {names} ({path}); "
                f"move the shard that is a copy away, and delete {INDEX_NAME}"
            )


def _lock(path: Path) -> TextIO:
    file = os.fdopen(os.open(path / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = file.read().strip()
        file.close()
        raise UserError(
            f"a store must have one writer at a time, got a second one while process {holder} writes ({path}); "
            f"wait for it, or choose another store.path"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _open_for_writing(path: Path, manifest: Manifest) -> list[ShardRecord]:
    # The lock is held, so a temp file belongs to a run that died.
    for stale in sorted(path.glob("*.tmp")):
        logger.warning("removed %s, left by a run that was killed", stale)
        stale.unlink()
    if not (path / MANIFEST_NAME).exists():
        others = sorted(each.name for each in path.iterdir() if each.name != LOCK_NAME)
        if others:
            raise UserError(
                f"the directory of a new store must be empty, got {', '.join(others[:5])} in it ({path}); "
                f"choose another store.path"
            )
        write_atomically(path / MANIFEST_NAME, manifest_text(manifest))
    check_same_capture(read_manifest(path), manifest, path)
    records = load_index(path)
    # Also when it fits: an append that was cut short would swallow the next line.
    write_index(path, records)
    return records


def _check_sample(sample: FeatureSample, manifest: Manifest) -> None:
    num_tokens, num_last = sample.input_ids.numel(), sample.last_rows.numel()
    dtype = CODEC_DTYPES[manifest.codec]
    wanted = {
        "input_ids": ((num_tokens,), torch.int32),
        "loss_mask": ((num_tokens,), torch.bool),
        "aux_hidden_states": ((num_tokens, len(manifest.capture_layers) * manifest.hidden_size), dtype),
        "last_hidden_states": ((num_last, manifest.hidden_size), dtype),
        "last_rows": ((num_last,), torch.int32),
        "target_logz": ((num_last,), torch.float32),
        "target_logprobs": ((num_tokens,), torch.float32),
    }
    for name, (shape, kind) in wanted.items():
        tensor = getattr(sample, name)
        if tensor is not None:
            seen = (tuple(tensor.shape), tensor.dtype)
            assert seen == (shape, kind), f"{name} must be {(shape, kind)}, got {seen} (sample {sample.sample_id!r})"
