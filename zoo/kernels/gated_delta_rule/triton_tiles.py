# mypy: ignore-errors
"""Pieces that the kernels of the gated delta rule share: where a program works, tiles, decays between positions.

Suffixes: C positions of a chunk, K key width, V values of a block; X blocks of a chunk, I and J positions of a block.
EXACT says that the tensors are float32. Decays between two positions are then sums of the logarithms between them;
otherwise they are differences of sums from the chunk's start, to base 2, which strong decay makes coarser, though never
as coarse as 16 bits are (logarithms are cut off at -60, beyond which nothing is left of the state).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST_LOG_DECAY: tl.constexpr = tl.constexpr(-60.0)
NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def wide(x):
    """Return an integer as a 64-bit scalar; Triton's interpreter counts loops in Python's own."""
    return tl.zeros([], tl.int64) + x


@triton.jit
def exponential(x):
    """Return exp(x)."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def power(x, EXACT: tl.constexpr):
    """Return e to the x if EXACT, else 2 to the x: what gates are logarithms to."""
    return exponential(x) if EXACT else tl.exp2(x)


@triton.jit
def row_length(lengths, row, length):
    """Return the number of valid positions of a row, clamped to [0, length]."""
    return tl.minimum(tl.maximum(tl.load(lengths + row), 0), length)


@triton.jit
def _cells(x, t, end, stride_t, C: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr):
    """Return pointers to [C, PADDED] from position t, and which are before ``end`` and column W."""
    rows = tl.arange(0, C)
    columns = tl.arange(0, PADDED)
    mask = (t + rows < end)[:, None]
    if W < PADDED:
        mask = mask & (columns < W)[None, :]
    return x + wide(t) * stride_t + (rows[:, None] * stride_t + columns[None, :]), mask


@triton.jit
def load_rows(
    x, t, end, stride_t, C: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr, AGAIN: tl.constexpr = False
):  # fmt: skip
    """Load [C, PADDED] from position t of one row and head, zeros from ``end`` on and from column W on.

    AGAIN forbids to reuse an earlier load.
    """
    pointers, mask = _cells(x, t, end, stride_t, C, W, PADDED)
    return tl.load(pointers, mask=mask, other=0.0, volatile=AGAIN)


@triton.jit
def store_rows(x, tile, t, end, stride_t, C: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr):
    """Store the first W columns of [C, PADDED] from position t, nothing from ``end`` on."""
    pointers, mask = _cells(x, t, end, stride_t, C, W, PADDED)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(
    x, desc, row_start, t, end, stride_t, column,
    C: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load [C, W] from position t; MASKED zeroes positions from ``end`` on.

    With TMA the tile comes through a descriptor of the whole tensor as [B * T, H * W], where the row starts at
    ``row_start``; otherwise through pointers that start at this row. ``column`` is the head's first.
    """
    if TMA:
        tile = desc.load([row_start + t, column])
        if MASKED:
            tile = tl.where((t + tl.arange(0, C) < end)[:, None], tile, 0.0)
    elif MASKED:
        tile = load_rows(x + column, t, end, stride_t, C, W, W)
    else:
        rows = tl.arange(0, C)
        tile = tl.load(x + wide(t) * stride_t + column + (rows[:, None] * stride_t + tl.arange(0, W)[None, :]))
    return tile


@triton.jit
def store_tile(
    x, desc, row_start, t, end, stride_t, column, tile_CW,
    C: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store [C, W] from position t, nothing from ``end`` on; the twin of ``load_tile``."""
    if MASKED:
        store_rows(x + column, tile_CW, t, end, stride_t, C, W, W)
    elif TMA:
        desc.store([row_start + t, column], tile_CW.to(x.dtype.element_ty))
    else:
        rows = tl.arange(0, C)
        pointers = x + wide(t) * stride_t + column + (rows[:, None] * stride_t + tl.arange(0, W)[None, :])
        tl.store(pointers, tile_CW.to(x.dtype.element_ty))


@triton.jit
def inverse_norm(x_CW):
    """Return 1 / sqrt(|x|^2 + eps) of each row, float32."""
    x_CW = x_CW.to(tl.float32)
    return tl.rsqrt(tl.sum(x_CW * x_CW, 1) + NORM_EPS)


@triton.jit
def load_norms(norms, C: tl.constexpr, NORMALIZE: tl.constexpr, EXACT: tl.constexpr):
    """Return the factors of the norms of a chunk's keys, and the same as ``pair_factor`` takes them."""
    norm_C = tl.full([C], 1.0, tl.float32)
    stored_C = one(C, EXACT)
    if NORMALIZE:
        stored_C = tl.load(norms + tl.arange(0, C))
        norm_C = stored_C if EXACT else tl.exp2(stored_C)
    return norm_C, stored_C


@triton.jit
def one(C: tl.constexpr, EXACT: tl.constexpr):
    """Return factors of one as ``pair_factor`` takes them."""
    return tl.full([C], 1.0 if EXACT else 0.0, tl.float32)


@triton.jit
def pair_factor(gates_C, row_C, column_C, STRICT: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """Return D_ij row_i column_j for i >= j (i > j if STRICT), else 0.

    ``gates_C`` holds log a if EXACT, else the sums of log2 a from the chunk's start; then the factors are logarithms to
    base 2 too, and one exponential does it all.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    inside = i > j if STRICT else i >= j
    if EXACT:
        sums_CC = tl.cumsum(tl.where(i > j, gates_C[:, None], 0.0), 0)
        factor_CC = exponential(tl.where(inside, sums_CC, float("-inf"))) * row_C[:, None] * column_C[None, :]
    else:
        row_C = gates_C + row_C
        column_C = gates_C - column_C
        factor_CC = tl.exp2(tl.where(inside, row_C[:, None] - column_C[None, :], float("-inf")))
    return factor_CC


@triton.jit
def pair_factor_transposed(gates_C, row_C, column_C, C: tl.constexpr, EXACT: tl.constexpr):
    """Return the same transposed, [j, i], for i >= j."""
    j = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    if EXACT:
        sums_CC = tl.cumsum(tl.where(i > j, gates_C[None, :], 0.0), 1)
        factor_CC = exponential(tl.where(i >= j, sums_CC, float("-inf"))) * row_C[None, :] * column_C[:, None]
    else:
        row_C = gates_C + row_C
        column_C = gates_C - column_C
        factor_CC = tl.exp2(tl.where(i >= j, row_C[None, :] - column_C[:, None], float("-inf")))
    return factor_CC


@triton.jit
def chunk_decays(gates_C, C: tl.constexpr, EXACT: tl.constexpr):
    """Return exp(g_i) [C] from the chunk's start, exp(g_C - g_j) [C] to its end, and exp(g_C) of the whole chunk."""
    positions = tl.arange(0, C)
    if EXACT:
        later_CC = tl.where(positions[:, None] > positions[None, :], gates_C[:, None], 0.0)
        from_start_C = exponential(tl.cumsum(gates_C, 0))
        to_end_C = exponential(tl.sum(later_CC, 0))
        whole = exponential(tl.sum(gates_C, 0))
    else:
        last = tl.sum(tl.where(positions == C - 1, gates_C, 0.0), 0)
        from_start_C = tl.exp2(gates_C)
        to_end_C = tl.exp2(last - gates_C)
        whole = tl.exp2(last)
    return from_start_C, to_end_C, whole
