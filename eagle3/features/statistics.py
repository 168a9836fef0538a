"""What a store's states look like: lengths, bytes a token, and what codecs make of them.

A plain relative error would say little: a state's length is that of its few large numbers. So the error is also given
in units of the state's typical number, where a first token cannot hide it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from eagle3.features.codec import LARGEST_CODE, Codec, CodecName, codec_named, decode, encode, state_bytes
from eagle3.features.manifest import CODED_BEFORE
from eagle3.features.record import all_finite
from eagle3.features.store import FeatureStore

TYPICAL = 0.6745  # median absolute value of a standard normal


def lengths_of(store: FeatureStore) -> list[str]:
    """Returns lines about tokens per sample."""
    lengths = torch.tensor([entry.num_tokens for entry in store.entries], dtype=torch.float64)
    supervised = torch.tensor([entry.num_supervised for entry in store.entries], dtype=torch.float64)
    if not len(store):
        return []
    quantiles = torch.quantile(lengths, torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)).tolist()
    return [
        "tokens a sample: " + ", ".join(f"{q:.0f}" for q in quantiles) + " (least, 10 %, median, 90 %, most)",
        f"supervised: {supervised.sum() / lengths.sum():.1%} of tokens; "
        f"{int((supervised == 0).sum())} samples have none",
    ]


def sizes_of(store: FeatureStore) -> list[str]:
    """Returns a line for each codec: the bytes of a token's states."""
    manifest = store.manifest
    share = sum(entry.num_last for entry in store.entries) / max(1, store.num_tokens)
    num_states = len(manifest.capture_layers) + share
    return [
        f"{name}: {num_states * state_bytes(codec_named(name, store.dtype), manifest.hidden_size):,.0f} bytes of "
        f"states a token"
        for name in get_args(CodecName)
    ]


def state_errors(states: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:  # (N, D) -> (N,), (N,)
    """Returns each state's error relative to its length, and relative to its typical number."""
    states = states.float()
    error = decoded.float() - states
    typical = states.abs().median(dim=1).values / TYPICAL
    root_mean = error.square().mean(dim=1).sqrt()
    return error.norm(dim=1) / states.norm(dim=1).clamp(min=1e-30), root_mean / typical.clamp(min=1e-30)


@dataclass(frozen=True)
class CodecError:
    """What a codec does to the states of one layer, as means over states."""

    codec: Codec
    state: str  # the boundary, or "last"
    of_length: float  # error relative to the state's length
    of_typical: float  # error relative to the state's typical number
    of_typical_first_token: float | None  # likewise, of first tokens alone; None where the last state of none is kept
    worst_channel: float  # largest error of a channel, relative to that channel's length

    def __str__(self) -> str:
        name = self.state if self.state == "last" else f"layer {self.state}"
        first = "" if self.of_typical_first_token is None else f" (first tokens {self.of_typical_first_token:.2%})"
        return (
            f"{self.codec}, {name}: error {self.of_length:.2%} of a state's length, {self.of_typical:.2%} of its "
            f"typical number{first}, {self.worst_channel:.2%} of the worst channel"
        )


def errors_of_codecs(store: FeatureStore, num_samples: int, advance: Callable[[int], None]) -> list[CodecError]:
    """Measures what each lossy codec would make of the first samples; nothing of states that a lossy one had before.

    Raises:
        FloatingPointError: a state is not finite.
    """
    if store.manifest.codec in LARGEST_CODE or CODED_BEFORE in store.manifest.engine_facts:
        return []
    hidden_size, layers = store.manifest.hidden_size, store.manifest.capture_layers
    states: dict[str, list[Tensor]] = {}
    firsts: list[int] = []
    num_rows = 0
    for index in range(min(num_samples, len(store))):
        sample = store[index]
        if not all(map(all_finite, (sample.aux_hidden_states, sample.last_hidden_states))):
            raise FloatingPointError(
                f"states must be finite to be measured, got others (sample {sample.sample_id!r}); capture it again, or "
                f"drop it"
            )
        firsts.append(num_rows)
        num_rows += sample.input_ids.numel()
        pieces = sample.aux_hidden_states.split(hidden_size, 1)
        for name, piece in zip(map(str, layers), pieces, strict=True):
            states.setdefault(name, []).append(piece)
        states.setdefault("last", []).append(sample.last_hidden_states)
        advance(1)
    errors = []
    for codec in LARGEST_CODE:
        for name, parts in states.items():
            exact = torch.cat(parts)
            if not len(exact):  # nothing is supervised
                continue
            decoded = decode(encode(exact, hidden_size, codec), hidden_size, exact.dtype)
            by_length, by_typical = state_errors(exact, decoded)
            channels = (decoded.float() - exact.float()).norm(dim=0) / exact.float().norm(dim=0).clamp(min=1e-30)
            first = None if name == "last" else float(by_typical[firsts].mean())
            errors.append(
                CodecError(codec, name, float(by_length.mean()), float(by_typical.mean()), first, float(channels.max()))
            )
    return errors
