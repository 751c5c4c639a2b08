"""Pieces that the forward and backward kernels share: where a program works, and how it loads a tile."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def split_program(heads, blocks):
    """Return (head, block, row) of this program; neighbouring programs share rows of memory, so heads run fastest."""
    program = tl.program_id(0)
    rest = program // heads
    return program % heads, rest % blocks, rest // blocks


@triton.jit
def row_length(lengths, row, length):
    """Return the number of valid positions of a row, clamped to [0, length]."""
    return tl.minimum(tl.maximum(tl.load(lengths + row), 0), length)


@triton.jit
def load_tile(
    packed, desc, row_start, t, end, stride_l, column,
    D: tl.constexpr, BLOCK_L: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK_L, D] at position t; MASKED zeroes positions from ``end`` on.

    With TMA the tile comes through a descriptor of the whole projection as [B * L, P]; otherwise through pointers that
    start at this row.
    """
    rows = t + tl.arange(0, BLOCK_L)
    if TMA:
        tile = desc.load([row_start + t, column])
        if MASKED:
            tile = tl.where((rows < end)[:, None], tile, 0.0)
    else:
        columns = column + tl.arange(0, D)
        pointers = packed + rows.to(tl.int64)[:, None] * stride_l + columns[None, :]
        if MASKED:
            tile = tl.load(pointers, mask=(rows < end)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_gate(
    packed, t, end, stride_l, column, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return the gate logits [BLOCK_L] in float32, zero without a key gate; -inf from ``end`` on."""
    rows = t + tl.arange(0, BLOCK_L)
    if KEY_GATE:
        pointers = packed + rows.to(tl.int64) * stride_l + column
        if MASKED:
            gate_L = tl.load(pointers, mask=rows < end, other=float("-inf")).to(tl.float32)
        else:
            gate_L = tl.load(pointers).to(tl.float32)
    elif MASKED:
        gate_L = tl.where(rows < end, 0.0, float("-inf"))
    else:
        gate_L = tl.zeros([BLOCK_L], tl.float32)
    return gate_L


@triton.jit
def below_zero(x):
    """Return e(x) = min(x, 0), NaN for NaN."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def above_zero(x):
    """Return a(x) = max(x, 0) + 1, NaN for NaN; phi(x) = a(x) exp(e(x))."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + 1.0


@triton.jit
def exp_below(x, largest):
    """Return exp(x - largest); the difference comes first, so that it is exact near the largest."""
    return tl.exp2((x - largest) * LOG2_E)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))
