"""One captured sample.

The last hidden state is kept only for the rows that a loss reads: row j is the target's distribution over token j + 1,
so it matters when token j + 1 is supervised.
"""

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class FeatureSample:
    """Token ids, loss mask and hidden states of one conversation."""

    sample_id: str
    input_ids: Tensor  # (T,) int32
    loss_mask: Tensor  # (T,) bool, True where the assistant wrote the token, its end-of-turn token included
    aux_hidden_states: Tensor  # (T, A*D) the residual stream entering each captured layer, side by side
    last_hidden_states: Tensor  # (R, D) after the target's final norm, at `last_rows`
    last_rows: Tensor  # (R,) int32, ascending
    target_logz: Tensor | None = None  # (R,) fp32 at `last_rows`: log-sum-exp of the target's logits over V
    target_logprobs: Tensor | None = None  # (T,) fp32 log-probabilities of the recorded tokens

    def last_at(self, rows: Tensor) -> Tensor:
        """Returns the last hidden states (N, D) at token rows (N,).

        Raises:
            ValueError: a row was not kept.
        """
        found = torch.searchsorted(self.last_rows, rows.to(self.last_rows.dtype))
        kept = found < self.last_rows.numel()
        kept[kept.clone()] = self.last_rows[found[kept]] == rows[kept]
        if not bool(kept.all()):
            raise ValueError(
                f"last hidden state rows must be among the {self.last_rows.numel()} that were kept, "
                f"got row {int(rows[~kept][0])} (sample {self.sample_id!r}); "
                f"capture with store.last_rows=all to keep every row"
            )
        return self.last_hidden_states[found]


def supervised_rows(loss_mask: Tensor) -> Tensor:
    """Returns the rows (R,) int32 whose next token is supervised, of a loss mask (T,)."""
    return loss_mask[1:].nonzero().flatten().to(torch.int32)


def all_finite(tensor: Tensor) -> bool:
    """Tells whether no float of 16 bits or more is NaN or infinite; from the least and the largest, without a copy."""
    if not tensor.numel():
        return True
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))  # a NaN is both


def is_held_out(sample_id: str, share: float) -> bool:
    """Tells whether a sample is kept out of training; depends on the id alone, so a growing store never moves one.

    The pieces of one row (`ID#piece-2`) stay together.
    """
    row_id = sample_id.partition("#piece-")[0]
    return xxhash.xxh3_64_intdigest(row_id.encode()) / 2**64 < share
