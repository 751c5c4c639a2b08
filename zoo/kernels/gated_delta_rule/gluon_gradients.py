# mypy: ignore-errors
"""The gradients that follow from the walks, chunk by chunk, for Hopper: the twin of ``gradients_kernel`` in bfloat16.

One program a multiprocessor takes one chunk of one row and head after the other. Four partitions of its warps work
side by side and meet at barriers in shared memory:

    loader  brings the tiles of the next chunks;
    values  makes the writes u of a chunk, block of values by block, then what needs dx, and dq;
    pairs   makes P and M before, the gradients W and Z of both after, then dk;
    decays  sums up the gradient of log a from what both have summed.

The names are those of ``triton_backward``; suffixes: C positions of a chunk, K key width, V the values of a block.
Tiles wait in two rings: one of chunks (q, k, T diag(b), gates), one of blocks of values (S, G, v, do, dv). When a chunk
is done, its gradients leave through tiles of its last block, which is only free again after that. ``place`` counts
chunks of all rows and heads; what is wholly padding takes no tiles and gets zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from zoo.kernels.gated_delta_rule.gluon_tiles import (
    clear_rows,
    reinterpret,
    thread_barrier,
    tile_like,
    tma_load,
    tma_store,
    valid_length,
)
from zoo.kernels.gated_delta_rule.triton_tiles import NORM_EPS

NEAR_ZERO_BETA: gl.constexpr = gl.constexpr(0.015625)

# Rows of what the loader writes about a chunk, each [C] float32. The first two are logarithms to base 2.
GATES: gl.constexpr = gl.constexpr(0)
NORMS: gl.constexpr = gl.constexpr(1)
LAST_GATE: gl.constexpr = gl.constexpr(2)
BETA: gl.constexpr = gl.constexpr(3)
CHUNK_ROWS: gl.constexpr = gl.constexpr(4)

# Rows that the partitions exchange, each [C] float32: for decays the sums that go into the gradient of g, those over
# the pairs that a position is the later or the earlier of, those of what its write leaves, and those of a value's row
# of the state with its gradient; for values 1 / |q|.
DG: gl.constexpr = gl.constexpr(0)
LATER: gl.constexpr = gl.constexpr(1)
EARLIER: gl.constexpr = gl.constexpr(2)
AFTER: gl.constexpr = gl.constexpr(3)
STATE: gl.constexpr = gl.constexpr(4)
Q_NORM: gl.constexpr = gl.constexpr(5)
SHARED_ROWS: gl.constexpr = gl.constexpr(6)

# Barriers between pairs, values and decays. Once a chunk, or a block for U, one partition arrives, at SUMS_FULL two.
U_FULL: gl.constexpr = gl.constexpr(0)
U_EMPTY: gl.constexpr = gl.constexpr(1)
PM_FULL: gl.constexpr = gl.constexpr(2)
PM_EMPTY: gl.constexpr = gl.constexpr(3)
W_FULL: gl.constexpr = gl.constexpr(4)
W_EMPTY: gl.constexpr = gl.constexpr(5)
SUMS_FULL: gl.constexpr = gl.constexpr(6)
SUMS_EMPTY: gl.constexpr = gl.constexpr(7)
BARRIERS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _digits(job, heads, chunks):
    """Return head, chunk and row of a job."""
    rest = job // heads
    return job % heads, rest % chunks, rest // chunks


@gluon.jit
def _after(head, chunk, row, step_head, step_chunk, step_row, heads, chunks):
    """Return head, chunk and row of a program's next job without dividing; of the number of programs the same."""
    head += step_head
    carry = head >= heads
    chunk += step_chunk + carry.to(gl.int32)
    head = gl.where(carry, head - heads, head)
    carry = chunk >= chunks
    return head, gl.where(carry, chunk - chunks, chunk), row + step_row + carry.to(gl.int32)


@gluon.jit
def _product(a, b, sum):
    """Return sum + a b."""
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(a, b, sum, is_async=True),))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_before(sum_a, last_a, sum_b, last_b):
    """Combine two stretches, each the sum of all but its last element and that: a scan gives what is before each."""
    return sum_a + last_a + sum_b, last_b


@gluon.jit
def _store_rows(x, tile_CK, t, row, head, length, heads, K: gl.constexpr):
    """Store a tile to x [B, T, H, K], nothing from ``length`` on."""
    layout: gl.constexpr = tile_CK.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    x += (row.to(gl.int64) * length * heads + head) * K
    # Offsets of rows depend on t, so that they occupy no registers from one chunk to the next.
    starts_C = (t + rows).to(gl.int64) * (heads * K)
    gl.store(x + starts_C[:, None] + columns[None, :], tile_CK, mask=(t + rows < length)[:, None])


@gluon.jit
def _store_zeros(x, t, row, head, length, heads, K: gl.constexpr):
    """Store zeros to the chunk at t of x [B, T, H, K]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    _store_rows(x, gl.zeros([64, K], x.dtype.element_ty, layout), t, row, head, length, heads, K)


@gluon.jit
def _store_gates(x, value_C, t, row, head, end, length, heads):
    """Store a chunk to x [B, T, H], zeros from ``end`` on, nothing from ``length`` on."""
    i = t + gl.arange(0, 64, value_C.type.layout)
    x += row.to(gl.int64) * length * heads + head
    gl.store(x + i.to(gl.int64) * heads, gl.where(i < end, value_C, 0.0), mask=i < length)


@gluon.jit
def _loader(
    q_desc, k_desc, inverse_desc, s_desc, g_desc, v_desc, do_desc, dv_desc,
    q_tiles, k_tiles, inverse_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, chunk_rows, full, empty,
    gates, norms, beta, lengths, batch, length, heads, chunks, stride_qh, stride_kh, stride_vh, stride_bb, stride_bt,
    stride_bh,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of one chunk after the other into both rings, as soon as both others have left their places.

    Of a row's last chunk, if it is not whole, the tiles land on a barrier of the loader's own. It then zeroes the rows
    beyond the end, where memory may hold anything, and only after that calls the place full.
    """
    C: gl.constexpr = 64
    PRIVATE: gl.constexpr = CHUNKS + BLOCKS
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    positions = gl.arange(0, C, layout)
    taken = 0
    blocks = 0
    waits = 0
    step_head, step_chunk, step_row = _digits(gl.num_programs(0), heads, chunks)
    head, chunk, row = _digits(gl.program_id(0), heads, chunks)
    while row < batch:
        end = valid_length(lengths, row, length)
        t = chunk * C
        if t < end:
            place = (row * heads + head) * chunks + chunk
            valid = end - t
            partial = valid < C
            wide_place = place.to(gl.int64)
            gates_C = gl.load(gates + wide_place * C + positions)
            last = gl.load(gates + wide_place * C + C - 1)
            cells_C = (t + positions).to(gl.int64) * stride_bt
            beta_C = gl.load(
                beta + row.to(gl.int64) * stride_bb + head.to(gl.int64) * stride_bh + cells_C,
                mask=positions < valid, other=0.0,
            )  # fmt: skip
            stage = taken % CHUNKS
            mbarrier.wait(empty.index(stage), ((taken // CHUNKS) & 1) ^ 1)
            rows = stage * CHUNK_ROWS
            chunk_rows.index(rows + GATES).store(gates_C)
            if NORMALIZE:
                chunk_rows.index(rows + NORMS).store(gl.load(norms + wide_place * C + positions))
            chunk_rows.index(rows + LAST_GATE).store(gl.zeros([C], gl.float32, layout) + last)
            chunk_rows.index(rows + BETA).store(beta_C.to(gl.float32))
            mbarrier.arrive(full.index(stage), count=1)
            arrival = full.index(gl.where(partial, PRIVATE, stage))
            mbarrier.expect(arrival, (2 * C * K + C * C) * 2)
            tma_load(k_desc, [row * length + t, head * stride_kh], arrival, k_tiles.index(stage))
            tma_load(q_desc, [row * length + t, head * stride_qh], arrival, q_tiles.index(stage))
            tma_load(inverse_desc, [place * C, 0], arrival, inverse_tiles.index(stage))
            if partial:
                mbarrier.wait(arrival, waits & 1)
                waits += 1
                clear_rows(q_tiles.index(stage), valid)
                clear_rows(k_tiles.index(stage), valid)
                fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
            taken += 1
            for first in gl.static_range(0, V, BLOCK_V):
                slot = blocks % BLOCKS
                mbarrier.wait(empty.index(CHUNKS + slot), ((blocks // BLOCKS) & 1) ^ 1)
                arrival = full.index(gl.where(partial, PRIVATE, CHUNKS + slot))
                mbarrier.expect(arrival, (2 * BLOCK_V * K + 3 * C * BLOCK_V) * 2)
                state = place * V + first
                value = head * V + first
                tma_load(s_desc, [state, 0], arrival, s_tiles.index(slot))
                tma_load(v_desc, [row * length + t, head * stride_vh + first], arrival, v_do_tiles.index(2 * slot))
                tma_load(g_desc, [state, 0], arrival, g_tiles.index(slot))
                tma_load(dv_desc, [row * length + t, value], arrival, dv_tiles.index(slot))
                tma_load(do_desc, [row * length + t, value], arrival, v_do_tiles.index(2 * slot + 1))
                if partial:
                    mbarrier.wait(arrival, waits & 1)
                    waits += 1
                    clear_rows(v_do_tiles.index(2 * slot), valid)
                    clear_rows(v_do_tiles.index(2 * slot + 1), valid)
                    clear_rows(dv_tiles.index(slot), valid)
                    fence_async_shared()
                    mbarrier.arrive(full.index(CHUNKS + slot), count=1)
                blocks += 1
        head, chunk, row = _after(head, chunk, row, step_head, step_chunk, step_row, heads, chunks)


@gluon.jit
def _values(
    dq_desc, dq, dbeta, q_tiles, k_tiles, inverse_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, dq_tiles,
    u_tile, p_tile, m_tile, w_tile, chunk_rows, shared_rows, full, empty, bars, lengths, batch, length, heads, chunks,
    scale,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Make u for pairs; with P and -M from there dx and so dbeta; with W from there dq.

    Block by block: x = v - exp(g) k S takes the place of v in shared memory, u = T diag(b) x, e = x - M u, dx, and the
    sum of do S. Pairs is sent the sums over all values that the gradient of the gates needs.
    """
    C: gl.constexpr = 64
    dtype: gl.constexpr = u_tile.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_wide_row: gl.constexpr = gl.SliceLayout(1, wide_layout)
    taken = 0
    blocks = 0
    step_head, step_chunk, step_row = _digits(gl.num_programs(0), heads, chunks)
    head, chunk, row = _digits(gl.program_id(0), heads, chunks)
    while row < batch:
        end = valid_length(lengths, row, length)
        t = chunk * C
        if t >= end:
            _store_zeros(dq, t, row, head, length, heads, K)
            _store_gates(dbeta, gl.zeros([C], gl.float32, by_row), t, row, head, end, length, heads)
        else:
            stage = taken % CHUNKS
            phase = taken & 1
            rows = stage * CHUNK_ROWS
            k_tile = k_tiles.index(stage)
            zeros_CV = gl.zeros([C, BLOCK_V], gl.float32, layout)
            dq_CK = gl.zeros([C, K], gl.float32, wide_layout)
            dg_C = gl.zeros([C], gl.float32, by_row)
            after_C = gl.zeros([C], gl.float32, by_row)
            db_C = gl.zeros([C], gl.float32, by_row)
            db_divided_C = gl.zeros([C], gl.float32, by_row)
            mbarrier.wait(full.index(stage), (taken // CHUNKS) & 1)
            gates_C = chunk_rows.index(rows + GATES).load(by_row)
            start_C = gates_C
            keep_C = chunk_rows.index(rows + LAST_GATE).load(by_row) - gates_C
            if NORMALIZE:
                norm_C = chunk_rows.index(rows + NORMS).load(by_row)
                start_C += norm_C
                keep_C += norm_C
            start_C = gl.exp2(start_C)
            keep_C = gl.exp2(keep_C)
            for first in gl.static_range(0, V, BLOCK_V):
                slot = blocks % BLOCKS
                v_tile = v_do_tiles.index(2 * slot)
                do_tile = v_do_tiles.index(2 * slot + 1)
                dv_tile = dv_tiles.index(slot)
                s_tile = s_tiles.index(slot)
                mbarrier.wait(full.index(CHUNKS + slot), (blocks // BLOCKS) & 1)
                told_CV = warpgroup_mma(k_tile, s_tile.permute((1, 0)), zeros_CV, is_async=True)
                x_CV = v_tile.load(layout).to(gl.float32)
                told_CV = warpgroup_mma_wait(0, deps=(told_CV,)) * start_C[:, None]
                dg_C -= gl.sum(dv_tile.load(layout).to(gl.float32) * told_CV, 1)
                x_CV = x_CV - told_CV
                v_tile.store(x_CV.to(dtype))
                fence_async_shared()
                thread_barrier()
                u_CV = warpgroup_mma(inverse_tiles.index(stage), v_tile, zeros_CV, is_async=True)
                dx_CV = warpgroup_mma(k_tile, g_tiles.index(slot).permute((1, 0)), zeros_CV, is_async=True)
                u_CV, dx_CV = warpgroup_mma_wait(0, deps=(u_CV, dx_CV))
                u_CV = u_CV.to(dtype)
                mbarrier.wait(bars.index(U_EMPTY), (blocks & 1) ^ 1)
                u_tile.store(u_CV)
                fence_async_shared()
                mbarrier.arrive(bars.index(U_FULL), count=1)
                if (first == 0) & (taken > 0):
                    tma.store_wait(0)
                    mbarrier.arrive(empty.index(CHUNKS + (blocks + BLOCKS - 1) % BLOCKS), count=1)
                u_CV = u_CV.to(gl.float32)
                dx_CV = dx_CV * keep_C[:, None]
                after_C += gl.sum(dx_CV * u_CV, 1)
                dv_CV = dv_tile.load(layout).to(gl.float32)
                db_divided_C += gl.sum(dv_CV * u_CV, 1)
                if first == 0:
                    mbarrier.wait(bars.index(PM_FULL), phase)
                x_CV = warpgroup_mma(m_tile, u_tile, x_CV, is_async=True)
                dx_CV = warpgroup_mma(p_tile.permute((1, 0)), do_tile, dx_CV, is_async=True)
                dx_CV = warpgroup_mma(m_tile.permute((1, 0)), dv_tile, dx_CV, is_async=True)
                dq_CK = warpgroup_mma(do_tile, s_tile, dq_CK, is_async=True)
                x_CV, dx_CV, dq_CK = warpgroup_mma_wait(0, deps=(x_CV, dx_CV, dq_CK))
                if first + BLOCK_V < V:
                    mbarrier.arrive(empty.index(CHUNKS + slot), count=1)
                db_C += gl.sum(dx_CV * x_CV, 1)
                blocks += 1
            q_norm_C = gl.full([C], 1.0, gl.float32, by_wide_row)
            if NORMALIZE:
                q_norm_C = shared_rows.index(Q_NORM).load(by_wide_row)
            mbarrier.arrive(bars.index(PM_EMPTY), count=1)
            beta_C = chunk_rows.index(rows + BETA).load(by_row)
            divides_C = gl.abs(beta_C) > NEAR_ZERO_BETA
            db_C = gl.where(divides_C, db_divided_C / gl.where(divides_C, beta_C * beta_C, 1.0), db_C)
            _store_gates(dbeta, db_C, t, row, head, end, length, heads)
            from_start_C = gl.exp2(gl.convert_layout(gates_C, by_wide_row))
            dq_CK = dq_CK * (from_start_C * q_norm_C * scale)[:, None]
            q_CK = q_tiles.index(stage).load(wide_layout).to(gl.float32)
            dg_C += gl.convert_layout(gl.sum(q_CK * dq_CK, 1), by_row)
            mbarrier.wait(bars.index(SUMS_EMPTY), phase ^ 1)
            shared_rows.index(DG).store(dg_C)
            shared_rows.index(AFTER).store(after_C)
            mbarrier.arrive(bars.index(SUMS_FULL), count=1)
            mbarrier.wait(bars.index(W_FULL), phase)
            dq_CK = _product(w_tile, k_tile, dq_CK)
            mbarrier.arrive(bars.index(W_EMPTY), count=1)
            if NORMALIZE:
                q_CK = q_tiles.index(stage).load(wide_layout).to(gl.float32)
                dq_CK = dq_CK - q_CK * (gl.sum(q_CK * dq_CK, 1) * q_norm_C * q_norm_C)[:, None]
            mbarrier.arrive(empty.index(stage), count=1)
            if t + C <= end:
                # All pairs wants of v and do of this block was done before it sent W.
                dq_tile = dq_tiles.index((blocks - 1) % BLOCKS * (2 * BLOCK_V // K))
                dq_tile.store(dq_CK.to(dtype))
                fence_async_shared()
                tma_store(dq_desc, [row * length + t, head * K], dq_tile)
            else:
                _store_rows(dq, dq_CK.to(dtype), t, row, head, length, heads, K)
            taken += 1
        head, chunk, row = _after(head, chunk, row, step_head, step_chunk, step_row, heads, chunks)
    tma.store_wait(0)


@gluon.jit
def _pairs(
    dk_desc, dk, q_tiles, k_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, dk_tiles, u_tile, p_tile, m_tile,
    w_tile, z_tile, chunk_rows, shared_rows, full, empty, bars, lengths, batch, length, heads, chunks, scale,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Make P and -M for values; with u from there W and Z, of which W goes back; then dk.

    Block by block: the sums of do u^T, of dv u^T, of the products of dv and u with the states, where the rows of dv and
    u take their factors first, and of the states with their gradients, on the diagonal of S G^T. SHARED says that W
    and -Z take the places of P and -M in shared memory.
    """
    C: gl.constexpr = 64
    dtype: gl.constexpr = u_tile.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, wide_layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_value_row: gl.constexpr = gl.SliceLayout(1, value_layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    by_wide_row: gl.constexpr = gl.SliceLayout(1, wide_layout)
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    by_value: gl.constexpr = by_row if BLOCK_V == C else gl.SliceLayout(1, narrow)
    i = gl.arange(0, C, by_row)[:, None]
    j = gl.arange(0, C, by_column)[None, :]
    taken = 0
    blocks = 0
    step_head, step_chunk, step_row = _digits(gl.num_programs(0), heads, chunks)
    head, chunk, row = _digits(gl.program_id(0), heads, chunks)
    while row < batch:
        end = valid_length(lengths, row, length)
        t = chunk * C
        if t >= end:
            _store_zeros(dk, t, row, head, length, heads, K)
        else:
            stage = taken % CHUNKS
            phase = taken & 1
            rows = stage * CHUNK_ROWS
            q_tile = q_tiles.index(stage)
            k_tile = k_tiles.index(stage)
            zeros_CC = gl.zeros([C, C], gl.float32, layout)
            mbarrier.wait(full.index(stage), (taken // CHUNKS) & 1)
            qk_CC = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros_CC, is_async=True)
            kk_CC = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zeros_CC, is_async=True)
            gates_C = chunk_rows.index(rows + GATES).load(by_row)
            columns_C = chunk_rows.index(rows + GATES).load(by_column)
            start_C = gates_C
            keep_C = chunk_rows.index(rows + LAST_GATE).load(by_row) - gates_C
            norm_C = gl.full([C], 1.0, gl.float32, by_row)
            q_norm_C = gl.full([C], 1.0, gl.float32, by_row)
            if NORMALIZE:
                norm_C = chunk_rows.index(rows + NORMS).load(by_row)
                columns_C -= chunk_rows.index(rows + NORMS).load(by_column)
                start_C += norm_C
                keep_C += norm_C
                norm_C = gl.exp2(norm_C)
                q_CK = q_tile.load(wide_layout).to(gl.float32)
                q_norm_C = gl.convert_layout(gl.rsqrt(gl.sum(q_CK * q_CK, 1) + NORM_EPS), by_row)
            factor_CC = gl.exp2(gl.where(i >= j, gates_C[:, None] - columns_C[None, :], float("-inf")))
            start_C = gl.convert_layout(-gl.exp2(start_C), by_value_row)
            keep_C = gl.convert_layout(gl.exp2(keep_C), by_value_row)
            qk_CC, kk_CC = warpgroup_mma_wait(0, deps=(qk_CC, kk_CC))
            mbarrier.wait(bars.index(PM_EMPTY), phase ^ 1)
            if SHARED:
                mbarrier.wait(bars.index(W_EMPTY), phase ^ 1)
            p_tile.store((qk_CC * factor_CC * (q_norm_C * scale)[:, None]).to(dtype))
            m_tile.store(gl.where(i > j, kk_CC * factor_CC * -norm_C[:, None], 0.0).to(dtype))
            if NORMALIZE:
                shared_rows.index(Q_NORM).store(q_norm_C)
            fence_async_shared()
            mbarrier.arrive(bars.index(PM_FULL), count=1)
            if taken > 0:
                tma.store_wait(0)
                mbarrier.arrive(empty.index(CHUNKS + (blocks + BLOCKS - 1) % BLOCKS), count=1)
            w_CC = zeros_CC
            z_CC = zeros_CC
            dk_CK = gl.zeros([C, K], gl.float32, wide_layout)
            state_V = gl.zeros([BLOCK_V], gl.float32, by_value)
            for first in gl.static_range(0, V, BLOCK_V):
                slot = blocks % BLOCKS
                dv_tile = dv_tiles.index(slot)
                s_tile = s_tiles.index(slot)
                g_tile = g_tiles.index(slot)
                mbarrier.wait(full.index(CHUNKS + slot), (blocks // BLOCKS) & 1)
                back_CV = (dv_tile.load(value_layout).to(gl.float32) * start_C[:, None]).to(dtype)
                # A product with an operand in registers goes last: nothing may take those while it runs.
                if BLOCK_V == C:
                    states_VV = warpgroup_mma(s_tile, g_tile.permute((1, 0)), zeros_CC, is_async=True)
                dk_CK = warpgroup_mma(gl.convert_layout(back_CV, left_layout), s_tile, dk_CK, is_async=True)
                if BLOCK_V == C:
                    dk_CK, states_VV = warpgroup_mma_wait(0, deps=(dk_CK, states_VV))
                    state_V += gl.sum(gl.where(i == j, states_VV, 0.0), 1)
                else:
                    state_V += gl.sum(s_tile.load(narrow).to(gl.float32) * g_tile.load(narrow).to(gl.float32), 1)
                    dk_CK = warpgroup_mma_wait(0, deps=(dk_CK,))
                mbarrier.wait(bars.index(U_FULL), blocks & 1)
                w_CC = warpgroup_mma(v_do_tiles.index(2 * slot + 1), u_tile.permute((1, 0)), w_CC, is_async=True)
                z_CC = warpgroup_mma(dv_tile, u_tile.permute((1, 0)), z_CC, is_async=True)
                kept_CV = (u_tile.load(value_layout).to(gl.float32) * keep_C[:, None]).to(dtype)
                dk_CK = warpgroup_mma(gl.convert_layout(kept_CV, left_layout), g_tile, dk_CK, is_async=True)
                w_CC, z_CC, dk_CK = warpgroup_mma_wait(0, deps=(w_CC, z_CC, dk_CK))
                mbarrier.arrive(bars.index(U_EMPTY), count=1)
                if first + BLOCK_V < V:
                    mbarrier.arrive(empty.index(CHUNKS + slot), count=1)
                blocks += 1
            # Of the gates that a pair sees, the first counts down; on the diagonal both are one and cancel.
            pairs_CC = w_CC * p_tile.load(layout).to(gl.float32) + z_CC * m_tile.load(layout).to(gl.float32)
            pairs_CC = gl.where(i > j, pairs_CC, 0.0)
            w_CC = w_CC * factor_CC * (q_norm_C * scale)[:, None]
            z_CC = gl.where(i > j, z_CC * factor_CC * -norm_C[:, None], 0.0)
            if SHARED:
                mbarrier.wait(bars.index(PM_EMPTY), phase)
            else:
                mbarrier.wait(bars.index(W_EMPTY), phase ^ 1)
            w_tile.store(w_CC.to(dtype))
            z_tile.store(z_CC.to(dtype))
            fence_async_shared()
            mbarrier.arrive(bars.index(W_FULL), count=1)
            dk_CK = warpgroup_mma(w_tile.permute((1, 0)), q_tile, dk_CK, is_async=True)
            dk_CK = warpgroup_mma(z_tile, k_tile, dk_CK, is_async=True)
            dk_CK = warpgroup_mma(z_tile.permute((1, 0)), k_tile, dk_CK, is_async=True)
            later_C = gl.sum(pairs_CC, 1)
            earlier_C = gl.sum(pairs_CC, 0)
            mbarrier.wait(bars.index(SUMS_EMPTY), phase ^ 1)
            shared_rows.index(LATER).store(later_C)
            shared_rows.index(EARLIER).store(earlier_C)
            shared_rows.index(STATE).slice(0, BLOCK_V).store(state_V)
            mbarrier.arrive(bars.index(SUMS_FULL), count=1)
            dk_CK = warpgroup_mma_wait(0, deps=(dk_CK,))
            if NORMALIZE:
                k_CK = k_tile.load(wide_layout).to(gl.float32)
                along_C = gl.sum(k_CK * dk_CK, 1) * gl.convert_layout(norm_C * norm_C, by_wide_row)
                dk_CK = dk_CK - k_CK * along_C[:, None]
            mbarrier.arrive(empty.index(stage), count=1)
            if t + C <= end:
                # All that values wants of G of this block was done before it sent u.
                dk_tile = dk_tiles.index((blocks - 1) % BLOCKS if BLOCK_V == C else 0)
                dk_tile.store(dk_CK.to(dtype))
                fence_async_shared()
                tma_store(dk_desc, [row * length + t, head * K], dk_tile)
            else:
                _store_rows(dk, dk_CK.to(dtype), t, row, head, length, heads, K)
            taken += 1
        head, chunk, row = _after(head, chunk, row, step_head, step_chunk, step_row, heads, chunks)
    tma.store_wait(0)


@gluon.jit
def _decays(
    dlog_decay, shared_rows, bars, gates, lengths, batch, length, heads, chunks, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """Make the gradient of log a of what both others have summed."""
    C: gl.constexpr = 64
    line: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    values: gl.constexpr = gl.BlockedLayout([BLOCK_V // 32], [32], [gl.num_warps()], [0])
    taken = 0
    step_head, step_chunk, step_row = _digits(gl.num_programs(0), heads, chunks)
    head, chunk, row = _digits(gl.program_id(0), heads, chunks)
    while row < batch:
        end = valid_length(lengths, row, length)
        t = chunk * C
        if t >= end:
            _store_gates(dlog_decay, gl.zeros([C], gl.float32, line), t, row, head, end, length, heads)
        else:
            place = ((row * heads + head) * chunks + chunk).to(gl.int64)
            last = gl.load(gates + place * C + C - 1)
            mbarrier.wait(bars.index(SUMS_FULL), taken & 1)
            dg_C = shared_rows.index(DG).load(line)
            dg_C += shared_rows.index(LATER).load(line) - shared_rows.index(EARLIER).load(line)
            after_C = shared_rows.index(AFTER).load(line)
            state_V = shared_rows.index(STATE).slice(0, BLOCK_V).load(values)
            mbarrier.arrive(bars.index(SUMS_EMPTY), count=1)
            # The decay of the state counts at all positions. What the write at j leaves in the state after the chunk
            # sees the decays after j: a sum over earlier writes.
            dlog_a_C = gl.associative_scan(dg_C, 0, _add, reverse=True) + gl.sum(state_V, 0) * gl.exp2(last)
            dlog_a_C += gl.associative_scan((gl.zeros([C], gl.float32, line), after_C), 0, _add_before)[0]
            _store_gates(dlog_decay, dlog_a_C, t, row, head, end, length, heads)
            taken += 1
        head, chunk, row = _after(head, chunk, row, step_head, step_chunk, step_row, heads, chunks)


@gluon.jit(do_not_specialize=["batch", "length", "heads", "chunks", "stride_bb", "stride_bt", "stride_bh"])
def specialized_gradients_kernel(
    q_desc, k_desc, v_desc, do_desc, dv_desc, inverse_desc, s_desc, g_desc, dq_desc, dk_desc,
    gates, norms, beta, lengths, dq, dk, dlog_decay, dbeta,
    batch, length, heads, chunks, stride_qh, stride_kh, stride_vh, stride_bb, stride_bt, stride_bh, scale,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr, SHARED: gl.constexpr, VALUES_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dq, dk [B, T, H, K] and dlog_decay, dbeta [B, T, H] float32 of all chunks.

    CHUNKS and BLOCKS, at least 2, are the places of the rings. Where a block has fewer than 64 values, dk leaves
    through a tile of its own.
    """
    C: gl.constexpr = 64
    dtype: gl.constexpr = k_desc.dtype
    q_tiles = tile_like(q_desc, CHUNKS)
    k_tiles = tile_like(k_desc, CHUNKS)
    inverse_tiles = tile_like(inverse_desc, CHUNKS)
    s_tiles = tile_like(s_desc, BLOCKS)
    g_tiles = tile_like(g_desc, BLOCKS)
    v_do_tiles = tile_like(v_desc, 2 * BLOCKS)
    dv_tiles = tile_like(dv_desc, BLOCKS)
    dq_tiles = reinterpret(v_do_tiles, dtype, [2 * BLOCKS * BLOCK_V // K, C, K], dq_desc.layout)
    dk_tiles = g_tiles
    if BLOCK_V < C:
        dk_tiles = tile_like(dk_desc, 1)
    u_tile = tile_like(v_desc, 1).index(0)
    p_tile = tile_like(inverse_desc, 1).index(0)
    m_tile = tile_like(inverse_desc, 1).index(0)
    w_tile = p_tile
    z_tile = m_tile
    if not SHARED:
        w_tile = tile_like(inverse_desc, 1).index(0)
        z_tile = tile_like(inverse_desc, 1).index(0)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    chunk_rows = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK_ROWS, C], line)
    shared_rows = gl.allocate_shared_memory(gl.float32, [SHARED_ROWS, C], line)
    full = gl.allocate_shared_memory(gl.int64, [CHUNKS + BLOCKS + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CHUNKS + BLOCKS, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CHUNKS):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(CHUNKS, CHUNKS + BLOCKS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(full.index(CHUNKS + BLOCKS), count=1)
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=2 if i == SUMS_FULL else 1)
    fence_async_shared()
    gl.warp_specialize([
        (_pairs, (
            dk_desc, dk, q_tiles, k_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, dk_tiles, u_tile, p_tile, m_tile,
            w_tile, z_tile, chunk_rows, shared_rows, full, empty, bars, lengths, batch, length, heads, chunks, scale,
            K, V, BLOCK_V, NORMALIZE, CHUNKS, BLOCKS, SHARED,
        )),
        (_values, (
            dq_desc, dq, dbeta, q_tiles, k_tiles, inverse_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, dq_tiles,
            u_tile, p_tile, m_tile, w_tile, chunk_rows, shared_rows, full, empty, bars, lengths, batch, length, heads,
            chunks, scale, K, V, BLOCK_V, NORMALIZE, CHUNKS, BLOCKS,
        )),
        (_loader, (
            q_desc, k_desc, inverse_desc, s_desc, g_desc, v_desc, do_desc, dv_desc,
            q_tiles, k_tiles, inverse_tiles, s_tiles, g_tiles, v_do_tiles, dv_tiles, chunk_rows, full, empty,
            gates, norms, beta, lengths, batch, length, heads, chunks, stride_qh, stride_kh, stride_vh, stride_bb,
            stride_bt, stride_bh, K, V, BLOCK_V, NORMALIZE, CHUNKS, BLOCKS,
        )),
        (_decays, (
            dlog_decay, shared_rows, bars, gates, lengths, batch, length, heads, chunks, BLOCK_V,
        )),
    ], [4, 1, 1], [VALUES_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
