# mypy: ignore-errors
"""The walk over chunks for Hopper, warp-specialised; the formulas and modes are those of ``triton_walk``.

A loader warp brings k, v, T and q through tensor memory access. The ``chain`` warps run the products that depend on
each other from chunk to chunk and hand the state and the writes of each chunk over through slots in shared memory; the
``output`` warps compute what only o needs beside them. So the chain, whose latency bounds the walk, does nothing else.
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
    barriers,
    clear_rows,
    tile_like,
    tiles,
    tma_load,
    tma_store,
    valid_length,
)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, inverse_desc, q_s, k_s, v_s, inverse_s, full, empty, row_start, place, chunks, valid,
    q_column, k_column, v_column,
    K: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of each chunk; of the last one clear the rows from ``valid`` on before anyone sees it.

    That one arrives at a barrier of the loader's own, the last of ``full``.
    """
    C: gl.constexpr = 64
    OUTPUT: gl.constexpr = MODE == "output"
    VALUES: gl.constexpr = MODE != "transition"
    for c in range(chunks):
        stage = c % STAGES
        mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
        is_partial = (c == chunks - 1) & (valid < C)
        bar = full.index(gl.where(is_partial, STAGES, stage))
        mbarrier.expect(bar, (C * C + C * K + (C * K if OUTPUT else 0) + (C * BLOCK_V if VALUES else 0)) * 2)
        tma_load(k_desc, [row_start + c * C, k_column], bar, k_s.index(stage))
        if VALUES:
            tma_load(v_desc, [row_start + c * C, v_column], bar, v_s.index(stage))
        tma_load(inverse_desc, [(place + c) * C, 0], bar, inverse_s.index(stage))
        if OUTPUT:
            tma_load(q_desc, [row_start + c * C, q_column], bar, q_s.index(stage))
        if is_partial:
            mbarrier.wait(bar, 0)
            clear_rows(k_s.index(stage), valid)
            if VALUES:
                clear_rows(v_s.index(stage), valid)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _output(
    o_desc, o, q_s, k_s, state_s, write_s, o_s, full, empty, handed, taken, gates, norms, row_start, chunks, valid,
    rest, o_column, stride_ot, scale, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    K: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """Write o of each chunk from its state and its writes, then zeros at the ``rest`` positions after the chunks.

    Of several groups of warps each takes a chunk in turn.
    """
    C: gl.constexpr = 64
    dtype: gl.constexpr = q_s.dtype
    pair_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, C, gl.SliceLayout(1, pair_layout))
    j = gl.arange(0, C, gl.SliceLayout(0, pair_layout))
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    for c in range(GROUP, chunks, GROUPS):
        stage = c % STAGES
        slot = c % SLOTS
        gates_i = gl.load(gates + c * C + i)
        gates_j = gl.load(gates + c * C + j)
        if NORMALIZE:
            gates_j -= gl.load(norms + c * C + j)
        from_start_C = gl.exp2(gl.load(gates + c * C + rows))
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        q_CK = q_s.index(stage)
        zeros_CC = gl.zeros([C, C], gl.float32, pair_layout)
        p_CC = warpgroup_mma(q_CK, k_s.index(stage).permute((1, 0)), zeros_CC, is_async=True)
        decay_CC = gl.exp2(gl.where(i[:, None] >= j[None, :], gates_i[:, None] - gates_j[None, :], float("-inf")))
        q_norm_C = gl.full([C], scale, gl.float32, gl.SliceLayout(1, layout))
        if NORMALIZE:
            q = q_CK.load(load_layout).to(gl.float32)
            q_norm_C = gl.convert_layout(gl.rsqrt(gl.sum(q * q, 1) + 1e-6), gl.SliceLayout(1, layout)) * scale
        p_CC = warpgroup_mma_wait(0, deps=(p_CC,))
        p_lo_CC = gl.convert_layout((p_CC * decay_CC).to(dtype), gl.DotOperandLayout(0, layout, 2))
        mbarrier.wait(handed.index(slot), (c // SLOTS) & 1)
        o_CV = gl.zeros([C, BLOCK_V], gl.float32, layout)
        o_CV = warpgroup_mma(q_CK, state_s.index(slot).permute((1, 0)), o_CV, is_async=True)
        o_CV = warpgroup_mma_wait(0, deps=(o_CV,)) * from_start_C[:, None]
        o_CV = warpgroup_mma(p_lo_CC, write_s.index(slot).permute((1, 0)), o_CV, is_async=True)
        o_CV = warpgroup_mma_wait(0, deps=(o_CV,))
        mbarrier.arrive(taken.index(slot), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        o_CV = (o_CV * q_norm_C[:, None]).to(dtype)
        if (c == chunks - 1) & (valid < C):
            inside = rows < gl.minimum(valid + rest, C)
            o_CV = gl.where((rows < valid)[:, None], o_CV, 0.0)
            pointers = o + (c * C + rows).to(gl.int64)[:, None] * stride_ot + columns[None, :]
            gl.store(pointers, o_CV, mask=inside[:, None])
        else:
            tma.store_wait(0)
            o_s.index(GROUP).store(o_CV)
            fence_async_shared()
            tma_store(o_desc, [row_start + c * C, o_column], o_s.index(GROUP))
    zeros_CV = gl.zeros([C, BLOCK_V], dtype, layout)
    end = gl.maximum(chunks - 1, 0) * C + gl.where(chunks > 0, valid, 0) + rest
    for t in range((chunks + GROUP) * C, end, GROUPS * C):
        pointers = o + (t + rows).to(gl.int64)[:, None] * stride_ot + columns[None, :]
        gl.store(pointers, zeros_CV, mask=(t + rows < end)[:, None])
    tma.store_wait(0)


@gluon.jit
def _chain(
    states_desc, k_s, v_s, inverse_s, state_s, write_s, full, empty, handed, taken, gates, norms, initial, final,
    states_row, chunks, first_column, writes_final,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    NORMALIZE: gl.constexpr, INITIAL: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Carry the state from chunk to chunk in registers."""
    C: gl.constexpr = 64
    dtype: gl.constexpr = k_s.dtype
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    j = gl.arange(0, C, gl.SliceLayout(0, layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, state_layout))
    columns = first_column + gl.arange(0, BLOCK_V, gl.SliceLayout(1, state_layout))
    cells_VK = keys[None, :] * V + columns[:, None]
    s_VK = gl.zeros([BLOCK_V, K], gl.float32, state_layout)
    if INITIAL:
        s_VK = gl.load(initial + cells_VK)
    if MODE == "transition":
        s_VK = gl.where(keys[None, :] == columns[:, None], 1.0, s_VK)
    gates_C = gl.load(gates + j)
    norms_C = gl.zeros([C], gl.float32, gl.SliceLayout(0, layout))
    if NORMALIZE:
        norms_C = gl.load(norms + j)
    last = gl.load(gates + C - 1)
    for c in range(chunks):
        stage = c % STAGES
        slot = c % SLOTS
        from_start_C = gl.exp2(gates_C + norms_C)
        to_end_C = gl.exp2((last - gates_C) + norms_C)
        whole = gl.exp2(last)
        following = gl.minimum(c + 1, chunks - 1) * C
        gates_C = gl.load(gates + following + j)
        if NORMALIZE:
            norms_C = gl.load(norms + following + j)
        last = gl.load(gates + following + C - 1)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        k_CK = k_s.index(stage)
        zeros_VC = gl.zeros([BLOCK_V, C], gl.float32, layout)
        s_lo_VK = s_VK.to(dtype)
        told_VC = warpgroup_mma(gl.convert_layout(s_lo_VK, left), k_CK.permute((1, 0)), zeros_VC, is_async=True)
        if MODE != "transition":
            v_VC = v_s.index(stage).permute((1, 0)).load(layout).to(gl.float32)
        if MODE == "output":
            mbarrier.wait(taken.index(slot), ((c // SLOTS) & 1) ^ 1)
            state_s.index(slot).store(s_lo_VK)
        if MODE == "states":
            tma.store_wait(SLOTS - 1)
            state_s.index(slot).store(s_lo_VK)
            fence_async_shared()
            tma_store(states_desc, [states_row + c * V, 0], state_s.index(slot))
        told_VC = warpgroup_mma_wait(0, deps=(told_VC,))
        x_VC = told_VC * -from_start_C[None, :]
        if MODE != "transition":
            x_VC = v_VC - told_VC * from_start_C[None, :]
        x_VC = gl.convert_layout(x_VC.to(dtype), left)
        u_VC = warpgroup_mma(x_VC, inverse_s.index(stage).permute((1, 0)), zeros_VC, is_async=True)
        s_VK = s_VK * whole
        u_VC = warpgroup_mma_wait(0, deps=(u_VC,))
        kept_VC = gl.convert_layout((u_VC * to_end_C[None, :]).to(dtype), gl.DotOperandLayout(0, state_layout, 2))
        s_VK = warpgroup_mma(kept_VC, k_CK, s_VK, is_async=True)
        if MODE == "output":
            write_s.index(slot).store(u_VC.to(dtype))
            fence_async_shared()
            mbarrier.arrive(handed.index(slot), count=1)
        s_VK = warpgroup_mma_wait(0, deps=(s_VK,))
        mbarrier.arrive(empty.index(stage), count=1)
    if writes_final:
        gl.store(final + cells_VK, s_VK)
    if MODE == "states":
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "heads", "chunks", "segments", "segment_chunks"])
def specialized_walk_kernel(
    q_desc, k_desc, v_desc, inverse_desc, gates, norms, initial, lengths, spans, o, o_desc, final, states_desc,
    length, heads, chunks, segments, segment_chunks, stride_qh, stride_kh, stride_vh, scale,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, INITIAL: gl.constexpr,
    MODE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Walk one segment of chunks of one row and head for one block of 64 values; modes as of ``walk_kernel``.

    Descriptors read [B * T, H * W] in tiles of 64 rows, that of the inverses [B * H * N * 64, 64]; ``states_desc``
    writes [B * H * N * V, K] in tiles of 64 values. Stands for what a mode does not have: any descriptor or pointer.
    """
    C: gl.constexpr = 64
    dtype: gl.constexpr = k_desc.dtype
    BLOCKS: gl.constexpr = V // BLOCK_V
    program = gl.program_id(0)
    first_column = program % BLOCKS * BLOCK_V
    segment = program // BLOCKS % segments
    head = program // BLOCKS // segments % heads
    row = program // BLOCKS // segments // heads
    pair = row * heads + head
    end = valid_length(lengths, row, length)
    first = segment * segment_chunks
    walked = gl.maximum(gl.minimum((end + C - 1) // C, first + segment_chunks) - first, 0)
    span = spans + (pair.to(gl.int64) * segments + segment) * 3
    if MODE == "sum":
        skipped = gl.load(span)
        first += skipped
        walked -= skipped
    if MODE == "transition":
        walked *= gl.load(span + 2)
    valid = gl.minimum(end - (first + walked - 1) * C, C)
    rest = gl.maximum(gl.minimum(length, (first + segment_chunks) * C) - gl.maximum(end, first * C), 0)
    place = pair.to(gl.int64) * chunks + first
    gates += place * C
    norms += place * C
    cells = pair.to(gl.int64) * K * V
    segment_cells = (pair.to(gl.int64) * segments + segment) * K * V
    row_start = row * length + first * C

    k_s = tile_like(k_desc, STAGES)
    inverse_s = tile_like(inverse_desc, STAGES)
    full = barriers(STAGES + 1, 1)
    empty = barriers(STAGES, 2 if MODE == "output" else 1)
    v_s = tile_like(v_desc, STAGES) if MODE != "transition" else k_s
    if MODE == "output":
        q_s = tile_like(q_desc, STAGES)
        state_s = tiles(dtype, SLOTS, BLOCK_V, K)
        write_s = tiles(dtype, SLOTS, BLOCK_V, C)
        o_s = tile_like(o_desc, GROUPS)
        handed = barriers(SLOTS, 1)
        taken = barriers(SLOTS, 1)
        fence_async_shared()
        o += (row.to(gl.int64) * length + first * C) * (heads * V) + head * V + first_column
        if GROUPS == 1:
            gl.warp_specialize(
                [
                    (_chain, (k_desc, k_s, v_s, inverse_s, state_s, write_s, full, empty, handed, taken, gates, norms,
                          initial + segment_cells, final + cells, 0, walked, first_column, segment == segments - 1,
                          K, V, BLOCK_V, STAGES, SLOTS, NORMALIZE, INITIAL, MODE)),
                    (_output, (o_desc, o, q_s, k_s, state_s, write_s, o_s, full, empty, handed, taken, gates, norms,
                           row_start, walked, valid, rest, head * V + first_column, heads * V, scale, 0, 1,
                           K, BLOCK_V, STAGES, SLOTS, NORMALIZE)),
                    (_load, (q_desc, k_desc, v_desc, inverse_desc, q_s, k_s, v_s, inverse_s, full, empty, row_start,
                         pair * chunks + first, walked, valid, head * stride_qh, head * stride_kh,
                         head * stride_vh + first_column, K, BLOCK_V, STAGES, MODE)),
                ],
                [4, 1],
                [200, 56],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_chain, (k_desc, k_s, v_s, inverse_s, state_s, write_s, full, empty, handed, taken, gates, norms,
                          initial + segment_cells, final + cells, 0, walked, first_column, segment == segments - 1,
                          K, V, BLOCK_V, STAGES, SLOTS, NORMALIZE, INITIAL, MODE)),
                    (_output, (o_desc, o, q_s, k_s, state_s, write_s, o_s, full, empty, handed, taken, gates, norms,
                           row_start, walked, valid, rest, head * V + first_column, heads * V, scale, 0, 2,
                           K, BLOCK_V, STAGES, SLOTS, NORMALIZE)),
                    (_output, (o_desc, o, q_s, k_s, state_s, write_s, o_s, full, empty, handed, taken, gates, norms,
                           row_start, walked, valid, rest, head * V + first_column, heads * V, scale, 1, 2,
                           K, BLOCK_V, STAGES, SLOTS, NORMALIZE)),
                    (_load, (q_desc, k_desc, v_desc, inverse_desc, q_s, k_s, v_s, inverse_s, full, empty, row_start,
                         pair * chunks + first, walked, valid, head * stride_qh, head * stride_kh,
                         head * stride_vh + first_column, K, BLOCK_V, STAGES, MODE)),
                ],
                [4, 4, 1],
                [144, 144, 24],
            )  # fmt: skip
    else:
        state_s = tiles(dtype, SLOTS, BLOCK_V, K) if MODE == "states" else k_s
        fence_async_shared()
        gl.warp_specialize(
            [
                (_chain, (states_desc, k_s, v_s, inverse_s, state_s, k_s, full, empty, full, empty, gates, norms,
                          initial + segment_cells, final + segment_cells,
                          (pair * chunks + first) * V + first_column, walked, first_column, MODE != "states",
                          K, V, BLOCK_V, STAGES, SLOTS, NORMALIZE, INITIAL, MODE)),
                (_load, (k_desc, k_desc, v_desc, inverse_desc, k_s, k_s, v_s, inverse_s, full, empty, row_start,
                         pair * chunks + first, walked, valid, 0, head * stride_kh, head * stride_vh + first_column,
                         K, BLOCK_V, STAGES, MODE)),
            ],
            [1],
            [56],
        )  # fmt: skip
