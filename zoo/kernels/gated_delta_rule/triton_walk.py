# mypy: ignore-errors
"""The walk over the chunks of one row and head: writes, outputs and states, with the state in registers.

Everything is transposed, [V, C] and [V, K]: then the state and the writes, which the chain of products from chunk to
chunk runs through, are always the left operand, which tensor cores take from registers, and the right ones are tiles as
they were loaded:

    X^T = v^T - (S^T k^T) exp(g)            U^T = X^T (T diag(b))^T
    o^T = (S^T q^T) exp(g) + U^T P^T        P_ij = D_ij q_i.k_j
    S^T <- exp(g_C) S^T + (U^T exp(g_C - g)) k
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_delta_rule.triton_tiles import (
    chunk_decays,
    inverse_norm,
    load_tile,
    pair_decay_transposed,
    row_length,
    store_tile,
)


@triton.jit
def load_inverse(inverse, desc, place, C: tl.constexpr, TMA: tl.constexpr):
    """Load T diag(b) [C, C] of one chunk."""
    if TMA:
        tile_CC = desc.load([place.to(tl.int32) * C, 0])
    else:
        rows = tl.arange(0, C)
        tile_CC = tl.load(inverse + place * C * C + (rows[:, None] * C + rows[None, :]))
    return tile_CC


@triton.jit
def _chunk(
    s_VK, q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, o, o_desc, states,
    row_start, t, end, length, place, stride_qt, stride_kt, stride_vt, stride_ot, q_column, k_column, v_column,
    o_column, scale,
    K: tl.constexpr, BLOCK_V: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, OUTPUT: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over one chunk and return the state after it."""
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    C: tl.constexpr = 64
    dtype = k.dtype.element_ty
    positions = tl.arange(0, C)
    k_CK = load_tile(k, k_desc, row_start, t, end, stride_kt, k_column, C, K, TMA, MASKED)
    v_CV = load_tile(v, v_desc, row_start, t, end, stride_vt, v_column, C, BLOCK_V, TMA, MASKED)
    inverse_CC = load_inverse(inverse, inverse_desc, place, C, TMA)
    gates_C = tl.load(gates + place * C + positions)
    from_start_C, to_end_C, whole = chunk_decays(gates_C, C, EXACT)
    norm_C = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        norm_C = tl.load(norms + place * C + positions)
    s_lo_VK = s_VK.to(dtype)
    told_VC = tl.dot(s_lo_VK, tl.trans(k_CK), input_precision=PRECISION)
    x_VC = tl.trans(v_CV).to(tl.float32) - told_VC * (from_start_C * norm_C)[None, :]
    u_VC = tl.dot(x_VC.to(dtype), tl.trans(inverse_CC), input_precision=PRECISION)
    if OUTPUT:
        q_CK = load_tile(q, q_desc, row_start, t, end, stride_qt, q_column, C, K, TMA, MASKED)
        q_norm_C = tl.full([C], scale, tl.float32)
        if NORMALIZE:
            q_norm_C = inverse_norm(q_CK) * scale
        p_CC = tl.dot(k_CK, tl.trans(q_CK), input_precision=PRECISION)
        p_CC *= pair_decay_transposed(gates_C, C, EXACT) * norm_C[:, None]
        o_VC = tl.dot(s_lo_VK, tl.trans(q_CK), input_precision=PRECISION) * from_start_C[None, :]
        o_VC = tl.dot(u_VC.to(dtype), p_CC.to(dtype), o_VC, input_precision=PRECISION) * q_norm_C[None, :]
        o_CV = tl.trans(o_VC.to(dtype))
        store_tile(o, o_desc, row_start, t, length, stride_ot, o_column, o_CV, C, BLOCK_V, TMA, MASKED)
    else:
        cells_VK = (o_column % V + tl.arange(0, BLOCK_V))[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(states + place * K * V + cells_VK, s_lo_VK)
    u_VC *= (to_end_C * norm_C)[None, :]
    return tl.dot(u_VC.to(dtype), k_CK, s_VK * whole, input_precision=PRECISION)


@triton.jit(do_not_specialize=("length", "heads", "chunks"))
def walk_kernel(
    q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, initial, lengths, o, o_desc, final, states,
    length, heads, chunks, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
    stride_vh, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr, INITIAL: tl.constexpr,
    OUTPUT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk one row and head for one block of values.

    With OUTPUT write o [B, T, H, V] and the final state [B, H, K, V]; without, the state before each chunk, transposed,
    [B, H, N, V, K] in the dtype of k, which the backward reads.
    """
    C: tl.constexpr = 64
    value_blocks: tl.constexpr = V // BLOCK_V
    program = tl.program_id(0)
    first_column = program % value_blocks * BLOCK_V
    head = program // value_blocks % heads
    row = program // value_blocks // heads
    pair = row.to(tl.int64) * heads + head
    end = row_length(lengths, row, length)
    full_end = end // C * C
    row_start = row * length
    q += row.to(tl.int64) * stride_qb
    k += row.to(tl.int64) * stride_kb
    v += row.to(tl.int64) * stride_vb
    stride_ot = heads * V
    o += row.to(tl.int64) * length * stride_ot
    q_column = head * stride_qh
    k_column = head * stride_kh
    v_column = head * stride_vh + first_column
    o_column = head * V + first_column
    columns = first_column + tl.arange(0, BLOCK_V)
    cells_VK = pair * K * V + tl.arange(0, K)[None, :] * V + columns[:, None]
    s_VK = tl.zeros([BLOCK_V, K], tl.float32)
    if INITIAL:
        s_VK += tl.load(initial + cells_VK)
    for t in tl.range(0, full_end, C, num_stages=STAGES):
        s_VK = _chunk(
            s_VK, q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, o, o_desc, states,
            row_start, t, end, length, pair * chunks + t // C, stride_qt, stride_kt, stride_vt, stride_ot,
            q_column, k_column, v_column, o_column, scale,
            K, BLOCK_V, V, NORMALIZE, OUTPUT, TMA, False, PRECISION,
        )  # fmt: skip
    if full_end < end:
        s_VK = _chunk(
            s_VK, q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, o, o_desc, states,
            row_start, full_end, end, length, pair * chunks + full_end // C, stride_qt, stride_kt, stride_vt,
            stride_ot, q_column, k_column, v_column, o_column, scale,
            K, BLOCK_V, V, NORMALIZE, OUTPUT, TMA, True, PRECISION,
        )  # fmt: skip
    if OUTPUT:
        tl.store(final + cells_VK, s_VK)
        zeros_CV = tl.zeros([C, BLOCK_V], o.dtype.element_ty)
        for t in tl.range((end + C - 1) // C * C, length, C):
            store_tile(o, o, row_start, t, length, stride_ot, o_column, zeros_CV, C, BLOCK_V, False, True)
