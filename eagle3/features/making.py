"""What `python -m eagle3 features` makes of stores, and of what others extracted."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from eagle3.capture.foreign import find_files
from eagle3.capture.importing import Meaning, check_meaning, import_features
from eagle3.config import UserError
from eagle3.features.codec import name_of
from eagle3.features.looking import coded_before, open_whole
from eagle3.features.progress import progress_bar
from eagle3.features.rewrite import combined_manifest, count_begun, select, write_selection


def merge(arguments: argparse.Namespace) -> None:
    """Makes one store of several."""
    _rewrite(arguments, arguments.stores)


def convert(arguments: argparse.Namespace) -> None:
    """Makes a store in another codec."""
    _rewrite(arguments, [arguments.store])


def drop(arguments: argparse.Namespace) -> None:
    """Makes a store without some samples."""
    if arguments.ids is None and arguments.max_tokens is None:
        raise UserError("drop must be told what, got neither --ids nor --max-tokens; name one")
    ids = frozenset() if arguments.ids is None else read_ids(arguments.ids)
    _rewrite(arguments, [arguments.store], ids, arguments.max_tokens)


def read_ids(path: Path) -> frozenset[str]:
    """Reads sample ids, one a line.

    Raises:
        UserError: there are none, or the file is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # ids may hold what else ends a line
    except UnicodeDecodeError as error:
        raise UserError(f"ids to drop must be UTF-8 text, got {error.reason} ({path}); correct the file") from error
    ids = frozenset(line.removesuffix("\r") for line in lines) - {""}
    if not ids:
        raise UserError(f"ids to drop must be one a line, got none ({path}); correct the file")
    return ids


def import_(arguments: argparse.Namespace) -> int:
    """Makes a store of features that others extracted; samples that were left out make the result 1."""
    files = find_files(arguments.source)
    check_meaning(files[0], arguments.layers, arguments.last, arguments.loss_mask)
    meaning = Meaning(tuple(arguments.layers), arguments.last, arguments.loss_mask)
    with progress_bar("importing", len(files)) as advance:
        imported = import_features(
            arguments.source,
            arguments.out,
            arguments.target,
            meaning,
            codec=arguments.codec,
            shard_bytes=arguments.shard_bytes,
            dry_run=arguments.dry_run,
            advance=advance,
        )
    for fault in imported.faults:
        print(fault)
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{imported.num_files:,} files, {num_bytes / 1e9:,.3f} GB, the gates passed", end="; ")
    if arguments.dry_run:
        print(f"{free_bytes(arguments.out) / 1e9:,.3f} GB are free at {arguments.out}; nothing written: --dry-run")
        return 0
    print(
        f"wrote {imported.num_written:,} samples to {arguments.out}; {imported.num_before:,} were there, "
        f"{len(imported.faults):,} left out"
    )
    return min(1, len(imported.faults))


def _rewrite(
    arguments: argparse.Namespace,
    sources: Sequence[str],
    drop_ids: frozenset[str] = frozenset(),
    max_tokens: int | None = None,
) -> None:
    stores = [open_whole(source) for source in sources]
    manifest = combined_manifest(stores, arguments.codec)
    selection = select(stores, drop_ids=drop_ids, max_tokens=max_tokens)
    if selection.unknown_ids:
        raise UserError(
            f"ids to drop must be in the store, got {len(selection.unknown_ids)} that are not, first "
            f"{selection.unknown_ids[0]!r} ({arguments.ids}); correct the file"
        )
    num_begun = count_begun(selection, arguments.out, manifest)
    num_bytes, name = selection.num_bytes(manifest.codec), name_of(manifest.codec)
    print(
        f"{selection.num_samples:,} samples, {selection.num_tokens:,} tokens, about {num_bytes / 1e9:,.3f} GB, codec "
        f"{name} to {arguments.out}, where {free_bytes(arguments.out) / 1e9:,.3f} GB are free and "
        f"{num_begun:,} samples are there; dropped {selection.num_dropped:,}, copies {selection.num_copies:,}"
    )
    lossy = [codec for codec in coded_before(manifest) if codec != manifest.codec]
    if lossy:
        print(f"states that were {' or '.join(lossy)} stay as that left them: {name} brings nothing back")
    if arguments.dry_run:
        print("nothing written: --dry-run")
        return
    with progress_bar("writing", selection.num_tokens) as advance:
        num_written = write_selection(
            selection, arguments.out, manifest, shard_bytes=arguments.shard_bytes, advance=advance
        )
    print(f"wrote {num_written:,} samples; {selection.num_samples - num_written:,} were there")


def free_bytes(path: Path) -> int:
    """Returns what is free on the disk of a directory that may not be there yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
