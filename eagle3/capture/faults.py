"""What keeps a captured sample out of the store: states that are not finite."""

import torch
from torch import Tensor

from eagle3.features.record import FeatureSample, all_finite
from eagle3.features.stored import StoredSample, coded_states


def find_fault(sample: FeatureSample) -> str | None:
    """Says what keeps a sample out of the store: values that are not finite."""
    for name, states, rows in (
        ("aux_hidden_states", sample.aux_hidden_states, torch.arange(sample.input_ids.numel())),
        ("last_hidden_states", sample.last_hidden_states, sample.last_rows),
    ):
        if not all_finite(states):
            return _not_finite(name, rows[~states.isfinite().all(dim=1)])
    return None


def find_coded_fault(stored: StoredSample) -> str | None:
    """Says the same of coded states: what is not finite is among the outliers, or makes a scale like it."""
    columns = stored.columns
    for part, rows in (("aux", torch.arange(columns["input_ids"].numel())), ("last", columns["last_rows"])):
        coded = coded_states(columns, part)
        assert coded.scales is not None, stored.sample_id
        assert coded.outliers is not None, stored.sample_id
        is_finite = coded.scales.isfinite().all(dim=1) & coded.outliers.isfinite().all(dim=1)  # (T,) or (R,)
        if not is_finite.all():
            return _not_finite(f"{part}_hidden_states", rows[~is_finite])
    return None


def _not_finite(name: str, rows: Tensor) -> str:
    return f"{name} must be finite, got {rows.numel()} rows that are not, first at token {int(rows[0])}"
