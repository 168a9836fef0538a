"""`python -m eagle3 features`: look into stores, check them, and make new ones of them."""

import argparse
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from eagle3.capture.foreign import find_files
from eagle3.capture.importing import Last, LossMask, Meaning, check_meaning, import_features
from eagle3.config import StoreConfig, UserError
from eagle3.features.codec import Codec, is_exact
from eagle3.features.index import verify_store
from eagle3.features.location import Location
from eagle3.features.manifest import CODED_BEFORE, MANIFEST_NAME, Manifest, load_manifest
from eagle3.features.rewrite import combined_manifest, count_begun, select, write_selection
from eagle3.features.statistics import errors_of_codecs, lengths_of, sizes_of
from eagle3.features.store import FeatureStore
from eagle3.files import write_whole

logger = logging.getLogger(__name__)

NUM_LISTED = 10  # samples that `inspect` shows
LOG_SECONDS = 30.0  # between lines of progress where there is no terminal
STORE = "a store: its directory, or a URL that fsspec reads"
OUT = "the new store's directory; one that the same command began is gone on with"


def main(argv: Sequence[str]) -> int:
    """Runs one of the commands; returns 1 where a store is damaged."""
    parser = argparse.ArgumentParser(prog="eagle3 features", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("inspect", inspect, "prints what a store says of itself, and its first samples")
    command.add_argument("store", help=STORE)
    command = add("verify", verify, "reads every byte of stores and compares it with what was written")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command = add("stats", stats, "prints lengths, and what each codec would cost in bytes and in error")
    command.add_argument("store", help=STORE)
    command.add_argument(
        "--samples", type=positive, default=50, help="samples that the errors are measured on (default: %(default)s)"
    )
    command.add_argument("--out", type=Path, help="also write the errors as JSON")
    command = add("merge", merge, "makes one store of several")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    add_writing_arguments(command)
    command = add("convert", convert, "makes a store in another codec")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    add_writing_arguments(command, codec_is_required=True)
    command = add("drop", drop, "makes a store without some samples")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    command.add_argument("--ids", type=Path, help="a file of the ids of samples to drop, one a line")
    command.add_argument("--max-tokens", type=positive, help="drop samples that have more tokens")
    add_writing_arguments(command)
    command = add("import", import_, "makes a store of features that others extracted")
    command.add_argument(
        "source", type=Path, help="a directory of SpecForge's .ckpt (or .ckpt.gz) or vLLM's .safetensors files"
    )
    command.add_argument("out", type=directory, help=OUT)
    command.add_argument("--target", type=Path, required=True, help="the Hugging Face directory that they are of")
    command.add_argument("--layers", type=int, nargs="+", help="the layer that each state but the last enters, 0-based")
    command.add_argument(
        "--last",
        choices=get_args(Last),
        help="side of the target's final norm that the last state is from: SpecForge's after-norm, vLLM's before-norm",
    )
    command.add_argument(
        "--loss-mask",
        choices=get_args(LossMask),
        default="file",
        help="file: that of the files; all: every token is taken for the target's (default: %(default)s)",
    )
    command.add_argument(
        "--codec", choices=["exact", "int8", "fp8"], default="exact", help="of the new store (default: %(default)s)"
    )
    add_shard_bytes(command)
    command.add_argument("--dry-run", action="store_true", help="run the gates, and write nothing")
    arguments = parser.parse_args(argv)
    return arguments.run(arguments) or 0


def add_writing_arguments(command: argparse.ArgumentParser, *, codec_is_required: bool = False) -> None:
    """Adds what all commands take that write a store."""
    of_sources = "" if codec_is_required else " (default: the sources')"
    command.add_argument(
        "--codec", choices=get_args(Codec), required=codec_is_required, help=f"of the new store{of_sources}"
    )
    add_shard_bytes(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")


def add_shard_bytes(command: argparse.ArgumentParser) -> None:
    """Adds how long a shard of the new store gets."""
    default = StoreConfig(path="").shard_bytes
    command.add_argument("--shard-bytes", type=positive, default=default, help="of a shard (default: %(default)s)")


def positive(text: str) -> int:
    """Reads a number of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def directory(text: str) -> Path:
    """Reads where a store is to be written."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a directory: stores are not written to URLs, got {text!r}")
    return Path(text)


def inspect(arguments: argparse.Namespace) -> None:
    """Prints the manifest and the first samples."""
    store = open_whole(arguments.store)
    for name, value in asdict(store.manifest).items():
        print(f"{name:24} {value}")
    print_counts(store)
    print(f"{'sample':40} {'shard':>6} {'tokens':>8} {'supervised':>10}  checksum")
    for entry in store.entries[:NUM_LISTED]:
        shown = entry.sample_id if entry.sample_id.isprintable() and entry.sample_id else repr(entry.sample_id)
        print(f"{shown:40} {entry.shard:6d} {entry.num_tokens:8d} {entry.num_supervised:10d}  {entry.checksum}")
    if len(store) > NUM_LISTED:
        print(f"and {len(store) - NUM_LISTED} more")


def verify(arguments: argparse.Namespace) -> int:
    """Checks stores; damage is counted and named, and makes the result 1."""
    num_problems = 0
    for where in arguments.stores:
        location = Location(where)
        names = location.sizes()
        if MANIFEST_NAME not in names:
            load_manifest(location)  # raises
        num_bytes = sum(size for name, size in names.items() if name.startswith("shard-"))
        with progress_bar("verifying", num_bytes) as advance:
            problems = verify_store(where, advance)
        for problem in problems:
            print(problem)
        num_problems += len(problems)
        if problems:
            print(f"{where}: {len(problems)} problem(s)")
            continue
        store = FeatureStore(where)
        manifest = store.manifest
        print_counts(store)
        for name in ("target_config_digest", "target_revision", "tokenizer_digest", "chat_template_digest"):
            print(f"{name:24} {getattr(manifest, name)}")
        print(f"{'prompts_digest':24} {manifest.prompts_digest}")
        print(f"{where}: OK")
    return min(1, num_problems)


def stats(arguments: argparse.Namespace) -> None:
    """Prints lengths, bytes a token in each codec, and the errors that the lossy ones make of this store's states."""
    store = open_whole(arguments.store)
    print_counts(store)
    for line in (*lengths_of(store), *sizes_of(store)):
        print(line)
    with progress_bar("coding", min(arguments.samples, len(store))) as advance:
        errors = errors_of_codecs(store, arguments.samples, advance)
    for error in errors:
        print(error)
    if not errors:
        reason = f"are coded already ({', '.join(coded_before(store.manifest))})" if len(store) else "are none"
        print(f"errors: not measured, the states of this store {reason}")
    if arguments.out is not None:
        facts = {
            "command": f"python -m eagle3 features stats STORE --samples {arguments.samples}",
            "samples": min(arguments.samples, len(store)),
            "capture_layers": store.manifest.capture_layers,
            "hidden_size": store.manifest.hidden_size,
            "target_revision": store.manifest.target_revision,
            "errors": [asdict(error) for error in errors],
        }
        write_whole(arguments.out, json.dumps(facts, indent=1) + "\n")


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
    num_bytes = selection.num_bytes(manifest.codec)
    print(
        f"{selection.num_samples:,} samples, {selection.num_tokens:,} tokens, about {num_bytes / 1e9:,.3f} GB in "
        f"{manifest.codec} to {arguments.out}, where {free_bytes(arguments.out) / 1e9:,.3f} GB are free and "
        f"{num_begun:,} samples are there; dropped {selection.num_dropped:,}, copies {selection.num_copies:,}"
    )
    lossy = [codec for codec in coded_before(manifest) if codec != manifest.codec]
    if lossy:
        print(f"states that were {' or '.join(lossy)} stay as that left them: {manifest.codec} brings nothing back")
    if arguments.dry_run:
        print("nothing written: --dry-run")
        return
    with progress_bar("writing", selection.num_tokens) as advance:
        num_written = write_selection(
            selection, arguments.out, manifest, shard_bytes=arguments.shard_bytes, advance=advance
        )
    print(f"wrote {num_written:,} samples; {selection.num_samples - num_written:,} were there")


def open_whole(where: str) -> FeatureStore:
    """Opens a store with the headers of all its shards, so that nothing is said or chosen by an index that is damaged.

    Raises:
        UserError: there is none, or a header or an index is damaged.
    """
    store = FeatureStore(where)
    for number in {entry.shard for entry in store.entries}:
        store.shard(number)
    return store


def coded_before(manifest: Manifest) -> list[str]:
    """Returns the lossy codecs that a store's states went through, its own the last."""
    own = [] if is_exact(manifest.codec) else [manifest.codec]
    return [*manifest.engine_facts.get(CODED_BEFORE, []), *own]


def free_bytes(path: Path) -> int:
    """Returns what is free on the disk of a directory that may not be there yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def print_counts(store: FeatureStore) -> None:
    """Prints how much a store holds."""
    num_supervised = sum(entry.num_supervised for entry in store.entries)
    num_shards = len({entry.shard for entry in store.entries})
    print(
        f"{len(store):,} {'sample' if len(store) == 1 else 'samples'} in {num_shards:,} "
        f"{'shard' if num_shards == 1 else 'shards'}, {store.num_tokens:,} "
        f"tokens, {num_supervised:,} supervised, {store.num_bytes:,} bytes, "
        f"{store.num_bytes / max(1, store.num_tokens):,.0f} a token"
    )


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, else a line now and then; yields what moves it on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _logged(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)


def _logged(title: str, total: int) -> Callable[[int], None]:
    done, next_at = 0, time.monotonic() + LOG_SECONDS

    def advance(amount: int) -> None:
        nonlocal done, next_at
        done += amount
        if time.monotonic() >= next_at:
            logger.info("%s: %.1f %%", title, 100 * done / max(1, total))
            next_at = time.monotonic() + LOG_SECONDS

    return advance
