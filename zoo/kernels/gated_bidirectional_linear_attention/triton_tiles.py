# mypy: ignore-errors
"""Pieces that the forward and backward kernels share: where a program works, how it loads a tile, the feature map.

EXACT says that the tensors are float32. Otherwise exponents are scaled to base 2 first, which is one fused
multiply-add, and the sigmoid takes its reciprocal as a squared reciprocal square root, two instructions where a
division is five; both are far more precise than 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """With programmatic dependent launch: let the next kernel be launched, then wait for all of the one before.

    Nothing is read or written before this, so the order of effects is that of ordinary launches; only the launches
    themselves overlap.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def to_operand(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``x`` as an operand of a gradient product; the tensor cores cut tf32 off, so it is rounded first."""
    if PRECISION == "tf32":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000
        rounded = (bits & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # the GPU's own NaN, 0x7fffffff, would round to zero
    return x.to(DOT)


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
def wide(x):
    """Return an integer as a 64-bit scalar; Triton's interpreter counts loops in Python's own."""
    return tl.zeros([], tl.int64) + x


@triton.jit
def whole_tiles(start, end, BLOCK_L: tl.constexpr):
    """Return where the last whole tile of [start, end) ends."""
    return start + tl.maximum(end - start, 0) // BLOCK_L * BLOCK_L


@triton.jit
def load_tile(
    packed, desc, row_start, t, end, stride_l, column,
    D: tl.constexpr, BLOCK_L: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK_L, D] at position t; MASKED zeroes positions from ``end`` on.

    With TMA the tile comes through a descriptor of the whole projection as [B * L, P]; otherwise through pointers that
    start at this row. Offsets within a tile are 32-bit and the same in every tile; the tile's own is 64-bit.
    """
    rows = tl.arange(0, BLOCK_L)
    if TMA:
        tile = desc.load([row_start + t, column])
        if MASKED:
            tile = tl.where((t + rows < end)[:, None], tile, 0.0)
    else:
        pointers = packed + wide(t) * stride_l + column + (rows[:, None] * stride_l + tl.arange(0, D)[None, :])
        if MASKED:
            tile = tl.load(pointers, mask=(t + rows < end)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    target, desc, row_start, t, stop, stride_l, column, tile,
    D: tl.constexpr, BLOCK_L: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store [BLOCK_L, D] at position t in the target's dtype, nothing from ``stop`` on; the twin of ``load_tile``."""
    tile = tile.to(target.dtype.element_ty)
    rows = tl.arange(0, BLOCK_L)
    pointers = target + wide(t) * stride_l + column + (rows[:, None] * stride_l + tl.arange(0, D)[None, :])
    if MASKED:
        tl.store(pointers, tile, mask=(t + rows < stop)[:, None])
    elif TMA:
        desc.store([row_start + t, column], tile)
    else:
        tl.store(pointers, tile)


@triton.jit
def zero_tiles(target, start, end, stop, stride_l, column, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Store zeros from the first tile of [start, stop) that holds nothing before ``end``."""
    first = start + (tl.maximum(end - start, 0) + BLOCK_L - 1) // BLOCK_L * BLOCK_L
    zeros_LD = tl.zeros([BLOCK_L, D], target.dtype.element_ty)
    for t in tl.range(first, stop, BLOCK_L):
        store_tile(target, target, 0, t, stop, stride_l, column, zeros_LD, D, BLOCK_L, False, True)


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
def exponential(x, EXACT: tl.constexpr):
    """Return exp(x), within about one unit in the last place if EXACT.

    The GPU's exp2 alone errs by the rounding of x log2(e), many units where x is large; so x is reduced by a multiple
    of log(2) first, whose high part has few enough bits for exact products (Cody and Waite's reduction).
    """
    if EXACT:
        x = tl.clamp(x, -200.0, 200.0, propagate_nan=tl.PropagateNan.ALL)
        whole = tl.floor(x * LOG2_E + 0.5)
        rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
        y = tl.exp2(rest * LOG2_E) * tl.exp2(whole)
    else:
        y = tl.exp2(x * LOG2_E)
    return y


@triton.jit
def logarithm(x, EXACT: tl.constexpr):
    """Return log(x) for x > 0, with one Newton step if EXACT: the GPU's own errs by some units."""
    y = tl.log(x)
    if EXACT:
        y += x * exponential(-y, True) - 1.0
    return y


@triton.jit
def quotient(x, y, EXACT: tl.constexpr):
    """Return x / y for tensors of one shape, rounded correctly if EXACT."""
    if EXACT:
        z = tl.div_rn(x, y)
    else:
        z = x / y
    return z


@triton.jit
def exp_rows(x_LD, row_L, EXACT: tl.constexpr):
    """Return exp(x + row)."""
    if EXACT:
        y_LD = exponential(x_LD + row_L[:, None], True)
    else:
        y_LD = tl.exp2(x_LD * LOG2_E + (row_L * LOG2_E)[:, None])
    return y_LD


@triton.jit
def exp_rows_columns(x_LD, offset, row_L, column_D, EXACT: tl.constexpr):
    """Return exp(x - offset + row - column)."""
    if EXACT:
        y_LD = exponential(x_LD - offset + row_L[:, None] - column_D[None, :], True)
    else:
        columns_D = (column_D + offset) * LOG2_E
        y_LD = tl.exp2(x_LD * LOG2_E + ((row_L * LOG2_E)[:, None] - columns_D[None, :]))
    return y_LD


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """Return 1 / (1 + exp(-x))."""
    if EXACT:
        y = inverse(1.0 + exponential(-x, True), True)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
        y = root * root
    return y


@triton.jit
def inverse(x, EXACT: tl.constexpr):
    """Return 1 / x."""
    return quotient(tl.full(x.shape, 1.0, tl.float32), x, EXACT)


@triton.jit
def inverse_root(x, EXACT: tl.constexpr):
    """Return 1 / sqrt(x)."""
    if EXACT:
        y = inverse(tl.sqrt_rn(x), True)
    else:
        y = tl.rsqrt(x)
    return y
