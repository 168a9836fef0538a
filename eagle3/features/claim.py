"""A directory becomes a store that one writer goes on with: its lock, its manifest and its index.

Several writers may come at once, each with a number of its own; of their manifests one becomes the store's.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from eagle3.config import UserError
from eagle3.features.index import ShardRecord, index_name, load_index, read_lines, write_index
from eagle3.features.location import Location
from eagle3.features.manifest import MANIFEST_NAME, Manifest, check_same_capture, manifest_text, read_manifest
from eagle3.files import PRIVATE, sync, take_lock

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"


def lock_store(path: Path, writer: int) -> TextIO:
    """Returns the open file whose lock keeps the number of writer 0, 1, ... from others, until it is closed.

    Raises:
        UserError: another process has it.
    """
    return take_lock(
        path / (LOCK_NAME if writer == 0 else f"{LOCK_NAME}-{writer}"),
        lambda holder: UserError(
            f"a store must have one writer at a time under each number, got a second one while process {holder} "
            f"writes as number {writer} ({path}); wait for it, choose another store.path, or give each of several "
            f"writers its own store.writer"
        ),
    )


def claim_store(path: Path, manifest: Manifest, writer: int, temporary_names: Sequence[str]) -> list[ShardRecord]:
    """Returns what a store holds, with its manifest and this writer's index as they must be to go on; the lock is held.

    Raises:
        UserError: the store was begun with other settings or is damaged, or the directory holds something else.
    """
    # The lock is held, so these temp files belong to a run that died.
    names = [
        *temporary_names,
        f"manifest-{writer}.tmp",
        Path(index_name(writer)).with_suffix(".tmp").name,
    ]
    for stale in (path / name for name in names):
        if stale.exists():
            logger.warning("removed %s, left by a run that was killed", stale)
            stale.unlink()
    if not (path / MANIFEST_NAME).exists():
        others = sorted(each.name for each in path.iterdir() if not each.name.startswith((LOCK_NAME, "manifest")))
        if others and not (path / MANIFEST_NAME).exists():
            raise UserError(
                f"the directory of a new store must be empty, got {', '.join(others[:5])} in it ({path}); "
                f"choose another store.path"
            )
        _write_manifest(path, manifest, writer)
    check_same_capture(read_manifest(path), manifest, path)
    location = Location(path)
    records = load_index(location)
    # Also when it fits: an append that was cut short would swallow the next line. What no index has goes into this one.
    sizes = location.sizes()
    others = [name for name in sizes if name.startswith("index") and name.endswith(".jsonl")]
    elsewhere = {
        record.number for name in others if name != index_name(writer) for record in read_lines(location, name)
    }
    write_index(path, [record for record in records if record.number not in elsewhere], writer)
    return records


def _write_manifest(path: Path, manifest: Manifest, writer: int) -> None:
    """Writes the manifest unless another writer was quicker, whose is then compared with ours."""
    temporary = path / f"manifest-{writer}.tmp"
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, PRIVATE), "w", encoding="utf-8") as file:
        file.write(manifest_text(manifest))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path / MANIFEST_NAME)
    sync(path)
    temporary.unlink()
