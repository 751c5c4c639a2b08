# mypy: ignore-errors
"""The walk back over chunks for Hopper, warp-specialised; the formulas are those of ``triton_backward``.

A loader warp brings q, k, do and T. The ``pairs`` warps make what a chunk needs of q alone, P and the scaled rows of q,
ahead of the ``chain`` warps, which run the products that depend on each other from chunk to chunk.
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
    q_desc, k_desc, grad_o_desc, inverse_desc, q_s, k_s, do_s, inverse_s, full, empty, row_start, place, chunks, valid,
    q_column, k_column, o_column,
    K: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of each chunk, the last one first; of that one clear the rows from ``valid`` on.

    It arrives at a barrier of the loader's own, the last of ``full``.
    """
    C: gl.constexpr = 64
    for n in range(chunks):
        c = chunks - 1 - n
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        is_partial = (n == 0) & (valid < C)
        bar = full.index(gl.where(is_partial, STAGES, stage))
        mbarrier.expect(bar, (2 * C * K + C * BLOCK_V + C * C) * 2)
        tma_load(q_desc, [row_start + c * C, q_column], bar, q_s.index(stage))
        tma_load(k_desc, [row_start + c * C, k_column], bar, k_s.index(stage))
        tma_load(grad_o_desc, [row_start + c * C, o_column], bar, do_s.index(stage))
        tma_load(inverse_desc, [(place + c) * C, 0], bar, inverse_s.index(stage))
        if is_partial:
            mbarrier.wait(bar, 0)
            clear_rows(q_s.index(stage), valid)
            clear_rows(k_s.index(stage), valid)
            clear_rows(do_s.index(stage), valid)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _pairs(
    q_s, k_s, p_s, read_s, full, empty, made, used, gates, norms, chunks, scale,
    C: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """Write P and the rows of q times scale, norm and exp(g) of each chunk."""
    dtype: gl.constexpr = q_s.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, C, gl.SliceLayout(0, layout))
    rows = gl.arange(0, C, gl.SliceLayout(1, load_layout))
    for n in range(chunks):
        c = chunks - 1 - n
        stage = n % STAGES
        slot = n % SLOTS
        gates_i = gl.load(gates + c * C + i)
        gates_j = gl.load(gates + c * C + j)
        if NORMALIZE:
            gates_j -= gl.load(norms + c * C + j)
        from_start_C = gl.exp2(gl.load(gates + c * C + rows))
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        zeros_CC = gl.zeros([C, C], gl.float32, layout)
        p_CC = warpgroup_mma(q_s.index(stage), k_s.index(stage).permute((1, 0)), zeros_CC, is_async=True)
        decay_CC = gl.exp2(gl.where(i[:, None] >= j[None, :], gates_i[:, None] - gates_j[None, :], float("-inf")))
        q_CK = q_s.index(stage).load(load_layout).to(gl.float32)
        q_norm_C = gl.full([C], scale, gl.float32, gl.SliceLayout(1, load_layout))
        if NORMALIZE:
            q_norm_C = gl.rsqrt(gl.sum(q_CK * q_CK, 1) + 1e-6) * scale
        read_CK = (q_CK * (q_norm_C * from_start_C)[:, None]).to(dtype)
        p_CC = warpgroup_mma_wait(0, deps=(p_CC,))
        p_CC = p_CC * decay_CC * gl.convert_layout(q_norm_C, gl.SliceLayout(1, layout))[:, None]
        mbarrier.wait(used.index(slot), ((n // SLOTS) & 1) ^ 1)
        p_s.index(slot).store(p_CC.to(dtype))
        read_s.index(slot).store(read_CK)
        fence_async_shared()
        mbarrier.arrive(made.index(slot), count=1)
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _chain(
    dv_desc, grad_states_desc, dv, k_s, do_s, inverse_s, p_s, read_s, dv_s, grad_s, full, empty, made, used,
    gates, norms, grad_final, grad_initial, row_start, states_row, chunks, valid, rest, o_column, stride_ot,
    first_column, writes_initial,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    NORMALIZE: gl.constexpr, FINAL: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Carry the gradient of the state from chunk to chunk in registers."""
    C: gl.constexpr = 64
    dtype: gl.constexpr = k_s.dtype
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    j = gl.arange(0, C, gl.SliceLayout(0, layout))
    values = gl.arange(0, BLOCK_V, gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, BLOCK_V, gl.SliceLayout(1, state_layout))
    cells_VK = gl.arange(0, K, gl.SliceLayout(0, state_layout))[None, :] * V + columns[:, None]
    if OUTPUT:
        end = gl.maximum(chunks - 1, 0) * C + gl.where(chunks > 0, valid, 0) + rest
        for t in range(chunks * C, end, C):
            pointers = dv + (t + j).to(gl.int64)[None, :] * stride_ot + values[:, None]
            gl.store(pointers, gl.zeros([BLOCK_V, C], dtype, layout), mask=(t + j < end)[None, :])
    g_VK = gl.zeros([BLOCK_V, K], gl.float32, state_layout)
    if FINAL:
        g_VK = gl.load(grad_final + cells_VK)
    later = gl.maximum(chunks - 1, 0) * C
    gates_C = gl.load(gates + later + j)
    norms_C = gl.zeros([C], gl.float32, gl.SliceLayout(0, layout))
    if NORMALIZE:
        norms_C = gl.load(norms + later + j)
    last = gl.load(gates + later + C - 1)
    for n in range(chunks):
        c = chunks - 1 - n
        stage = n % STAGES
        slot = n % SLOTS
        from_start_C = gl.exp2(gates_C + norms_C)
        to_end_C = gl.exp2((last - gates_C) + norms_C)
        whole = gl.exp2(last)
        following = gl.maximum(c - 1, 0) * C
        gates_C = gl.load(gates + following + j)
        if NORMALIZE:
            norms_C = gl.load(norms + following + j)
        last = gl.load(gates + following + C - 1)
        g_lo_VK = g_VK.to(dtype)
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        k_CK = k_s.index(stage)
        do_VC = do_s.index(stage).permute((1, 0))
        zeros_VC = gl.zeros([BLOCK_V, C], gl.float32, layout)
        du_VC = warpgroup_mma(gl.convert_layout(g_lo_VK, left), k_CK.permute((1, 0)), zeros_VC, is_async=True)
        if OUTPUT:
            tma.store_wait(0)
            grad_s.index(0).store(g_lo_VK)
        g_VK = g_VK * whole
        du_VC = warpgroup_mma_wait(0, deps=(du_VC,)) * to_end_C[None, :]
        mbarrier.wait(made.index(slot), (n // SLOTS) & 1)
        du_VC = warpgroup_mma(do_VC, p_s.index(slot), du_VC, is_async=True)
        g_VK = warpgroup_mma(do_VC, read_s.index(slot), g_VK, is_async=True)
        du_VC = warpgroup_mma_wait(1, deps=(du_VC,))
        dv_VC = warpgroup_mma(gl.convert_layout(du_VC.to(dtype), left), inverse_s.index(stage), zeros_VC, is_async=True)
        dv_VC, g_VK = warpgroup_mma_wait(0, deps=(dv_VC, g_VK))
        mbarrier.arrive(used.index(slot), count=1)
        back_VC = (dv_VC * -from_start_C[None, :]).to(dtype)
        back_VC = gl.convert_layout(back_VC, gl.DotOperandLayout(0, state_layout, 2))
        g_VK = warpgroup_mma(back_VC, k_CK, g_VK, is_async=True)
        if OUTPUT:
            dv_s.index(0).permute((1, 0)).store(dv_VC.to(dtype))
            fence_async_shared()
            tma_store(grad_states_desc, [states_row + c * V, 0], grad_s.index(0))
            if (n == 0) & (valid < C):
                inside = j < gl.minimum(valid + rest, C)
                pointers = dv + (c * C + j).to(gl.int64)[None, :] * stride_ot + values[:, None]
                gl.store(pointers, gl.where((j < valid)[None, :], dv_VC, 0.0).to(dtype), mask=inside[None, :])
            else:
                tma_store(dv_desc, [row_start + c * C, o_column], dv_s.index(0))
        g_VK = warpgroup_mma_wait(0, deps=(g_VK,))
        mbarrier.arrive(empty.index(stage), count=1)
    if writes_initial:
        gl.store(grad_initial + cells_VK, g_VK)
    if OUTPUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "heads", "chunks", "segments", "segment_chunks"])
def specialized_walk_back_kernel(
    q_desc, k_desc, grad_o_desc, inverse_desc, gates, norms, grad_final, lengths, spans, dv, dv_desc, grad_initial,
    grad_states_desc, length, heads, chunks, segments, segment_chunks, stride_qh, stride_kh, scale,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NORMALIZE: gl.constexpr, FINAL: gl.constexpr,
    OUTPUT: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Walk back over one segment of chunks of one row and head for one block of 64 values, as ``walk_back_kernel``.

    Descriptors are those of ``specialized_walk_kernel``; without OUTPUT those of dv and the states stand for nothing.
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
    if not OUTPUT:
        walked = gl.minimum(walked, gl.load(spans + (pair.to(gl.int64) * segments + segment) * 3 + 1))
    valid = gl.minimum(end - (first + walked - 1) * C, C)
    rest = gl.maximum(gl.minimum(length, (first + segment_chunks) * C) - gl.maximum(end, first * C), 0)
    place = pair.to(gl.int64) * chunks + first
    gates += place * C
    norms += place * C
    segment_cells = (pair.to(gl.int64) * segments + segment) * K * V
    initial_cells = pair.to(gl.int64) * K * V if OUTPUT else segment_cells
    row_start = row * length + first * C
    o_column = head * V + first_column
    dv += (row.to(gl.int64) * length + first * C) * (heads * V) + o_column

    q_s = tile_like(q_desc, STAGES)
    k_s = tile_like(k_desc, STAGES)
    do_s = tile_like(grad_o_desc, STAGES)
    inverse_s = tile_like(inverse_desc, STAGES)
    p_s = tiles(dtype, SLOTS, C, C)
    read_s = tiles(dtype, SLOTS, C, K)
    dv_s = tile_like(grad_o_desc, 1) if OUTPUT else do_s
    grad_s = tiles(dtype, 1, BLOCK_V, K) if OUTPUT else q_s
    full = barriers(STAGES + 1, 1)
    empty = barriers(STAGES, 2)
    made = barriers(SLOTS, 1)
    used = barriers(SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_chain, (dv_desc, grad_states_desc, dv, k_s, do_s, inverse_s, p_s, read_s, dv_s, grad_s, full, empty, made,
                      used, gates, norms, grad_final + segment_cells, grad_initial + initial_cells, row_start,
                      (pair * chunks + first) * V + first_column, walked, valid, rest, o_column, heads * V,
                      first_column, (segment == 0) | (not OUTPUT),
                      K, V, BLOCK_V, STAGES, SLOTS, NORMALIZE, FINAL, OUTPUT)),
            (_pairs, (q_s, k_s, p_s, read_s, full, empty, made, used, gates, norms, walked, scale,
                      C, STAGES, SLOTS, NORMALIZE)),
            (_load, (q_desc, k_desc, grad_o_desc, inverse_desc, q_s, k_s, do_s, inverse_s, full, empty, row_start,
                     pair * chunks + first, walked, valid, head * stride_qh, head * stride_kh, o_column,
                     K, BLOCK_V, STAGES)),
        ],
        [4, 1],
        [168, 56],
    )  # fmt: skip
