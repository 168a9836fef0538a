"""Samples whose states a running target makes when they are read, no disk.

Ids and masks are here from the start, so that order, draft vocabulary and resume are those of a store. States of a
sample are made anew whenever it is read: equal to the bit only where the target's are.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.samples import Samples
from eagle3.features.shard import IndexEntry
from eagle3.features.stored import StoredSample


@dataclass(frozen=True)
class TokenSample:
    """A sample without its states."""

    sample_id: str
    input_ids: Tensor  # (T,) int32
    loss_mask: Tensor  # (T,) bool


class SampleStream(Samples):
    """Samples of a running target, by number; may be read by several threads, which take turns."""

    def __init__(
        self,
        path: Path | str,
        manifest: Manifest,
        tokens: Sequence[TokenSample],
        make: Callable[[Sequence[TokenSample]], list[FeatureSample | None]],
    ) -> None:
        """Takes what is known of all samples, and what runs the target on some of them; `path` names it to people."""
        super().__init__(path, manifest, _entries(tokens))
        self.tokens = tokens
        self._make = make
        self._turn = threading.Lock()
        self._failure: UserError | None = None
        self._normalise: Callable[[Tensor], Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Nothing is stored."""
        return 0

    def input_ids(self, index: int) -> Tensor:
        """Returns the token ids (T,) of a sample, int32."""
        return self.tokens[index].input_ids

    def loss_mask(self, index: int) -> Tensor:
        """Returns the loss mask (T,) of a sample."""
        return self.tokens[index].loss_mask

    def read(self, indices: Sequence[int]) -> list[FeatureSample | None]:
        """Runs the target on the samples at `indices`, and returns them in that order; None has no usable states.

        Raises:
            UserError: it does not run, or too many samples had no usable states; from then on nothing is run.
        """
        with self._turn:
            if self._failure is not None:
                raise self._failure  # a server that hangs is not waited for once more by who had to wait for a turn
            try:
                return self._make([self.tokens[index] for index in indices])
            except UserError as error:
                self._failure = error
                raise

    def without_states(self, index: int, *, is_supervised: bool) -> FeatureSample:
        """Returns a sample with zeros for its states, whose supervision may be taken away."""
        known, manifest = self.tokens[index], self.manifest
        loss_mask = known.loss_mask if is_supervised else torch.zeros_like(known.loss_mask)
        rows = supervised_rows(loss_mask)
        width = len(manifest.capture_layers) * manifest.hidden_size
        return FeatureSample(
            sample_id=known.sample_id,
            input_ids=known.input_ids,
            loss_mask=loss_mask,
            aux_hidden_states=torch.zeros(known.input_ids.numel(), width, dtype=self.dtype),
            last_hidden_states=torch.zeros(rows.numel(), manifest.hidden_size, dtype=self.dtype),
            last_rows=rows,
            target_logz=torch.zeros(rows.numel()),
        )

    def keep_normaliser(self, normalise: Callable[[Tensor], Tensor]) -> None:
        """Keeps what makes the `target_logz` that the target's side does not: (S, D) states -> (S,) fp32."""
        self._normalise = normalise

    def make_normalisers(self, last_hidden_states: Tensor) -> Tensor:  # (S, D) -> (S,) fp32
        """Returns the `target_logz` of last states that came without."""
        assert self._normalise is not None, self.path
        return self._normalise(last_hidden_states)


def _entries(tokens: Sequence[TokenSample]) -> list[IndexEntry]:
    """Returns the entries that samples would have in a store of one shard; checksums are those of ids and mask."""
    entries: list[IndexEntry] = []
    offset = last_offset = 0
    for each in tokens:
        num_tokens, num_last = each.input_ids.numel(), supervised_rows(each.loss_mask).numel()
        known = StoredSample(each.sample_id, {"input_ids": each.input_ids, "loss_mask": each.loss_mask})
        entries.append(
            IndexEntry(
                sample_id=each.sample_id,
                shard=0,
                offset=offset,
                num_tokens=num_tokens,
                last_offset=last_offset,
                num_last=num_last,
                num_supervised=int(each.loss_mask.sum()),
                checksum=known.checksum(),
            )
        )
        offset, last_offset = offset + num_tokens, last_offset + num_last
    return entries
