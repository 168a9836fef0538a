"""The log-normalisers that a store lacks, made once before the first step.

A server multiplies the last token of a prompt alone by its head, so that stores which it recorded lack them. Then each
epoch would multiply every last state by the whole head, which each device would have to hold.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from eagle3.draft.target_weights import TargetWeights, log_normaliser
from eagle3.features.codec import CodedStates, decode
from eagle3.features.samples import Samples
from eagle3.features.store import FeatureStore
from eagle3.features.stream import SampleStream
from eagle3.training.distributed import World, reduce_sum
from eagle3.training.prefetch import prefetched

logger = logging.getLogger(__name__)


def add_normalisers(
    samples: Samples, indices: list[int], target: TargetWeights, world: World, dtype: torch.dtype
) -> None:
    """Gives samples the normalisers that they lack: a store's at once, a stream's as they come.

    For the latter every rank keeps the whole head on its device.

    Raises:
        UserError: a shard is damaged.
    """
    if isinstance(samples, SampleStream):
        samples.keep_normaliser(_normaliser(target, world.device, dtype))
        return
    assert isinstance(samples, FeatureStore), type(samples)
    _add_stored(samples, indices, target, world, dtype)


def _normaliser(target: TargetWeights, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    head = replace(target, embed_tokens=target.embed_tokens[:0]).to(device, dtype)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # beside the step that is under way

    @torch.no_grad()
    def normalise(last: Tensor) -> Tensor:  # (S, D) -> (S,)
        with torch.cuda.stream(stream):
            return log_normaliser(head, last.to(device)).cpu()

    return normalise


def _add_stored(
    store: FeatureStore, indices: list[int], target: TargetWeights, world: World, dtype: torch.dtype
) -> None:
    """Each rank makes those of some shards, from decoded states and in `dtype` as training would.

    Every rank gets all: 4 bytes for each last state. They do not depend on the number of ranks.
    """
    numbers = store.shards_without_normalisers(indices)
    if not numbers:
        return
    started = time.monotonic()
    sizes = [store.shard(number).columns["last_rows"].num_rows for number in numbers]
    logger.info("the store has no log-normalisers of %d last states: they are made now", sum(sizes))
    head = replace(target, embed_tokens=target.embed_tokens[:0]).to(world.device, dtype)
    normalisers = torch.zeros(sum(sizes), device=world.device)
    parts = normalisers.split(sizes)
    mine = range(world.rank, len(numbers), world.size)

    def read(place: int) -> tuple[int, CodedStates]:
        return place, store.last_states(numbers[place])

    with contextlib.closing(prefetched(read, mine, depth=2)) as loaded:
        for place, coded in loaded:
            last = decode(coded.to(world.device), store.manifest.hidden_size, store.dtype)
            parts[place].copy_(log_normaliser(head, last))
    # A sum with zeros is exact.
    store.keep_normalisers(dict(zip(numbers, reduce_sum(normalisers).cpu().split(sizes), strict=True)))
    logger.info("log-normalisers made in %.1f s", time.monotonic() - started)
