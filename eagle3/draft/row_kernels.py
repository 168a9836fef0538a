"""Elementwise work of the draft layer on a GPU, in Triton.

One program does one row, so that a norm reads its row once. Each kernel has an equal in plain torch in `fusion`, which
runs on the CPU and is what the tests compare with; sums are taken in fp32, whatever is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_PROGRAMS = 528  # of a norm's backward, each with a part of the weight's gradient: four a multiprocessor of an H200
HEADS_PER_PROGRAM = 16  # of 128 numbers: two reads of 16 bytes a thread in flight
COLUMNS_PER_PROGRAM = 2048  # two reads of 16 bytes a thread at 4 warps


def norm(
    states: Tensor,  # (N, D), or (V, D) with an index; of any row stride
    weight: Tensor,  # (D,)
    eps: float,
    normed: Tensor,  # (N, D) to be written, of any row stride
    *,
    index: Tensor | None = None,  # (N,) which of `states` each row reads
    update: Tensor | None = None,  # (N, D) added first
    total: Tensor | None = None,  # (N, D) to be written: the sum, where there is an update
) -> None:
    """Writes the RMSNorm of each row."""
    num_rows, width = normed.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        states,
        states.stride(0),
        index,
        update,
        weight,
        total,
        normed,
        normed.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=_norm_warps(block),
    )


def norm_backward(
    states: Tensor,  # (N, D), or (V, D) with an index; of any row stride
    weight: Tensor,  # (D,)
    eps: float,
    grad: Tensor,  # (N, D) of the norm, of any row stride
    *,
    index: Tensor | None = None,  # (N,)
    added: Tensor | None = None,  # (N, D) gradient that reaches the states past the norm
    grad_states: Tensor | None = None,  # (N, D) to be written
) -> Tensor:  # (D,) the weight's gradient, fp32
    """Writes the gradient of the states, where it is wanted; returns the weight's."""
    num_rows, width = grad.shape
    num_programs = min(num_rows, NORM_PROGRAMS)
    parts = torch.empty(num_programs, width, dtype=torch.float32, device=grad.device)
    block = triton.next_power_of_2(width)
    _norm_backward_kernel[(num_programs,)](
        states,
        states.stride(0),
        index,
        weight,
        grad,
        grad.stride(0),
        added,
        grad_states,
        parts,
        num_rows,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=_norm_warps(block),
    )
    return parts.sum(0)


def swiglu(gate_up: Tensor, product: Tensor) -> None:  # (N, 2I), (N, I) to be written
    """Writes silu(gate) * up."""
    num_rows, width = product.shape
    block = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(width))
    _swiglu_kernel[(num_rows, triton.cdiv(width, block))](gate_up, product, WIDTH=width, BLOCK=block)


def swiglu_backward(
    gate_up: Tensor,  # (N, 2I)
    grad: Tensor,  # (N, I) of the product
    product: Tensor,  # (N, I) to be written: silu(gate) * up once more
    grad_gate_up: Tensor,  # (N, 2I) to be written
) -> None:
    """Makes the product again beside its gradient: both need the same reads."""
    num_rows, width = product.shape
    block = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    _swiglu_backward_kernel[grid](gate_up, grad, product, grad_gate_up, WIDTH=width, BLOCK=block)


def rotate(
    heads: Tensor,  # (N, n, d)
    rotated: Tensor,  # (N, n, d) to be written
    num_rotated: int,
    positions: Tensor,  # (N,) int64
    cos: Tensor,  # (P, d/2) fp32
    sin: Tensor,  # (P, d/2) fp32
    table: Tensor,  # (T, H, d)
    index: Tensor,  # (N,) int64, each row of the table at most once; below 0 for none
    first_head: int,  # of the table's
    *,
    backward: bool,
) -> None:
    """Adds rows of the table to the heads and applies RoPE to the first of them, or goes back.

    Backward, heads are turned back, and what comes of it is added to the table, which is its gradient then.
    """
    num_rows, num_heads, head_dim = heads.shape
    assert heads.is_contiguous(), heads.stride()
    assert table.is_contiguous(), table.stride()
    _rotate_kernel[(num_rows, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        heads,
        rotated,
        positions,
        cos,
        sin,
        table,
        index,
        first_head,
        TABLE_HEADS=table.shape[1],
        BACKWARD=backward,
        HEADS=num_heads,
        ROTATED=num_rotated,
        HALF=head_dim // 2,
        HEADS_BLOCK=min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads)),
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
    )


def take(source: Tensor, index: Tensor, taken: Tensor) -> None:
    """Writes row `index[i]` of `source`, of any row stride, as row i; zeros where the index is below 0."""
    num_rows, width = taken.shape[0], taken[0].numel()
    block = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(width))
    _take_kernel[(num_rows, triton.cdiv(width, block))](
        source, source.stride(0), index, taken, WIDTH=width, BLOCK=block
    )


def _norm_warps(block: int) -> int:
    """Returns warps for 16 numbers a thread: two reads of 16 bytes, and few enough registers for two rows at a time."""
    return min(16, max(1, block // 512))


@triton.jit
def _norm_kernel(
    states,
    states_stride,
    index,
    update,
    weight,
    total,
    normed,
    normed_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    value = tl.load(states + source * states_stride + lanes, mask=mask, other=0.0).to(tl.float32)
    if update is not None:
        value += tl.load(update + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is stored.
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + lanes, stored, mask=mask)
        value = stored.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_stride + lanes, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward_kernel(
    states,
    states_stride,
    index,
    weight,
    grad,
    grad_stride,
    added,
    grad_states,
    parts,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    scale = tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    for number in range(program, num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        source = row
        if index is not None:
            source = tl.load(index + row).to(tl.int64)
        unit = tl.load(states + source * states_stride + lanes, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + lanes, mask=mask, other=0.0).to(tl.float32)
        inverse_root = tl.rsqrt(tl.sum(unit * unit, axis=0) / WIDTH + eps)
        unit *= inverse_root
        part += g * unit
        if grad_states is not None:
            g *= scale
            # What lies along the row changes its length alone, and the norm takes that out.
            g = (g - unit * (tl.sum(g * unit, axis=0) / WIDTH)) * inverse_root
            if added is not None:
                g += tl.load(added + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_states + row * WIDTH + lanes, g.to(grad_states.dtype.element_ty), mask=mask)
    tl.store(parts + program * WIDTH + lanes, part, mask=mask)


@triton.jit
def _swiglu_kernel(gate_up, product, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(product + row * WIDTH + lanes, value.to(product.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad, product, grad_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    open_share = tl.sigmoid(gate)
    silu = gate * open_share
    tl.store(product + row * WIDTH + lanes, (silu * up).to(product.dtype.element_ty), mask=mask)
    grad_gate = g * up * (open_share + silu * (1 - open_share))
    tl.store(grad_gate_up + row * 2 * WIDTH + lanes, grad_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
    grad_up = g * silu
    tl.store(grad_gate_up + (row * 2 + 1) * WIDTH + lanes, grad_up.to(grad_gate_up.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    heads,
    rotated,
    positions,
    cos,
    sin,
    table,
    index,
    first_head,
    TABLE_HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    lane = tl.arange(0, HALF_BLOCK)
    angle = tl.load(positions + row) * HALF + lane
    c = tl.load(cos + angle, mask=lane < HALF, other=0.0)
    s = tl.load(sin + angle, mask=lane < HALF, other=0.0)
    if BACKWARD:
        s = -s
    turns = (head < ROTATED)[:, None]
    c = tl.where(turns, c[None, :], 1.0)
    s = tl.where(turns, s[None, :], 0.0)
    mask = (head < HEADS)[:, None] & (lane < HALF)[None, :]
    at = (row * HEADS + head)[:, None] * (2 * HALF) + lane[None, :]
    first = tl.load(heads + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=mask, other=0.0).to(tl.float32)
    token = tl.load(index + row)
    in_table = (token * TABLE_HEADS + first_head + head)[:, None] * (2 * HALF) + lane[None, :]
    given = mask & (token >= 0)
    table_first = tl.load(table + in_table, mask=given, other=0.0).to(tl.float32)
    table_second = tl.load(table + in_table + HALF, mask=given, other=0.0).to(tl.float32)
    if not BACKWARD:
        first += table_first
        second += table_second
    turned_first = first * c - second * s
    turned_second = second * c + first * s
    tl.store(rotated + at, turned_first.to(rotated.dtype.element_ty), mask=mask)
    tl.store(rotated + at + HALF, turned_second.to(rotated.dtype.element_ty), mask=mask)
    if BACKWARD:
        tl.store(table + in_table, (table_first + turned_first).to(table.dtype.element_ty), mask=given)
        tl.store(table + in_table + HALF, (table_second + turned_second).to(table.dtype.element_ty), mask=given)


@triton.jit
def _take_kernel(source, source_stride, index, taken, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    mask = lanes < WIDTH
    value = tl.load(source + at * source_stride + lanes, mask=mask & (at >= 0), other=0.0)
    tl.store(taken + row * WIDTH + lanes, value, mask=mask)
