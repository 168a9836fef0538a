"""What an extraction will cost, before it starts.

Sizes of stored features are exact for answers that are given; for answers that are yet to be written they are upper
bounds, and the plan says so.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.config import StoreConfig, UserError
from eagle3.features.codec import Codec, state_bytes
from eagle3.features.shard import ENTRY_BYTES, HEADER_BYTES
from eagle3.files import existing_parent
from eagle3.words import counted, readable_bytes

TOKEN_BYTES = 4 + 1  # id, mask
LAST_ROW_BYTES = 4 + 4  # row number, target_logz


@dataclass(frozen=True)
class SampleSize:
    """What one sample will have."""

    num_tokens: int  # T
    num_supervised: int  # tokens under the loss mask


@dataclass(frozen=True)
class ExtractionPlan:
    """What an extraction will add to its store."""

    num_samples: int  # yet to be captured
    num_stored: int  # samples that the store has already
    num_tokens: int
    num_bytes: int
    is_bound: bool  # tokens and bytes are upper bounds, since answers are yet to be written
    stored_bytes: int
    free_bytes: int
    quota_bytes: int | None
    store_path: Path

    def __str__(self) -> str:
        at_most = "at most " if self.is_bound else ""
        stored = f" (stored already: {self.num_stored:,} more)" if self.num_stored else ""
        quota = "" if self.quota_bytes is None else f", quota {readable_bytes(self.quota_bytes)}"
        return (
            f"plan: {counted(self.num_samples, 'sample')}{stored}, {at_most}{counted(self.num_tokens, 'token')}, "
            f"{at_most}{readable_bytes(self.num_bytes)} into {self.store_path}; "
            f"free disk {readable_bytes(self.free_bytes)}{quota}"
        )

    def check(self) -> None:
        """Refuses what cannot fit.

        A bound may exceed a quota, which ends the run cleanly if it comes to that.

        Raises:
            UserError: the features would exceed the quota or the free disk.
        """
        total = self.stored_bytes + self.num_bytes
        if self.quota_bytes is not None and not self.is_bound and total > self.quota_bytes:
            raise UserError(
                f"the store must stay within store.quota_bytes={self.quota_bytes}, got a plan of {total} bytes "
                f"({self.store_path}); raise the quota or give fewer prompts"
            )
        if self.quota_bytes is not None:
            total = min(total, self.quota_bytes)
        if total - self.stored_bytes > self.free_bytes:
            raise UserError(
                f"features must fit the free disk of {self.free_bytes} bytes, got a plan of "
                f"{'at most ' if self.is_bound else ''}{total - self.stored_bytes} bytes ({self.store_path}); "
                f"give fewer prompts, lower regenerate.max_new_tokens, set store.quota_bytes to stop cleanly when it "
                f"is reached, or choose another disk"
            )


def plan_extraction(
    sizes: Sequence[SampleSize],
    store: StoreConfig,
    *,
    hidden_size: int,
    num_aux: int,
    codec: Codec,
    is_bound: bool,
    num_stored: int = 0,
    stored_bytes: int = 0,
) -> ExtractionPlan:
    """Adds up what the samples of `sizes`, none of them stored yet, will take."""
    num_tokens = sum(size.num_tokens for size in sizes)
    num_last = num_tokens if store.last_rows == "all" else sum(size.num_supervised for size in sizes)
    num_state_bytes = state_bytes(codec, hidden_size)
    num_bytes = num_tokens * (TOKEN_BYTES + num_aux * num_state_bytes) + num_last * (LAST_ROW_BYTES + num_state_bytes)
    num_bytes += len(sizes) * ENTRY_BYTES
    num_bytes += (1 + num_bytes // store.shard_bytes) * HEADER_BYTES if sizes else 0
    path = Path(store.path)
    return ExtractionPlan(
        num_samples=len(sizes),
        num_stored=num_stored,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        is_bound=is_bound,
        stored_bytes=stored_bytes,
        free_bytes=shutil.disk_usage(existing_parent(path)).free,
        quota_bytes=store.quota_bytes,
        store_path=path,
    )
