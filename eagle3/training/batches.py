"""Store -> packed, shuffled, resumable batches.

A batch is a pure function of its position, so a run resumes exactly; and the samples of a step do not depend on the
number of ranks, only how they are dealt to them does.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from eagle3.config import DataConfig, UserError
from eagle3.features.samples import Samples
from eagle3.training.packs import CodedPack, pack_reader
from eagle3.training.sequence_split import Ranks, share_of

# A prime well above any number of epochs: (seed, epoch) pairs get different permutations.
EPOCH_STRIDE = 1_000_003


@dataclass(frozen=True)
class Position:
    """How far the data has been read."""

    epoch: int = 0
    num_taken: int = 0  # samples of this epoch's order


@dataclass(frozen=True)
class UsableSamples:
    """The samples that can be trained on, and why the others cannot."""

    indices: list[int]  # of the store
    num_too_long: int
    num_uncounted: int  # no two supervised tokens in a row: nothing to draft


@dataclass(frozen=True)
class StepBatch:
    """The samples of one optimizer step, as this rank's micro-batches."""

    packs: list[CodedPack]  # this rank's; every rank has as many
    has_filler: bool  # the last pack repeats a sample that another rank has: it must weigh nothing
    sample_ids: list[list[str]]  # of the packs of all ranks: micro-batch m of rank r is at m * world_size + r
    num_tokens: int  # over all ranks
    num_supervised: int  # over all ranks
    next_position: Position  # where the step after this one starts


def num_counted_rows(loss_mask: Tensor) -> int:  # (T,)
    """Returns how many rows of a sample are counted at step 0: two supervised tokens in a row after the first."""
    return int((loss_mask[1:-1] & loss_mask[2:]).sum())


def usable_samples(store: Samples, indices: Sequence[int], max_tokens: int) -> UsableSamples:
    """Leaves out samples that are too long or would train nothing."""
    short = [index for index in indices if store.entries[index].num_tokens <= max_tokens]
    # Quick for thousands of samples, half a minute for a million.
    bar = track(short, "reading loss masks", console=Console(stderr=True), transient=True)
    counted = [index for index in bar if num_counted_rows(store.loss_mask(index))]
    return UsableSamples(counted, len(indices) - len(short), len(short) - len(counted))


class Batches:
    """The batches of a run, on one rank."""

    def __init__(
        self,
        store: Samples,
        indices: list[int],
        config: DataConfig,
        ranks: Ranks,
        ttt_steps: int,
        *,
        pin: bool = False,
        embed_tokens: Tensor | None = None,
    ) -> None:
        """Takes the samples to train on, in the store's order; with `pin` they come in memory a GPU can copy from.

        Raises:
            UserError: there are none.
        """
        if not indices:
            raise UserError(
                f"a training store must hold samples to train on, got none of its {len(store)} ({store.path}); "
                f"lower data.held_out_share, raise data.max_tokens, or capture more"
            )
        self._store = store
        self._indices = indices
        self._config = config
        self._ranks = ranks
        self._ttt_steps = ttt_steps
        self._reader = pack_reader(store, config.read_threads, pin=pin, embed_tokens=embed_tokens)
        self._shards = [store.entries[index].shard for index in indices]
        self._order: tuple[int, list[int]] = (-1, [])  # of the latest epoch
        self.steps_per_epoch = -(-len(indices) // config.samples_per_step)

    def load(self, position: Position) -> StepBatch:
        """Reads the batch at a position; the last one of an epoch may be smaller."""
        order, size = self._epoch_order(position.epoch), self._ranks.size
        end = position.num_taken + self._config.samples_per_step
        taken = [self._indices[i] for i in order[position.num_taken : end]]
        entries = self._store.entries
        lengths = [entries[index].num_tokens for index in taken]
        split = [index for index in taken if self._is_split(index)]
        whole = [index for index in taken if index not in split]
        dealt = deal([entries[index].num_tokens for index in whole], self._config.batch_tokens, size) if whole else []
        packs = [[index] for index in split for _ in range(size)] + [[whole[i] for i in members] for members in dealt]
        mine = packs[self._ranks.rank :: size]
        has_filler = not mine[-1]
        if has_filler:
            # No empty pack: ZeRO-2 sends gradients in the order in which backward makes them, and a rank whose graph
            # lacks the draft layer makes them in another order, so that different parameters would be added up.
            mine[-1] = [min(taken, key=lambda index: entries[index].num_tokens)]
        return StepBatch(
            packs=[
                share_of(pack, self._ranks, self._ttt_steps) if number < len(split) else pack
                for number, pack in enumerate(self._reader.read(members) for members in mine)
            ],
            has_filler=has_filler,
            sample_ids=[[entries[index].sample_id for index in members] for members in packs],
            num_tokens=sum(lengths),
            num_supervised=sum(entries[index].num_supervised for index in taken),
            next_position=self.after(position),
        )

    def after(self, position: Position) -> Position:
        """Returns where the step after the one at a position starts."""
        end = position.num_taken + self._config.samples_per_step
        return Position(position.epoch + 1) if end >= len(self._indices) else Position(position.epoch, end)

    def positions(self, start: Position) -> Iterator[Position]:
        """Yields the positions of all steps from one on, without an end."""
        while True:
            yield start
            start = self.after(start)

    def _is_split(self, index: int) -> bool:
        if not self._config.split_sequences or self._store.entries[index].num_tokens <= self._config.batch_tokens:
            return False
        return self._ranks.can_split(num_counted_rows(self._store.loss_mask(index)))

    def _epoch_order(self, epoch: int) -> list[int]:
        known, order = self._order
        if known != epoch:
            order = epoch_order(self._shards, self._config.seed, epoch, self._config.shuffle_shards)
            self._order = (epoch, order)
        return order


def epoch_order(shards: Sequence[int], seed: int, epoch: int, num_open: int) -> list[int]:
    """Returns the order of an epoch's samples, given the shard of each.

    With more shards than `num_open` it is drawn from so many at a time, chosen at random: a sample comes from anywhere
    in the store, while the reads stay within a few files.
    """
    generator = torch.Generator().manual_seed(seed * EPOCH_STRIDE + epoch)
    members: dict[int, list[int]] = {}
    for sample, shard in enumerate(shards):
        members.setdefault(shard, []).append(sample)
    if len(members) <= num_open:
        everywhere: list[int] = torch.randperm(len(shards), generator=generator).tolist()
        return everywhere
    waiting = [list(members)[i] for i in torch.randperm(len(members), generator=generator).tolist()][::-1]
    drawn = torch.rand(len(shards), generator=generator, dtype=torch.float64).tolist()
    left = {shard: len(samples) for shard, samples in members.items()}
    pool = [sample for _ in range(num_open) for sample in members[waiting.pop()]]
    order = []
    for share in drawn:
        at = int(share * len(pool))
        pool[at], pool[-1] = pool[-1], pool[at]
        sample = pool.pop()
        order.append(sample)
        left[shards[sample]] -= 1
        if left[shards[sample]] == 0 and waiting:
            pool += members[waiting.pop()]
    return order


def deal(lengths: list[int], batch_tokens: int, world_size: int) -> list[list[int]]:
    """Splits samples into micro-batches of at most `batch_tokens`, as many for every rank and of similar sizes.

    Returns a multiple of `world_size` lists of sample numbers, of which fewer than `world_size`, at the end, may be
    empty; a sample longer than `batch_tokens` is alone in its list.
    """
    num_tokens = sum(min(length, batch_tokens) for length in lengths)
    packs_per_rank = max(1, -(-num_tokens // (batch_tokens * world_size)))  # never more than are needed
    while True:
        packs: list[list[int]] = [[] for _ in range(packs_per_rank * world_size)]
        smallest = [(0, index) for index in range(len(packs))]  # a heap of (tokens, pack)
        for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):  # longest first packs tightest
            size, index = smallest[0]
            packs[index].append(sample)
            heapq.heapreplace(smallest, (size + lengths[sample], index))
        if all(size <= batch_tokens or len(packs[index]) == 1 for size, index in smallest):
            filled = sum(map(bool, packs))  # the first ones
            return [sorted(members) for members in packs[: max(1, -(-filled // world_size)) * world_size]]
        # Of many, a few more at once: thousands of held-out samples would be dealt thousands of times.
        packs_per_rank += 1 + packs_per_rank // 64
