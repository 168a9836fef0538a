"""How hidden states are stored: as they are, or in one byte a number.

A hidden state has a few channels that are a hundred times larger than the rest, and a first token (the attention sink)
that is a thousand times larger in two or three of them. One scale over such numbers would round all others to nothing,
so the largest OUTLIERS of each state are taken out and kept as bf16 beside their columns, and each group of the rest
has a scale of its own.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Codec = Literal["bf16", "fp32", "int8", "fp8"]
CodecName = Literal["exact", "int8", "fp8"]  # what people choose from; exact is that of the states' dtype
# The codec in which states of a dtype come back bit for bit.
EXACT_CODECS: dict[torch.dtype, Codec] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
CODE_DTYPES: dict[Codec, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
LARGEST_CODE: dict[Codec, float] = {"int8": 127.0, "fp8": 448.0}
# Chosen on SmolLM2's states: 16 exact numbers beside groups of 192 err less than 8 beside groups of 64, in fewer bytes.
OUTLIERS, GROUP = 16, 128
STATES_PER_CHUNK = 4096  # states whose fp32 copies exist at one time


@dataclass(frozen=True)
class CodedStates:
    """N rows of S states side by side, as a codec keeps them; an exact codec has the codes alone."""

    codes: Tensor  # (N, S*D) the states themselves, or int8, or float8_e4m3fn
    scales: Tensor | None = None  # (N, S*G) bf16, one of each group
    outlier_columns: Tensor | None = None  # (N, S*O) int16, 0..D-1, ascending in each state
    outliers: Tensor | None = None  # (N, S*O) bf16; their codes are 0

    def to(self, device: torch.device | str) -> "CodedStates":
        """Copies to a device, without a wait where the source is pinned."""
        beside = (self.scales, self.outlier_columns, self.outliers)
        moved = (None if one is None else one.to(device, non_blocking=True) for one in beside)
        return CodedStates(self.codes.to(device, non_blocking=True), *moved)

    def at(self, rows: Tensor) -> "CodedStates":  # (R,) -> R rows
        """Returns some of the rows, as they are coded."""
        beside = (self.scales, self.outlier_columns, self.outliers)
        return CodedStates(self.codes[rows], *(None if one is None else one[rows] for one in beside))


def is_exact(codec: Codec) -> bool:
    """Tells whether a codec keeps states bit for bit."""
    return codec not in LARGEST_CODE


def codec_named(name: CodecName, dtype: torch.dtype) -> Codec:
    """Returns the codec that a name means for states of a dtype."""
    return EXACT_CODECS[dtype] if name == "exact" else name


def name_of(codec: Codec) -> CodecName:
    """Returns the name by which people choose a codec."""
    return codec if codec == "int8" or codec == "fp8" else "exact"


def group_size(hidden_size: int) -> int:
    """Returns the numbers that share a scale: the largest divisor of D that is at most GROUP."""
    return next(size for size in range(min(GROUP, hidden_size), 0, -1) if hidden_size % size == 0)


def num_outliers(hidden_size: int) -> int:
    """Returns how many numbers of a state are kept beside its codes."""
    return min(OUTLIERS, hidden_size // 8)


def state_bytes(codec: Codec, hidden_size: int) -> int:
    """Returns the bytes of one stored state."""
    code_bytes = CODE_DTYPES[codec].itemsize * hidden_size
    if is_exact(codec):
        return code_bytes
    return code_bytes + 2 * (hidden_size // group_size(hidden_size)) + 4 * num_outliers(hidden_size)


def encode(states: Tensor, hidden_size: int, codec: Codec) -> CodedStates:  # (N, S*D)
    """Codes states where they lie; what is not finite is the caller's to keep away."""
    assert hidden_size < 2**15, f"columns must fit int16, got D {hidden_size}"
    if is_exact(codec):
        assert states.dtype == CODE_DTYPES[codec], (states.dtype, codec)
        return CodedStates(states)
    num_rows, width = states.shape
    assert width % hidden_size == 0, (width, hidden_size)
    chunks = [_encode_chunk(chunk, codec) for chunk in states.reshape(-1, hidden_size).split(STATES_PER_CHUNK)]
    joined = (torch.cat([getattr(chunk, each.name) for chunk in chunks]) for each in fields(CodedStates))
    num_states = width // hidden_size
    return CodedStates(*(one.reshape(num_rows, num_states * one.shape[1]) for one in joined))


def decode(coded: CodedStates, hidden_size: int, dtype: torch.dtype) -> Tensor:  # (N, S*D)
    """Returns the states in `dtype`, on the device where the codes are."""
    if coded.scales is None:
        return coded.codes.to(dtype)
    assert coded.outlier_columns is not None, "coded states must have their outliers"
    assert coded.outliers is not None, "coded states must have their outliers"
    num_rows, width = coded.codes.shape
    num_states, num_groups = num_rows * (width // hidden_size), coded.scales.shape[1]
    codes = coded.codes.view(num_rows, num_groups, width // num_groups)  # (N, S*G, g)
    scales = coded.scales.unsqueeze(-1)
    if codes.dtype != torch.int8 or dtype != torch.bfloat16:
        codes, scales = codes.to(dtype), scales.to(dtype)
    # int8 times bf16 is one kernel, rounded once.
    states = (codes * scales).view(num_states, hidden_size)  # (N*S, D)
    shape = (num_states, coded.outliers.shape[1] * hidden_size // width)  # (N*S, O)
    states.scatter_(1, coded.outlier_columns.view(shape).long(), coded.outliers.view(shape).to(dtype))
    return states.view(num_rows, width)


def rounding_steps(coded: CodedStates, hidden_size: int) -> Tensor:  # (N, S*D) fp32
    """Returns how far apart the numbers are that a lossy codec can tell, around each number that it keeps."""
    assert coded.scales is not None, "an exact codec rounds nothing"
    num_rows, width = coded.codes.shape
    groups = coded.codes.float().view(num_rows, coded.scales.shape[1], -1)  # (N, S*G, g)
    steps = torch.ones_like(groups)
    if coded.codes.dtype != torch.int8:  # three bits behind the leading one, which is 2**-6 at least
        steps = torch.ldexp(steps, groups.abs().clamp(min=2**-6).frexp().exponent - 4)
    steps = (steps * coded.scales.float().unsqueeze(-1)).view(num_rows, width)
    # Outliers, and what is decoded to bf16, are rounded to its eight bits.
    return steps.hypot(torch.finfo(torch.bfloat16).eps * decode(coded, hidden_size, torch.float32))


def _encode_chunk(states: Tensor, codec: Codec) -> CodedStates:  # (M, D)
    hidden_size = states.shape[1]
    rest = states.to(torch.float32, copy=True)
    columns = rest.abs().topk(num_outliers(hidden_size), dim=1, sorted=False).indices.sort(dim=1).values  # (M, O)
    outliers = rest.gather(1, columns).bfloat16()
    rest.scatter_(1, columns, 0.0)
    size = group_size(hidden_size)
    groups = rest.view(states.shape[0], hidden_size // size, size)  # (M, G, g)
    scales = (groups.abs().amax(dim=2) / LARGEST_CODE[codec]).bfloat16()  # (M, G)
    scales.masked_fill_(scales == 0, 1)
    # The scale is rounded, so that the largest number of a group may lie a little beyond the largest code.
    limit = LARGEST_CODE[codec]
    groups.div_(scales.float().unsqueeze(-1)).clamp_(-limit, limit)
    codes = groups.round_().to(torch.int8) if codec == "int8" else groups.to(torch.float8_e4m3fn)
    return CodedStates(codes.view(states.shape), scales, columns.to(torch.int16), outliers)
