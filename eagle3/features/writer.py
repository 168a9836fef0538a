"""Writes a store: a shard appears whole or not at all, while the next ones are being filled.

A shard is written, brought down to the disk and only then given its name, so a sample that is in one is done, exactly
once. One thread fills files and another waits for the disk, up to SHARDS_BEHIND shards later, so that neither capture
nor the disk waits for the other: a kill loses what is buffered and those shards under way.
"""

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import torch

from eagle3.config import UserError
from eagle3.features.claim import claim_store, lock_store
from eagle3.features.codec import EXACT_CODECS, LARGEST_CODE
from eagle3.features.index import (
    ShardRecord,
    append_to_index,
)
from eagle3.features.manifest import DTYPES, MANIFEST_NAME, Manifest, manifest_text, read_manifest
from eagle3.features.record import FeatureSample
from eagle3.features.shard import (
    HEADER_BYTES,
    IndexEntry,
    sample_num_bytes,
    shard_path,
    sync_shard,
    write_shard,
)
from eagle3.features.stored import StoredSample, encode_sample
from eagle3.files import FULL, PRIVATE, sync, write_whole

SHARDS_BEHIND = 2  # that are filled and not yet on the disk; one more is being filled


class QuotaReached(UserError):  # noqa: N818 - a clean end, not an error
    """The next sample would take the store past its quota; what was written before is safe."""


class FeatureWriter:
    """Writes samples to a store, which it creates or goes on with.

    Several writers may fill one store, if each has a number of its own. Leaving its `with` block, also by an exception,
    writes what is buffered.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        shard_bytes: int,
        quota_bytes: int | None = None,
        *,
        writer: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Opens the store as writer 0, 1, ..., whose number no other process may have; `device` codes the states.

        Raises:
            UserError: another process writes under this number, the store was begun with other settings or is damaged,
                or the directory holds something else.
        """
        self.path = path
        self.manifest = manifest
        self.writer = writer
        self._device = device
        self._shard_bytes = shard_bytes
        self._quota_bytes = quota_bytes
        self._buffer: list[tuple[StoredSample, str]] = []  # with their checksums
        self._buffer_bytes = HEADER_BYTES
        self._flush_failed = False
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-fill")
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-seal")
        self._temporary_names = cycle(temporary_shard_names(writer))
        self._filling: Future[None] | None = None
        self._sealing: deque[Future[None]] = deque()  # the last SHARDS_BEHIND
        self._count = Lock()  # of the next two, which the threads change
        self._bytes_under_way = 0
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_store(path, writer)
        try:
            records = claim_store(path, manifest, writer, temporary_shard_names(writer))
        except OSError as error:
            self._lock.close()
            if error.errno in FULL:
                raise UserError(
                    f"the disk must take the index of the store, got {error} ({path}); free some space and run the "
                    f"same command again"
                ) from error
            raise
        except BaseException:
            self._lock.close()
            raise
        self.stored_ids = {entry.sample_id for record in records for entry in record.entries}  # buffered ones too
        self.num_bytes = sum(record.num_bytes for record in records)  # of the shards on the disk
        self._next_number = max((record.number for record in records), default=-1) + 1

    @property
    def side_path(self) -> Path:
        """Where this writer keeps what is not features: the store's directory, or one of its own in there."""
        path = side_path(self.path, self.writer)
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def describe(self, engine_facts: dict[str, Any]) -> None:
        """Notes in the manifest what its engine showed: noise and settings, of the run that began the store."""
        stored = read_manifest(self.path)
        if not stored.engine_facts:
            text = manifest_text(replace(stored, engine_facts=engine_facts))
            write_whole(self.path / MANIFEST_NAME, text, mode=PRIVATE)

    def write(self, sample: FeatureSample) -> None:
        """Codes and buffers a sample, and has a shard written when the buffer is full.

        Raises:
            QuotaReached: the sample does not fit; everything before it was written.
            UserError: the disk cannot take a shard before this one; the store is as it was before that.
        """
        _check_sample(sample, self.manifest)
        self.write_stored(encode_sample(sample, self.manifest.hidden_size, self.manifest.codec, self._device))

    def write_stored(self, stored: StoredSample) -> None:
        """Buffers a sample that is in the store's codec already; as `write`."""
        assert stored.sample_id not in self.stored_ids, f"sample {stored.sample_id!r} is stored already"
        num_bytes = sample_num_bytes(stored)
        with self._count:
            total = self.num_bytes + self._bytes_under_way + self._buffer_bytes + num_bytes
        if self._quota_bytes is not None and total > self._quota_bytes:
            self.flush()
            raise QuotaReached(
                f"the store must stay within store.quota_bytes={self._quota_bytes}, got {total} bytes with the next "
                f"sample ({self.path}); raise the quota and run the same command again: it goes on from here"
            )
        if self._buffer and self._buffer[0][0].columns.keys() != stored.columns.keys():
            self._start_flush()  # the samples of a shard have the same columns
        checksum = stored.checksum()  # here, so that the thread is left to the disk
        self._buffer.append((stored, checksum))
        self._buffer_bytes += num_bytes
        self.stored_ids.add(stored.sample_id)
        if self._buffer_bytes >= self._shard_bytes:
            self._start_flush()

    def flush(self) -> None:
        """Writes the buffered samples as one shard, and returns when they are on the disk.

        Raises:
            UserError: the disk cannot take it; the store is as it was before.
        """
        self._start_flush()
        self._wait(self._filling)
        self._wait(self._sealing[-1] if self._sealing else None)

    def close(self) -> None:
        """Writes what is buffered and lets other writers in; a flush that failed is not tried again."""
        try:
            if not self._flush_failed:
                self.flush()
        finally:
            self._filler.shutdown()
            self._sealer.shutdown()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start_flush(self) -> None:
        self._wait(self._filling)  # at most two shards are in this process's memory
        if not self._buffer:
            return
        samples, num_bytes = self._buffer, self._buffer_bytes
        # Before they are on their way: by a Ctrl-C in between they would be stored twice, and now they are yet to come.
        self._buffer, self._buffer_bytes = [], HEADER_BYTES
        with self._count:
            self._bytes_under_way += num_bytes
        self._filling = self._filler.submit(self._fill, samples, num_bytes)

    def _wait(self, under_way: Future[None] | None) -> None:
        if under_way is None:
            return
        # Set before the wait, so that a Ctrl-C in it does not leave a second shard to be tried.
        self._flush_failed = True
        under_way.result()
        self._flush_failed = False

    def _fill(self, samples: list[tuple[StoredSample, str]], num_bytes: int) -> None:
        """Writes one shard to a temporary file; runs on a thread of its own."""
        temporary = self.path / next(self._temporary_names)
        with self._disk_errors(temporary, num_bytes):
            free = shutil.disk_usage(self.path).free
            if free < num_bytes:
                raise self._disk_full(num_bytes, f"{free} bytes free")
            stored, checksums = zip(*samples, strict=True)
            entries = write_shard(temporary, stored, checksums)
            if len(self._sealing) == SHARDS_BEHIND:
                self._sealing.popleft().result()
        before = self._sealing[-1] if self._sealing else None
        self._sealing.append(self._sealer.submit(self._seal, temporary, entries, num_bytes, before))

    def _seal(self, temporary: Path, entries: list[IndexEntry], num_bytes: int, before: Future[None] | None) -> None:
        """Brings a shard down to the disk and publishes it; runs on a thread of its own."""
        with self._disk_errors(temporary, num_bytes):
            if before is not None:
                before.result()  # shards are published in their order, and none after one that failed
            sync_shard(temporary)
            number = self._publish(temporary)
            entries = [replace(entry, shard=number) for entry in entries]
            record = ShardRecord(number, shard_path(self.path, number).stat().st_size, entries)
            append_to_index(self.path, self.writer, record)
        self._next_number = number + 1
        with self._count:
            self._bytes_under_way -= num_bytes
            self.num_bytes += record.num_bytes

    @contextlib.contextmanager
    def _disk_errors(self, temporary: Path, num_bytes: int) -> Iterator[None]:
        """Removes the temporary file of a shard that failed, and says when that was for want of space."""
        try:
            yield
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise self._disk_full(num_bytes, str(error)) from error
            raise

    def _publish(self, temporary: Path) -> int:
        """Gives a shard the first number that no other writer took; a link, unlike a rename, never replaces a file."""
        number = self._next_number
        while True:
            try:
                os.link(temporary, shard_path(self.path, number))
                break
            except FileExistsError:
                number += 1
        sync(self.path)
        temporary.unlink()
        return number

    def _disk_full(self, num_bytes: int, seen: str) -> UserError:
        return UserError(
            f"the disk must take the next shard of {num_bytes} bytes, got {seen} ({self.path}); free some "
            f"space and run the same command again: it goes on from the last whole shard"
        )


def temporary_shard_names(writer: int) -> list[str]:
    """Returns the names of the files that a writer fills, in turns, while others are on their way to the disk."""
    return [f"shard-{writer}-{turn}.tmp" for turn in range(1 + SHARDS_BEHIND)]


def side_path(store_path: Path, writer: int) -> Path:
    """Returns where writer 0, 1, ... of a store keeps what is not features; it may not be there yet."""
    return store_path if writer == 0 else store_path / f"writer-{writer}"


def _check_sample(sample: FeatureSample, manifest: Manifest) -> None:
    num_tokens, num_last = sample.input_ids.numel(), sample.last_rows.numel()
    dtype = DTYPES[manifest.dtype]
    assert manifest.codec in (EXACT_CODECS[dtype], *LARGEST_CODE), (manifest.codec, manifest.dtype)
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
