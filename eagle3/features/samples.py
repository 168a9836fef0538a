"""Samples by number, whatever has their states: what training asks of them before it reads one."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.features.manifest import DTYPES, Manifest
from eagle3.features.record import is_held_out
from eagle3.features.shard import IndexEntry


class Samples(ABC):
    """Ids and masks of samples, and what their states are."""

    def __init__(self, path: Path | str, manifest: Manifest, entries: list[IndexEntry]) -> None:
        self.path = path
        self.manifest = manifest
        self.dtype = DTYPES[manifest.dtype]  # of decoded states
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of what is stored."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(entry.num_tokens for entry in self.entries)

    def split(self, held_out_share: float) -> tuple[list[int], list[int]]:
        """Returns the indices of the training and of the held-out samples."""
        held_out = [is_held_out(entry.sample_id, held_out_share) for entry in self.entries]
        return [i for i, out in enumerate(held_out) if not out], [i for i, out in enumerate(held_out) if out]

    @abstractmethod
    def input_ids(self, index: int) -> Tensor:
        """Returns the token ids (T,) of a sample, int32."""

    @abstractmethod
    def loss_mask(self, index: int) -> Tensor:
        """Returns the loss mask (T,) of a sample."""

    def answers(self, index: int) -> list[Tensor]:
        """Returns the ids (N,) of each run of supervised tokens of a sample."""
        input_ids, loss_mask = self.input_ids(index), self.loss_mask(index)  # (T,)
        values, lengths = loss_mask.unique_consecutive(return_counts=True)
        runs = input_ids.split(lengths.tolist())
        return [run for run, counts in zip(runs, values.tolist(), strict=True) if counts]

    def token_counts(self, indices: list[int]) -> Tensor:
        """Returns how often each token occurs under the loss masks of the samples at `indices`, (V,) int64."""
        counts = torch.zeros(self.manifest.vocab_size, dtype=torch.int64)  # (V,)
        for index in indices:
            input_ids, loss_mask = self.input_ids(index), self.loss_mask(index)  # (T,)
            seen = torch.bincount(input_ids[loss_mask].clamp(min=0), minlength=counts.numel())  # (V,), unless damaged
            if seen.numel() != counts.numel() or bool((input_ids < 0).any()):
                raise UserError(
                    f"token ids must be within the target's vocabulary of {counts.numel()}, got "
                    f"{int(input_ids.min())} to {int(input_ids.max())} (sample {self.entries[index].sample_id!r} of "
                    f"{self.path}); run `python -m eagle3 features verify` on the store"
                )
            counts += seen
        return counts
