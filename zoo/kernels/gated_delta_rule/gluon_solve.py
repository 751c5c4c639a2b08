# mypy: ignore-errors
"""The same as ``triton_solve`` in bfloat16 for Hopper: one warp inverts one chunk, in registers but a few exchanges.

Tiles are 16 x 16. A tensor-core product leaves its result where a left operand of the next product is read, and where
a right operand is read if that is the transpose of the result, as long as the positions of a tile are dealt out to
threads in one order throughout (``TILE``). So all products hand over in registers. With K_rc = k_r k_c^T of two
different tiles of rows, the decays split at a position m between them,

    A_rc = diag(b_i 2^(g_i - m + n_i)) K_rc diag(2^(m - g_j + n_j)),   n = log2 1/|k|

and scale the small inverses X_r diag(b) instead of every K_rc.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from zoo.kernels.gated_delta_rule.gluon_tiles import reinterpret
from zoo.kernels.gated_delta_rule.triton_tiles import LOG2_E, LOWEST_LOG_DECAY, NORM_EPS

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
TILE = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [2, 0]], [[0, 4], [0, 8], [1, 0], [4, 0], [8, 0]], [], [], [16, 16])
)
"""MMA's accumulator with rows and columns 2 t + 8 h + e renamed to 4 t + 2 h + e: four columns in a row a thread."""
TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 2, 0], [1, 0, 0], [2, 0, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 4, 0], [0, 8, 0]], [], [], [4, 16, 16],
    )
)  # fmt: skip
"""Four of them."""
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [4, 1, 8], [1, 1, 1], [2, 1, 0]))
"""Two columns of one of four tiles a thread."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
PLAIN_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, order=[1, 0]))
"""Rows of 16 float32: reads of a TILE are without bank conflicts."""


@gluon.constexpr_function
def _keys_layout(width):
    """Return a layout of [4, 16, width], rows as in TILE, eight columns in a row a thread."""
    wide = [[0, 0, 1 << bit] for bit in range(5, width.bit_length() - 1)]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *wide, [0, 2, 0], [1, 0, 0], [2, 0, 0]]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 4, 0], [0, 8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [4, 16, width])


@gluon.jit
def _add(a, b):
    """Return the sum; what a scan takes."""
    return a + b


@gluon.jit
def _log2(x):
    """Return log2(x) of x that is not tiny, to 22 bits."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _load_keys(k, t, end, stride_t, WIDTH: gl.constexpr):
    """Load [64, WIDTH], zeros from ``end`` on."""
    layout: gl.constexpr = _keys_layout(WIDTH)
    blocks = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None] * 16
    rows = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    pointers = k + rows.to(gl.int64) * stride_t + blocks.to(gl.int64) * stride_t + columns
    return gl.reshape(gl.load(pointers, mask=t + blocks + rows < end, other=0.0), [64, WIDTH])


@gluon.jit
def _halves(x_IJ, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the upper and the lower half of [ROWS, COLUMNS]."""
    return gl.split(gl.permute(gl.reshape(x_IJ, [2, ROWS // 2, COLUMNS]), (1, 2, 0)))


@gluon.jit
def _side_halves(acc, COLUMNS: gl.constexpr):
    """Return the left and the right half of [16, COLUMNS], as MMA leaves them."""
    left, right = gl.split(gl.permute(gl.reshape(acc, [16, 2, COLUMNS // 2]), (0, 2, 1)))
    left = gl.convert_layout(left, MMA, assert_trivial=True)
    return left, gl.convert_layout(right, MMA, assert_trivial=True)


@gluon.jit
def _gram(a_IK, b_JK, acc, N: gl.constexpr, WIDTH: gl.constexpr):
    """Return acc + a b^T of 16 and N rows, acc as MMA leaves it.

    The columns are contracted in an order that suits the loads.
    """
    a_IK = gl.permute(gl.reshape(a_IK, [4, 2, 2, WIDTH // 32, 4, 2, 2, 2]), (1, 0, 2, 3, 5, 6, 4, 7))
    b_JK = gl.permute(gl.reshape(b_JK, [N // 16, 4, 2, 2, WIDTH // 32, 4, 2, 2, 2]), (0, 2, 1, 3, 4, 6, 7, 5, 8))
    left: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    a_IK = gl.convert_layout(gl.reshape(a_IK, [16, WIDTH]), left, assert_trivial=True)
    b_KJ = gl.convert_layout(gl.permute(gl.reshape(b_JK, [N, WIDTH]), (1, 0)), right, assert_trivial=True)
    return mma_v2(a_IK, b_KJ, acc)


@gluon.jit
def _zero(N: gl.constexpr = 16):
    """Return an accumulator [16, N] of MMA."""
    return gl.zeros([16, N], gl.float32, MMA)


@gluon.jit
def _tile(acc):
    """Return MMA's accumulator as a TILE."""
    x = gl.reshape(gl.permute(gl.reshape(acc, [2, 4, 2, 2, 4, 2]), (1, 0, 2, 4, 3, 5)), [16, 16])
    return gl.convert_layout(x, TILE, assert_trivial=True)


@gluon.jit
def _product(a_IJ, b_KJ, acc):
    """Return acc + a b^T of two TILEs, acc as MMA leaves it."""
    a_IJ = gl.permute(gl.reshape(a_IJ, [4, 2, 2, 4, 2, 2]), (1, 0, 2, 4, 5, 3))
    b_KJ = gl.permute(gl.reshape(b_KJ, [4, 2, 2, 4, 2, 2]), (1, 0, 2, 4, 5, 3))
    left: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
    a_IJ = gl.convert_layout(gl.reshape(a_IJ, [16, 16]), left, assert_trivial=True)
    b_JK = gl.convert_layout(gl.permute(gl.reshape(b_KJ, [16, 16]), (1, 0)), right, assert_trivial=True)
    return mma_v2(a_IJ, b_JK, acc)


@gluon.jit
def _columns(vector, ROW: gl.constexpr):
    """Load 16 factors of the columns of a TILE."""
    return vector.slice(ROW, 16).load(gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def _stack(a, b, c, d):
    """Return [4, 16, 16] of four accumulators of MMA, each as a TILE."""
    x = gl.join(gl.join(_tile(a), _tile(c)), gl.join(_tile(b), _tile(d)))
    return gl.convert_layout(gl.reshape(gl.permute(x, (2, 3, 0, 1)), [4, 16, 16]), TILES, assert_trivial=True)


@gluon.jit
def _write(tiles, acc, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """Store the tile at (ROW, COLUMN) of the inverse; ``tiles`` are the pointers of the first."""
    gl.store(tiles + (64 * ROW + COLUMN), _tile(acc).to(tiles.dtype.element_ty))


@gluon.jit
def _small_inverses(a_s, beta_XJ):
    """Return (I + A)^-1 diag(b) of four tiles, [4, 16, 16].

    ``a_s`` holds A^T of each, of which only what is above the diagonal is read.
    """
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    x_XIJ = gl.where(i == j, gl.expand_dims(beta_XJ, 1), gl.zeros([4, 16, 16], gl.float32, COLUMNS))
    columns = reinterpret(a_s, gl.float32, [4, 256], PLAIN)
    for s in gl.static_range(15):
        a_XI = columns.slice(16 * s, 16, dim=1).load(gl.SliceLayout(2, COLUMNS))
        bits_XJ = gl.sum(gl.where(i == s, x_XIJ.to(gl.int32, bitcast=True), 0), 1)
        line_XJ = bits_XJ.to(gl.float32, bitcast=True)
        x_XIJ = gl.where(i > s, x_XIJ - gl.expand_dims(a_XI, 2) * gl.expand_dims(line_XJ, 1), x_XIJ)
    return x_XIJ


@gluon.jit(do_not_specialize=["length", "heads", "chunks", "stride_gb", "stride_gt", "stride_bb", "stride_bt"])
def specialized_solve_kernel(
    k, log_decay, beta, lengths, inverse, gates, norms, bounds,
    length, heads, chunks, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh, stride_bb, stride_bt,
    stride_bh,
    K: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """Write what ``triton_solve.solve_kernel`` writes; one warp; K is at least 32."""
    C: gl.constexpr = 64
    WIDTH: gl.constexpr = min(K, 64)
    program = gl.program_id(0)
    head = program % heads
    rest = program // heads
    chunk = rest % chunks
    row = rest // chunks
    end = gl.minimum(gl.maximum(gl.load(lengths + row), 0), length)
    t = chunk * C
    if t >= end:
        return
    k += row.to(gl.int64) * stride_kb + head * stride_kh + t.to(gl.int64) * stride_kt
    log_decay += row.to(gl.int64) * stride_gb + head * stride_gh
    beta += row.to(gl.int64) * stride_bb + head * stride_bh
    place = (row.to(gl.int64) * heads + head) * chunks + chunk
    out = inverse + place * C * C
    dtype: gl.constexpr = inverse.dtype.element_ty

    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    halves: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [1, 1], [1, 0])
    positions = gl.arange(0, C, line)
    valid_C = t + positions < end
    times_C = (t + positions).to(gl.int64)
    log_a_C = gl.load(log_decay + times_C * stride_gt, mask=valid_C, other=0.0)
    beta_C = gl.load(beta + times_C * stride_bt, mask=valid_C, other=0.0)
    k_CK = _load_keys(k, t, end, stride_kt, WIDTH)
    log_a_C = gl.maximum(log_a_C.to(gl.float32), LOWEST_LOG_DECAY, propagate_nan=tl.PropagateNan.ALL)
    gates_C = gl.associative_scan(log_a_C * LOG2_E, 0, _add)
    gl.store(gates + place * C + positions, gates_C)
    gates_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
    beta_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
    gates_s.store(gates_C)
    beta_s.store(beta_C.to(gl.float32))

    k0, k1, k2, k3 = _zero(), _zero(32), _zero(), _zero(64)
    k2_first = _zero(32)
    for column in gl.static_range(0, K, WIDTH):
        if column > 0:
            k_CK = _load_keys(k + column, t, end, stride_kt, WIDTH)
        first, second = _halves(k_CK, 64, WIDTH)
        rows0, rows1 = _halves(first, 32, WIDTH)
        rows2, rows3 = _halves(second, 32, WIDTH)
        k3 = _gram(rows3, k_CK, k3, 64, WIDTH)
        k2_first = _gram(rows2, first, k2_first, 32, WIDTH)
        k2 = _gram(rows2, rows2, k2, 16, WIDTH)
        k1 = _gram(rows1, first, k1, 32, WIDTH)
        k0 = _gram(rows0, rows0, k0, 16, WIDTH)
    k3_first, k3_second = _side_halves(k3, 64)
    k30, k31 = _side_halves(k3_first, 32)
    k32, k33 = _side_halves(k3_second, 32)
    k20, k21 = _side_halves(k2_first, 32)
    k10, k11 = _side_halves(k1, 32)

    # rows_s holds g + n, columns_s g - n; a decay is 2 to the difference.
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))[None, None, :]
    squares_XIJ = _stack(k0, k11, k2, k33)
    gates_PX = reinterpret(gates_s, gl.float32, [2, 32], PLAIN).load(halves)
    norms_PX = gl.zeros([2, 32], gl.float32, halves)
    rows_s = gates_s
    columns_s = gates_s
    norms_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
    reinterpret(norms_s, gl.float32, [4, 16], PLAIN).store(gl.sum(gl.where(i == j, squares_XIJ, 0.0), 2))
    # A normalised key is not longer than 1.
    grown_C = beta_C.to(gl.float32)
    if not NORMALIZE:
        grown_C *= norms_s.load(line)
    grown_C = _log2(gl.maximum(gl.abs(1.0 - grown_C), 1.0, propagate_nan=tl.PropagateNan.ALL))
    gl.store(bounds + place, gl.sum(grown_C + log_a_C * LOG2_E, 0))
    if NORMALIZE:
        rows_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
        columns_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
        norms_PX = -0.5 * _log2(reinterpret(norms_s, gl.float32, [2, 32], PLAIN).load(halves) + NORM_EPS)
        p = gl.arange(0, 2, gl.SliceLayout(1, halves))[:, None]
        x = gl.arange(0, 32, gl.SliceLayout(0, halves))[None, :]
        gl.store(norms + place * C + (32 * p + x), norms_PX)
        reinterpret(rows_s, gl.float32, [2, 32], PLAIN).store(gates_PX + norms_PX)
        reinterpret(columns_s, gl.float32, [2, 32], PLAIN).store(gates_PX - norms_PX)
    # A^T of the tiles on the diagonal: row j holds column j of A; anything on and below their own diagonals.
    a_s = gl.allocate_shared_memory(gl.float32, [C, 16], PLAIN)
    rows_XI = reinterpret(rows_s, gl.float32, [4, 16], PLAIN).load(gl.SliceLayout(1, TILES))
    columns_XJ = reinterpret(columns_s, gl.float32, [4, 16], PLAIN).load(gl.SliceLayout(2, TILES))
    beta_XI = reinterpret(beta_s, gl.float32, [4, 16], PLAIN).load(gl.SliceLayout(1, TILES))
    decays_XJI = gl.exp2(gl.expand_dims(rows_XI, 1) - gl.expand_dims(columns_XJ, 2))
    a_XJI = squares_XIJ * decays_XJI * gl.expand_dims(beta_XI, 1)
    reinterpret(a_s, gl.float32, [4, 16, 16], PLAIN_3D).store(a_XJI)

    # Factors of the two pairs of tiles, split at positions 15 and 47, and of the lower left quarter, split at 31:
    # 2^(m - g + n) before m, -2^(g - m + n) after.
    x = gl.arange(0, 32, gl.SliceLayout(0, halves))[None, :]
    p = gl.arange(0, 2, gl.SliceLayout(1, halves))[:, None]
    split_s = reinterpret(gates_s, gl.float32, [2, 32], PLAIN)
    pair_PX = gates_PX - split_s.slice(15, 1, dim=1).load(halves)
    quarter_PX = gates_PX - split_s.slice(0, 1).slice(31, 1, dim=1).load(halves)
    pair_PX = gl.exp2(gl.where(x < 16, norms_PX - pair_PX, norms_PX + pair_PX))
    quarter_PX = gl.exp2(gl.where(p == 0, norms_PX - quarter_PX, norms_PX + quarter_PX))
    pair_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
    quarter_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN_VECTOR)
    reinterpret(pair_s, gl.float32, [2, 32], PLAIN).store(gl.where(x < 16, pair_PX, -pair_PX))
    reinterpret(quarter_s, gl.float32, [2, 32], PLAIN).store(gl.where(p == 0, quarter_PX, -quarter_PX))

    beta_XJ = reinterpret(beta_s, gl.float32, [4, 16], PLAIN).load(gl.SliceLayout(1, COLUMNS))
    x_XIJ = _small_inverses(a_s, beta_XJ)
    x_s = reinterpret(a_s, gl.float32, [C, 16], SWIZZLED)
    x_s.store(gl.reshape(gl.permute(x_XIJ, (0, 2, 1)), [C, 16]))
    blocks = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS)))[:, None, None] * 16
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    gl.store(out + ((blocks + i) * C + (blocks + j)), x_XIJ.to(dtype))

    # X^T of each tile, and X = I X by a product. Y is (A X)^T without the factor of A's rows.
    i = gl.arange(0, 16, gl.SliceLayout(1, TILE))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, TILE))[None, :]
    unit = gl.where(i == j, 1.0, 0.0)
    tiles = out + (i * C + j)
    x0 = x_s.slice(0, 16).load(TILE)
    x1 = x_s.slice(16, 16).load(TILE)
    x2 = x_s.slice(32, 16).load(TILE)
    x3 = x_s.slice(48, 16).load(TILE)
    x1_rows = _tile(_product(unit, x1, _zero()))
    x2_rows = _tile(_product(unit, x2, _zero()))
    x3_rows = _tile(_product(unit, x3, _zero()))
    y10 = _tile(_product(x0 * _columns(pair_s, 0), _tile(k10), _zero()))
    y32 = _tile(_product(x2 * _columns(pair_s, 32), _tile(k32), _zero()))
    x1_pair = x1_rows * _columns(pair_s, 16)
    t10 = _product(x1_pair, y10, _zero())
    t10_columns = _tile(_product(y10, x1_pair, _zero()))
    t32 = _product(x3_rows * _columns(pair_s, 48), y32, _zero())
    _write(tiles, t10, 16, 0)
    _write(tiles, t32, 48, 32)

    x0 *= _columns(quarter_s, 0)
    x1 *= _columns(quarter_s, 16)
    t10_columns *= _columns(quarter_s, 16)
    x2_rows *= _columns(quarter_s, 32)
    t32 = _tile(t32) * _columns(quarter_s, 32)
    x3_rows *= _columns(quarter_s, 48)
    y20 = _tile(_product(t10_columns, _tile(k21), _product(x0, _tile(k20), _zero())))
    y30 = _tile(_product(t10_columns, _tile(k31), _product(x0, _tile(k30), _zero())))
    y21 = _tile(_product(x1, _tile(k21), _zero()))
    y31 = _tile(_product(x1, _tile(k31), _zero()))
    _write(tiles, _product(x2_rows, y20, _zero()), 32, 0)
    _write(tiles, _product(x2_rows, y21, _zero()), 32, 16)
    _write(tiles, _product(t32, y20, _product(x3_rows, y30, _zero())), 48, 0)
    _write(tiles, _product(t32, y21, _product(x3_rows, y31, _zero())), 48, 16)

    above: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])
    i = gl.arange(0, 16, gl.SliceLayout(1, above))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, above))[None, :]
    zeros = out + (i * C + j)
    for r in gl.static_range(3):
        for c in gl.static_range(r + 1, 4):
            gl.store(zeros + (64 * 16 * r + 16 * c), gl.zeros([16, 16], dtype, above))
