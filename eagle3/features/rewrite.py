"""A new store made of others: merged, in another codec, without some samples.

The sources stay as they are. A sample that the new store has already is not written again, so the same command goes on
where it was stopped; a store that holds anything else is not gone on with.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from eagle3.config import UserError
from eagle3.features.codec import Codec, CodecName, codec_named, is_exact, name_of, state_bytes
from eagle3.features.manifest import CODED_BEFORE, MANIFEST_NAME, Manifest, check_same_capture
from eagle3.features.shard import ENTRY_BYTES, IndexEntry
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

# What two stores may differ in and still become one: where the prompts came from, and how the answers were made.
MAY_DIFFER = {
    "prompts_digest",
    "generation",
    "git_commit",
    "engine_facts",
    "codec",
    "last_rows",
    "target_path",
    "engine_version",
}


@dataclass(frozen=True)
class Selection:
    """Which samples of some stores go into a new one."""

    stores: list[FeatureStore]
    kept: list[list[int]]  # of each store
    num_dropped: int  # left out on purpose
    num_copies: int  # the same sample in a later store
    unknown_ids: list[str] = field(default_factory=list)  # to be dropped, but in no store

    @property
    def entries(self) -> list[tuple[FeatureStore, IndexEntry]]:
        """The samples that are kept, with their stores."""
        pairs = zip(self.stores, self.kept, strict=True)
        return [(store, store.entries[index]) for store, indices in pairs for index in indices]

    @property
    def num_samples(self) -> int:
        """Samples that are kept."""
        return sum(map(len, self.kept))

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples that are kept."""
        return sum(entry.num_tokens for _, entry in self.entries)

    def num_bytes(self, codec: Codec) -> int:
        """Returns about how many bytes they will take."""
        manifest = self.stores[0].manifest
        size = state_bytes(codec, manifest.hidden_size)
        return sum(
            ENTRY_BYTES + entry.num_tokens * (len(manifest.capture_layers) * size + 9) + entry.num_last * (size + 8)
            for _, entry in self.entries
        )


def select(
    stores: Sequence[FeatureStore], *, drop_ids: frozenset[str] = frozenset(), max_tokens: int | None = None
) -> Selection:
    """Chooses the samples of a new store.

    Raises:
        UserError: two stores have different samples under one id, or nothing is left.
    """
    seen: dict[str, tuple[FeatureStore, IndexEntry]] = {}
    kept: list[list[int]] = []
    num_dropped = num_copies = 0
    known: set[str] = set()
    for store in stores:
        kept.append([])
        for index, entry in enumerate(store.entries):
            known.add(entry.sample_id)
            if entry.sample_id in drop_ids or (max_tokens is not None and entry.num_tokens > max_tokens):
                num_dropped += 1
            elif entry.sample_id not in seen:
                seen[entry.sample_id] = (store, entry)
                kept[-1].append(index)
            elif entry.checksum == seen[entry.sample_id][1].checksum:
                num_copies += 1
            else:
                raise UserError(
                    f"a sample must be the same wherever it is stored, got another {entry.sample_id!r} in "
                    f"{store.path} than in {seen[entry.sample_id][0].path}; drop it from one of them first"
                )
    if not seen:
        raise UserError(
            f"a new store must hold samples, got none left of {', '.join(str(store.path) for store in stores)}; "
            f"drop fewer"
        )
    return Selection(list(stores), kept, num_dropped, num_copies, sorted(drop_ids - known))


def combined_manifest(stores: Sequence[FeatureStore], codec: CodecName | None) -> Manifest:
    """Returns what a store made of others says of itself; `codec` None keeps theirs.

    Raises:
        UserError: they are of different targets or layers, or have different codecs.
    """
    first, *others = [store.manifest for store in stores]
    problems = []
    for store, manifest in zip(stores[1:], others, strict=True):
        for each in dataclasses.fields(Manifest):
            before, now = getattr(first, each.name), getattr(manifest, each.name)
            if each.name not in MAY_DIFFER and before != now:
                problems.append(f"  {each.name} must be {before!r}, as in {stores[0].path}, got {now!r} ({store.path})")
    codecs = {manifest.codec for manifest in (first, *others)}
    if codec is None and len(codecs) > 1:
        seen = ", ".join(sorted({name_of(each) for each in codecs}))
        problems.append(f"  codec must be one, got {seen}; name the new store's with --codec")
    wanted = codec_named(codec, stores[0].dtype) if codec else first.codec
    if problems:
        raise UserError("stores must belong together to become one:\n" + "\n".join(problems))
    digests = sorted({manifest.prompts_digest for manifest in (first, *others)})
    generations = []
    for manifest in (first, *others):
        if manifest.generation not in generations:
            generations.append(manifest.generation)
    coded_before = {name for manifest in (first, *others) for name in manifest.engine_facts.get(CODED_BEFORE, [])}
    coded_before |= {codec for codec in codecs if not is_exact(codec) and codec != wanted}
    return dataclasses.replace(
        first,
        codec=wanted,
        engine_facts=first.engine_facts | ({CODED_BEFORE: sorted(coded_before)} if coded_before else {}),
        prompts_digest=digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest(json.dumps(digests).encode()),
        generation=generations[0] if len(generations) == 1 else {"merged": generations},
        last_rows="all" if all(manifest.last_rows == "all" for manifest in (first, *others)) else "supervised",
    )


def count_begun(selection: Selection, path: Path, manifest: Manifest) -> int:
    """Returns how many samples of a selection a store at `path` has already; 0 if there is none.

    Raises:
        UserError: the store is a source, or was begun with other settings or other samples, or is damaged.
    """
    if any(store.location.is_directory(path) for store in selection.stores):
        raise UserError(
            f"a new store must have a directory of its own, got that of a source ({path}); choose another: sources "
            f"stay as they are"
        )
    if not (path / MANIFEST_NAME).exists():
        return 0
    begun = FeatureStore(path)
    check_same_capture(begun.manifest, manifest, path)
    before, now = (each.engine_facts.get(CODED_BEFORE) for each in (begun.manifest, manifest))
    if before != now:
        raise UserError(
            f"a store that is gone on with must be of states that went through the same codecs before, got {before} "
            f"there and {now} in the sources ({path}); choose another directory"
        )
    # The bytes of a sample that is copied are those of its source; coded anew, they may be another device's.
    wanted = {
        entry.sample_id: entry.checksum if store.manifest.codec == manifest.codec else None
        for store, entry in selection.entries
    }
    strangers = [
        entry.sample_id
        for entry in begun.entries
        if entry.sample_id not in wanted or wanted[entry.sample_id] not in (None, entry.checksum)
    ]
    if strangers:
        raise UserError(
            f"a store that is gone on with must hold samples of this command alone, got {len(strangers)} others, "
            f"first {strangers[0]!r} ({path}); choose another directory, or move that store away"
        )
    return len(begun)


def write_selection(
    selection: Selection,
    path: Path,
    manifest: Manifest,
    *,
    shard_bytes: int,
    advance: Callable[[int], None] = lambda num_tokens: None,
) -> int:
    """Writes the selected samples to a new store, or goes on with it; returns how many were written now.

    Raises:
        UserError: a source is damaged, the directory holds something else, or the disk is full.
    """
    num_written = 0
    with FeatureWriter(path, manifest, shard_bytes) as writer:
        for store, indices in zip(selection.stores, selection.kept, strict=True):
            for index in indices:
                entry = store.entries[index]
                if entry.sample_id not in writer.stored_ids:
                    if store.manifest.codec == manifest.codec:
                        writer.write_stored(store.read_stored(index))
                    else:
                        writer.write(store[index])
                    num_written += 1
                advance(entry.num_tokens)
    return num_written
