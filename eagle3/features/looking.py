"""What `python -m eagle3 features` says of a store: what it holds, whether it is whole, what a codec would cost."""

import argparse
import json
from dataclasses import asdict

from eagle3.features.codec import is_exact
from eagle3.features.index import verify_store
from eagle3.features.location import Location
from eagle3.features.manifest import CODED_BEFORE, MANIFEST_NAME, Manifest, load_manifest
from eagle3.features.progress import progress_bar
from eagle3.features.statistics import errors_of_codecs, lengths_of, sizes_of
from eagle3.features.store import FeatureStore
from eagle3.files import write_whole

NUM_LISTED = 10  # samples that `inspect` shows


def inspect(arguments: argparse.Namespace) -> None:
    """Prints the manifest and the first samples."""
    store = open_whole(arguments.store)
    told = asdict(store.manifest)
    if is_exact(store.manifest.codec):
        told["codec"] = f"exact ({store.manifest.codec})"
    for name, value in told.items():
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
