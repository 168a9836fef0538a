"""Samples of a store as micro-batches: read into pinned memory, copied while the GPU works, decoded there.

The states stay coded until they are on the device that trains, so that half the bytes cross the disk and the bus.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3.draft.ttt import PackedSequences, check_last_rows, pack
from eagle3.features.codec import CodedStates, decode
from eagle3.features.samples import Samples
from eagle3.features.store import FeatureStore
from eagle3.features.stored import LAST_COLUMNS, coded_states
from eagle3.features.stream import SampleStream


@dataclass(frozen=True)
class CodedPack:
    """A micro-batch whose states are as they were stored."""

    tokens: PackedSequences  # its states are empty
    aux: CodedStates  # T rows
    last: CodedStates  # S rows
    dtype: torch.dtype  # of the decoded states
    hidden_size: int  # D
    # No sample has states: it must weigh nothing. Its rows are counted as any other's, so that its graph, and with it
    # the order in which gradients are made, is that of the other ranks'.
    is_blank: bool = False

    @classmethod
    def of(cls, packed: PackedSequences, *, is_blank: bool = False) -> "CodedPack":
        """Wraps a pack whose states are exact."""
        none = packed.last_hidden_states.new_zeros(0, 0)
        return cls(
            tokens=replace(packed, aux_hidden_states=none, last_hidden_states=none),
            aux=CodedStates(packed.aux_hidden_states),
            last=CodedStates(packed.last_hidden_states),
            dtype=packed.last_hidden_states.dtype,
            hidden_size=packed.last_hidden_states.shape[1],
            is_blank=is_blank,
        )

    def to(self, device: torch.device) -> "CodedPack":
        """Copies to a device, without a wait where the memory is pinned."""
        return replace(self, tokens=self.tokens.to(device), aux=self.aux.to(device), last=self.last.to(device))

    def pinned(self) -> "CodedPack":
        """Copies to memory that a GPU can copy from while it works."""
        tokens = replace(
            self.tokens,
            input_ids=self.tokens.input_ids.pin_memory(),
            positions=self.tokens.positions.pin_memory(),
            target_logz=None if self.tokens.target_logz is None else self.tokens.target_logz.pin_memory(),
            embeds=None if self.tokens.embeds is None else self.tokens.embeds.pin_memory(),
        )
        aux, last = CodedStates(self.aux.codes.pin_memory()), CodedStates(self.last.codes.pin_memory())
        return replace(self, tokens=tokens, aux=aux, last=last)

    def decoded(self) -> PackedSequences:
        """Returns the pack with its states, on the device where they are."""
        return replace(
            self.tokens,
            aux_hidden_states=decode(self.aux, self.hidden_size, self.dtype),
            last_hidden_states=decode(self.last, self.hidden_size, self.dtype),
        )

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that `to` moves."""
        tokens, states = self.tokens, (self.aux, self.last)
        parts = [each for one in states for each in (one.codes, one.scales, one.outlier_columns, one.outliers)]
        parts += [tokens.input_ids, tokens.positions, tokens.target_logz, tokens.embeds]
        return [part for part in parts if part is not None]


class StreamReader:
    """Has samples made by a running target, in memory that a GPU can copy from."""

    def __init__(self, stream: SampleStream, *, pin: bool, embed_tokens: Tensor | None = None) -> None:
        """With `embed_tokens` (V, D), in the host's memory, packs come with the rows of their tokens."""
        self._stream = stream
        self._pin = pin
        self._embed_tokens = embed_tokens

    def read(self, indices: Sequence[int]) -> CodedPack:
        """Has the samples at `indices` of the stream made, in that order.

        Raises:
            UserError: as `SampleStream.read`.
        """
        made = self._stream.read(indices)
        is_blank = all(sample is None for sample in made)
        packed = pack(
            [
                self._stream.without_states(index, is_supervised=is_blank) if sample is None else sample
                for index, sample in zip(indices, made, strict=True)
            ],
            pin=self._pin,
        )
        if packed.target_logz is None:
            packed = replace(packed, target_logz=self._stream.make_normalisers(packed.last_hidden_states))
        packed = replace(packed, embeds=embedded(self._embed_tokens, packed.input_ids, pin=self._pin))
        coded = CodedPack.of(packed, is_blank=is_blank)
        return coded.pinned() if self._pin else coded


class PackReader:
    """Reads samples side by side into memory that a GPU can copy from."""

    def __init__(self, store: FeatureStore, num_threads: int, *, pin: bool, embed_tokens: Tensor | None = None) -> None:
        """With `embed_tokens` (V, D), in the host's memory, packs come with the rows of their tokens."""
        self._store = store
        self._embed_tokens = embed_tokens
        self._pin = pin
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="reader")

    def read(self, indices: Sequence[int]) -> CodedPack:
        """Reads the samples at `indices` of the store, in that order; each byte is copied once.

        Raises:
            UserError: a sample is not what was written, or lacks the last hidden state of a supervised token.
        """
        store = self._store
        entries = [store.entries[index] for index in indices]
        shards = [store.shard(entry.shard) for entry in entries]
        first = shards[0]
        shared = [name for name in first.columns if all(name in shard.columns for shard in shards)]
        num_rows = {False: sum(entry.num_tokens for entry in entries), True: sum(entry.num_last for entry in entries)}
        columns = {
            name: torch.empty(
                num_rows[name in LAST_COLUMNS],
                *first.columns[name].row_shape,
                dtype=first.columns[name].dtype,
                pin_memory=self._pin,
            )
            for name in shared
        }
        starts, ends = _starts([entry.num_tokens for entry in entries]), _starts([entry.num_last for entry in entries])
        places = []
        for at, (entry, shard) in enumerate(zip(entries, shards, strict=True)):
            place = {}
            for name in shard.columns:
                count = shard.rows_of(name, entry)[1]
                begin = (ends if name in LAST_COLUMNS else starts)[at]
                # What not every sample has is read for the checksum alone.
                place[name] = columns[name][begin : begin + count] if name in columns else shard.empty_rows(name, count)
            places.append(place)
        list(self._pool.map(store.read_into, indices, places))
        for entry, place in zip(entries, places, strict=True):
            check_last_rows(entry.sample_id, place["loss_mask"], place["last_rows"])
        shifts = torch.tensor(starts).repeat_interleave(torch.tensor([entry.num_last for entry in entries]))
        nothing = torch.zeros(0, 0)
        tokens = PackedSequences(
            input_ids=self._pinned(columns["input_ids"].long()),
            positions=self._pinned(torch.cat([torch.arange(entry.num_tokens) for entry in entries])),
            loss_mask=columns["loss_mask"],
            document_lengths=tuple(entry.num_tokens for entry in entries),
            aux_hidden_states=nothing,
            target_rows=columns["last_rows"].long() + shifts,
            last_hidden_states=nothing,
            target_logz=columns["target_logz"] if "target_logz" in columns else self._normalisers(indices),
            sample_ids=tuple(entry.sample_id for entry in entries),
            embeds=embedded(self._embed_tokens, columns["input_ids"].long(), pin=self._pin),
        )
        aux, last = coded_states(columns, "aux"), coded_states(columns, "last")
        return CodedPack(tokens, aux, last, store.dtype, store.manifest.hidden_size)

    def _normalisers(self, indices: Sequence[int]) -> Tensor | None:  # (S,) fp32
        """Returns what the store keeps beside its shards, if that is all of them."""
        parts = [part for part in map(self._store.normalisers, indices) if part is not None]
        return self._pinned(torch.cat(parts)) if len(parts) == len(indices) else None

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin else tensor


def pack_reader(
    samples: Samples, num_threads: int, *, pin: bool, embed_tokens: Tensor | None = None
) -> PackReader | StreamReader:
    """Returns what reads packs of these samples; `num_threads` read a store's."""
    if isinstance(samples, SampleStream):
        return StreamReader(samples, pin=pin, embed_tokens=embed_tokens)
    assert isinstance(samples, FeatureStore), type(samples)
    return PackReader(samples, num_threads, pin=pin, embed_tokens=embed_tokens)


def load_threads(samples: Samples) -> int:
    """Returns how many threads should load packs: of a stream, one waits for servers while another joins samples."""
    return 2 if isinstance(samples, SampleStream) else 1


def embedded(embed_tokens: Tensor | None, input_ids: Tensor, *, pin: bool = False) -> Tensor | None:  # (T,) -> (T, D)
    """Returns the rows of an embedding in the host's memory, if it is there."""
    if embed_tokens is None:
        return None
    rows = torch.empty(input_ids.numel(), embed_tokens.shape[1], dtype=embed_tokens.dtype, pin_memory=pin)
    return torch.index_select(embed_tokens, 0, input_ids, out=rows)


def on_device(packs: Iterable[CodedPack], device: torch.device) -> Iterator[PackedSequences]:
    """Yields packs decoded on a device; the next one is copied there while this one is worked on."""
    if device.type != "cuda":
        yield from (pack.to(device).decoded() for pack in packs)
        return
    copying, working = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    rest = iter(packs)

    def start() -> CodedPack | None:
        pack = next(rest, None)
        if pack is None:
            return None
        with torch.cuda.stream(copying):
            return pack.to(device)

    moved = start()
    while moved is not None:
        working.wait_stream(copying)
        for tensor in moved.tensors():
            tensor.record_stream(working)  # allocated on the other stream: not to be given away before this one is done
        decoded, moved = moved.decoded(), None
        following = start()
        yield decoded
        moved = following


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]
