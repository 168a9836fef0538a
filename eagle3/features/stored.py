"""One sample as a shard keeps it: columns, the states coded."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from eagle3.features.codec import CODE_DTYPES, Codec, CodedStates, decode, encode, group_size, is_exact, num_outliers
from eagle3.features.record import FeatureSample

# In the order of the file: four-byte columns first and one-byte ones last, so that each is aligned to its own width.
COLUMNS = (
    "input_ids",
    "last_rows",
    "target_logprobs",
    "target_logz",
    "aux_scales",
    "aux_outlier_columns",
    "aux_outliers",
    "last_scales",
    "last_outlier_columns",
    "last_outliers",
    "aux_hidden_states",
    "last_hidden_states",
    "loss_mask",
)
# R rows; the others have T.
LAST_COLUMNS = {name for name in COLUMNS if name.startswith("last_")} | {"target_logz"}
OPTIONAL_COLUMNS = {"target_logz", "target_logprobs"}


@dataclass(frozen=True)
class ColumnKind:
    """What one row of a column is."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]  # () or (width,)


def column_kinds(codec: Codec, hidden_size: int, num_layers: int) -> dict[str, ColumnKind]:
    """Returns every column that a store of `num_layers` captured layers has, the optional ones too."""
    kinds = {
        "input_ids": ColumnKind(torch.int32, ()),
        "last_rows": ColumnKind(torch.int32, ()),
        "target_logprobs": ColumnKind(torch.float32, ()),
        "target_logz": ColumnKind(torch.float32, ()),
        "loss_mask": ColumnKind(torch.bool, ()),
    }
    for part, num_states in (("aux", num_layers), ("last", 1)):
        kinds[f"{part}_hidden_states"] = ColumnKind(CODE_DTYPES[codec], (num_states * hidden_size,))
        if not is_exact(codec):
            beside = num_states * num_outliers(hidden_size)
            kinds[f"{part}_scales"] = ColumnKind(torch.bfloat16, (num_states * hidden_size // group_size(hidden_size),))
            kinds[f"{part}_outlier_columns"] = ColumnKind(torch.int16, (beside,))
            kinds[f"{part}_outliers"] = ColumnKind(torch.bfloat16, (beside,))
    return {name: kinds[name] for name in COLUMNS if name in kinds}


@dataclass(frozen=True)
class StoredSample:
    """The columns of one sample, those that it has, in the order of COLUMNS."""

    sample_id: str
    columns: dict[str, Tensor]  # (T, ...) or (R, ...)

    def checksum(self) -> str:
        """Returns the xxh3_128 hex digest of the id, and of each column's name and bytes."""
        digest = xxhash.xxh3_128(self.sample_id.encode())
        for name, tensor in self.columns.items():
            digest.update(name.encode())
            digest.update(bytes_of(tensor))
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(tensor.nbytes for tensor in self.columns.values())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a CPU tensor's bytes in place; what is written there is written to the tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def encode_sample(
    sample: FeatureSample, hidden_size: int, codec: Codec, device: torch.device | None = None
) -> StoredSample:
    """Codes a sample's states on a device, theirs unless it is given, and brings it to the CPU.

    Raises:
        FloatingPointError: a state that a lossy codec was to keep is not finite.
    """
    tokens = {
        "input_ids": sample.input_ids,
        "last_rows": sample.last_rows,
        "target_logprobs": sample.target_logprobs,
        "target_logz": sample.target_logz,
        "loss_mask": sample.loss_mask,
    }
    parts = {}
    for part, states in (("aux", sample.aux_hidden_states), ("last", sample.last_hidden_states)):
        coded = encode(states if device is None or is_exact(codec) else states.to(device), hidden_size, codec)
        parts[part] = coded
        for kept in (coded.scales, coded.outliers):  # the largest numbers: what is not finite is here
            if kept is not None and not bool(kept.isfinite().all()):
                raise FloatingPointError(
                    f"{part}_hidden_states must be finite, got {float(kept[~kept.isfinite()][0])} "
                    f"(sample {sample.sample_id!r}); capture it again, drop it, or keep it as it is in an exact codec"
                )
    return join_columns(sample.sample_id, tokens, **parts)


def join_columns(
    sample_id: str, tokens: Mapping[str, Tensor | None], *, aux: CodedStates, last: CodedStates
) -> StoredSample:
    """Puts what is known of a sample's tokens, by column, and its coded states together, on the CPU."""
    columns = dict(tokens)
    for part, coded in (("aux", aux), ("last", last)):
        columns[f"{part}_hidden_states"] = coded.codes
        columns[f"{part}_scales"] = coded.scales
        columns[f"{part}_outlier_columns"] = coded.outlier_columns
        columns[f"{part}_outliers"] = coded.outliers
    present = {name: columns.get(name) for name in COLUMNS}
    return StoredSample(sample_id, {name: each.cpu() for name, each in present.items() if each is not None})


def coded_states(columns: dict[str, Tensor], part: str) -> CodedStates:
    """Returns the coded states of `part` ("aux" or "last") among columns."""
    return CodedStates(
        columns[f"{part}_hidden_states"],
        columns.get(f"{part}_scales"),
        columns.get(f"{part}_outlier_columns"),
        columns.get(f"{part}_outliers"),
    )


def decode_sample(stored: StoredSample, hidden_size: int, dtype: torch.dtype) -> FeatureSample:
    """Returns the sample with its states in `dtype`, which is the target's."""
    columns = stored.columns
    return FeatureSample(
        sample_id=stored.sample_id,
        input_ids=columns["input_ids"],
        loss_mask=columns["loss_mask"],
        aux_hidden_states=decode(coded_states(columns, "aux"), hidden_size, dtype),
        last_hidden_states=decode(coded_states(columns, "last"), hidden_size, dtype),
        last_rows=columns["last_rows"],
        target_logz=columns.get("target_logz"),
        target_logprobs=columns.get("target_logprobs"),
    )
