"""What a store's states look like: lengths, bytes a token, and what codecs make of them.

A plain relative error would say little: a state's length is that of its few large numbers. So the error is also given
in units of the state's typical number, where a first token cannot hide it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3.features.codec import CODE_DTYPES, LARGEST_CODE, Codec, decode, encode, state_bytes
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
        f"{codec}: {num_states * state_bytes(codec, manifest.hidden_size):,.0f} bytes of states a token"
        for codec in CODE_DTYPES
    ]


def state_errors(states: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:  # (N, D) -> (N,), (N,)
    """Returns each state's error relative to its length, and relative to its typical number."""
    states = states.float()
    error = decoded.float() - states
    typical = states.abs().median(dim=1).values / TYPICAL
    root_mean = error.square().mean(dim=1).sqrt()
    return error.norm(dim=1) / states.norm(dim=1).clamp(min=1e-30), root_mean / typical.clamp(min=1e-30)


def error_of_codecs(store: FeatureStore, num_samples: int, advance: Callable[[int], None]) -> list[str]:
    """Returns a line for each lossy codec and captured state: what it would make of the first samples."""
    if store.manifest.codec in LARGEST_CODE:
        return [f"errors: not measured, the states of this store are coded already ({store.manifest.codec})"]
    hidden_size, layers = store.manifest.hidden_size, store.manifest.capture_layers
    errors: dict[tuple[Codec, str], list[tuple[Tensor, Tensor]]] = {}
    for index in range(min(num_samples, len(store))):
        sample = store[index]
        parts = dict(
            zip([f"layer {layer}" for layer in layers], sample.aux_hidden_states.split(hidden_size, 1), strict=True)
        )
        for name, states in (parts | {"last": sample.last_hidden_states}).items():
            for codec in LARGEST_CODE:
                decoded = decode(encode(states, hidden_size, codec), hidden_size, states.dtype)
                errors.setdefault((codec, name), []).append(state_errors(states, decoded))
        advance(1)
    lines = []
    for (codec, name), pairs in errors.items():
        by_length, by_typical = (torch.cat(each) for each in zip(*pairs, strict=True))
        line = (
            f"{codec}, {name}: error {by_length.mean():.2%} of a state's length, "
            f"{by_typical.mean():.2%} of its typical number"
        )
        if name != "last":
            first = torch.stack([pair[1][0] for pair in pairs])
            line += f" (first tokens {first.mean():.2%})"
        lines.append(line)
    return lines
