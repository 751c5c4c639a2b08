# mypy: ignore-errors
"""What a chunk's writes need before the state is known: T diag(b), T the inverse of a unit lower triangular matrix.

    I + A,  A_ij = b_i D_ij k_i.k_j for i > j           T = (I + A)^-1

One program inverts one chunk by blocks. Where L is lower triangular with diagonal blocks P and Q and R below,

    [P 0; R Q]^-1 = [P^-1 0; -Q^-1 R P^-1 Q^-1]

so an inverse of blocks of twice the size is two products. Blocks grow from 1 to 16 in place, as X - X R X with X the
inverse of the block diagonal, then to 32 and 64 with the blocks in tensors of their own. Each step is a substitution:
no powers of A, which would overflow their precision where keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_delta_rule.triton_tiles import (
    LOG2_E,
    LOWEST_LOG_DECAY,
    NORM_EPS,
    load_rows,
    power,
    row_length,
    wide,
)


@triton.jit
def _blocks(x, t, end, stride_t, first: tl.constexpr, step: tl.constexpr, X: tl.constexpr, K: tl.constexpr):
    """Load the 16-row blocks first, first + step, ... of a chunk, [X, 16, K], zeros from ``end`` on."""
    rows_XI = (tl.arange(0, X) * step + first)[:, None] * 16 + tl.arange(0, 16)[None, :]
    pointers = x + wide(t) * stride_t + rows_XI[:, :, None] * stride_t + tl.arange(0, K)[None, None, :]
    return tl.load(pointers, mask=(t + rows_XI < end)[:, :, None], other=0.0)


@triton.jit
def _halves(x_XI):
    """Return the even and the odd blocks of a vector [4, 16], [2, 16] each."""
    return tl.split(tl.permute(tl.reshape(x_XI, [2, 2, 16]), [0, 2, 1]))


@triton.jit
def _grow(x_XIJ, a_XIJ, i, j, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverses of the diagonal blocks of twice SIZE rows of I + A, from those of SIZE rows."""
    below = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    product_XIJ = tl.dot(x_XIJ, tl.where(below, a_XIJ, 0.0), input_precision=PRECISION)
    return x_XIJ - tl.dot(product_XIJ, x_XIJ, input_precision=PRECISION)


@triton.jit
def _small_inverses(a_XIJ, PRECISION: tl.constexpr):
    """Return the inverses of I + A, for strictly lower triangular A of 16 rows."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    x_XIJ = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a_XIJ, 0.0))
    x_XIJ = _grow(x_XIJ, a_XIJ, i, j, 2, PRECISION)
    x_XIJ = _grow(x_XIJ, a_XIJ, i, j, 4, PRECISION)
    return _grow(x_XIJ, a_XIJ, i, j, 8, PRECISION)


@triton.jit
def _side_by_side(left_XIJ, right_XIJ, X: tl.constexpr, I: tl.constexpr, J: tl.constexpr):  # noqa: E741
    """Return [X, I, 2 J]."""
    return tl.reshape(tl.permute(tl.join(left_XIJ, right_XIJ), [0, 1, 3, 2]), [X, I, 2 * J])


@triton.jit(do_not_specialize=("length", "heads", "chunks", "stride_gb", "stride_gt", "stride_bb", "stride_bt"))
def solve_kernel(
    k, log_decay, beta, lengths, inverse, gates, norms, bounds,
    length, heads, chunks, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh, stride_bb, stride_bt,
    stride_bh,
    K: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write T diag(b) [64, 64], the gates, the norms of the keys and a bound of one chunk of one row and head.

    ``inverse`` is [B, H, N, 64, 64], ``gates`` and ``norms`` [B, H, N, 64] float32, ``bounds`` [B, H, N] float32: the
    logarithm to base 2 of what the norm of a state can grow by, as |a (I - b k k^T)| = a max(1, |1 - b |k|^2|). Chunks
    of nothing but padding are left as they are.
    """
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    # The errors of the inverse grow from block to block, and tensor cores cut off what float32 sums round.
    INVERSE: tl.constexpr = "ieee" if EXACT else PRECISION
    C: tl.constexpr = 64
    program = tl.program_id(0)
    head = program % heads
    rest = program // heads
    chunk = rest % chunks
    row = rest // chunks
    end = row_length(lengths, row, length)
    t = chunk * C
    if t >= end:
        return
    positions = tl.arange(0, C)
    valid_C = t + positions < end
    k += row.to(tl.int64) * stride_kb + head * stride_kh
    log_decay += row.to(tl.int64) * stride_gb + head * stride_gh + (t + positions).to(tl.int64) * stride_gt
    beta += row.to(tl.int64) * stride_bb + head * stride_bh + (t + positions).to(tl.int64) * stride_bt
    place = (row.to(tl.int64) * heads + head) * chunks + chunk
    log_a_C = tl.load(log_decay, mask=valid_C, other=0.0).to(tl.float32)
    beta_C = tl.load(beta, mask=valid_C, other=0.0).to(tl.float32)
    gates_C = log_a_C
    if not EXACT:
        log_a_C = tl.maximum(log_a_C, LOWEST_LOG_DECAY, propagate_nan=tl.PropagateNan.ALL)
        gates_C = tl.cumsum(log_a_C * LOG2_E, 0)
    tl.store(gates + place * C + positions, gates_C)

    # Blocks of 16 rows.
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    gates_XI = tl.reshape(gates_C, [4, 16])
    if EXACT:
        sums_XIJ = tl.cumsum(tl.where(i > j, gates_XI[:, :, None], 0.0), 1)
    else:
        sums_XIJ = gates_XI[:, :, None] - gates_XI[:, None, :]
    k_XIK = _blocks(k, t, end, stride_kt, 0, 1, 4, K)
    a_XIJ = tl.dot(k_XIK, tl.permute(k_XIK, [0, 2, 1]), input_precision=PRECISION)
    factor_XI = tl.full([4, 16], 1.0, tl.float32)
    squares_XI = tl.sum(tl.where(i == j, a_XIJ, 0.0), 2)
    if NORMALIZE:
        factor_XI = tl.rsqrt(squares_XI + NORM_EPS)
        blocks_XI = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(norms + place * C + blocks_XI, factor_XI if EXACT else tl.log2(factor_XI))
    beta_XI = tl.reshape(beta_C, [4, 16])
    grown_XI = tl.abs(1.0 - beta_XI * (squares_XI * factor_XI * factor_XI))
    grown_XI = tl.log2(tl.maximum(grown_XI, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(bounds + place, tl.sum(tl.sum(grown_XI, 1), 0) + tl.sum(log_a_C, 0) * LOG2_E)
    row_factor_XI = beta_XI * factor_XI
    a_XIJ *= power(tl.where(i > j, sums_XIJ, float("-inf")), EXACT) * row_factor_XI[:, :, None] * factor_XI[:, None, :]
    x_XIJ = _small_inverses(a_XIJ, INVERSE)
    out = inverse + place * C * C
    dtype = inverse.dtype.element_ty
    blocks = tl.arange(0, 4)[:, None, None] * 16
    tl.store(out + (blocks + i) * C + blocks + j, (x_XIJ * beta_XI[:, None, :]).to(dtype))

    # Pairs of blocks: rows of the odd ones, columns of the even ones. From one block to the next the logarithm of the
    # decay is the sum to the end of the one and from the start of the other.
    if EXACT:
        from_start_XI = tl.cumsum(gates_XI, 1)
        to_end_XI = tl.sum(tl.where(i > j, gates_XI[:, :, None], 0.0), 1)
    else:
        from_start_XI = gates_XI
        to_end_XI = -gates_XI
    _, from_start_PI = _halves(from_start_XI)
    to_end_PJ, _ = _halves(to_end_XI)
    _, row_factor_PI = _halves(row_factor_XI)
    factor_PJ, _ = _halves(factor_XI)
    beta_PJ, _ = _halves(beta_XI)
    k_even_PIK = _blocks(k, t, end, stride_kt, 0, 2, 2, K)
    k_odd_PIK = _blocks(k, t, end, stride_kt, 1, 2, 2, K)
    a_PIJ = tl.dot(k_odd_PIK, tl.permute(k_even_PIK, [0, 2, 1]), input_precision=PRECISION)
    a_PIJ *= power(from_start_PI[:, :, None] + to_end_PJ[:, None, :], EXACT)
    a_PIJ *= row_factor_PI[:, :, None] * factor_PJ[:, None, :]
    even_PIJ, odd_PIJ = tl.split(tl.permute(tl.reshape(x_XIJ, [2, 2, 16, 16]), [0, 2, 3, 1]))
    x_PIJ = -tl.dot(tl.dot(odd_PIJ, a_PIJ, input_precision=INVERSE), even_PIJ, input_precision=INVERSE)
    pairs = tl.arange(0, 2)[:, None, None] * 32
    tl.store(out + (pairs + 16 + i) * C + pairs + j, (x_PIJ * beta_PJ[:, None, :]).to(dtype))
    tl.store(out + (pairs + i) * C + pairs + 16 + j, tl.zeros([2, 16, 16], dtype))

    # The halves of the chunk.
    above_PIX = _side_by_side(even_PIJ, tl.zeros([2, 16, 16], tl.float32), 2, 16, 16)
    below_PIX = _side_by_side(x_PIJ, odd_PIJ, 2, 16, 16)
    x_PXX = tl.reshape(tl.permute(tl.join(above_PIX, below_PIX), [0, 3, 1, 2]), [2, 32, 32])
    first_XX, second_XX = tl.split(tl.permute(x_PXX, [1, 2, 0]))
    rows = tl.arange(0, 32)
    gates_first_X, gates_second_X = tl.split(tl.permute(tl.reshape(gates_XI, [2, 32]), [1, 0]))
    factor_first_X, _ = tl.split(tl.permute(tl.reshape(factor_XI, [2, 32]), [1, 0]))
    _, row_factor_second_X = tl.split(tl.permute(tl.reshape(row_factor_XI, [2, 32]), [1, 0]))
    beta_first_X, _ = tl.split(tl.permute(tl.reshape(beta_XI, [2, 32]), [1, 0]))
    if EXACT:
        to_end_X = tl.sum(tl.where(rows[:, None] > rows[None, :], gates_first_X[:, None], 0.0), 0)
        from_start_X = tl.cumsum(gates_second_X, 0)
    else:
        to_end_X = -gates_first_X
        from_start_X = gates_second_X
    a_XX = tl.dot(
        load_rows(k, t + 32, end, stride_kt, 32, K, K), tl.trans(load_rows(k, t, end, stride_kt, 32, K, K)),
        input_precision=PRECISION,
    )  # fmt: skip
    a_XX *= power(from_start_X[:, None] + to_end_X[None, :], EXACT)
    a_XX *= row_factor_second_X[:, None] * factor_first_X[None, :]
    x_XX = -tl.dot(tl.dot(second_XX, a_XX, input_precision=INVERSE), first_XX, input_precision=INVERSE)
    tl.store(out + (32 + rows[:, None]) * C + rows[None, :], (x_XX * beta_first_X[None, :]).to(dtype))
    tl.store(out + rows[:, None] * C + 32 + rows[None, :], tl.zeros([32, 32], dtype))
