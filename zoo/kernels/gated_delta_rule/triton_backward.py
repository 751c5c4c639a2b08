# mypy: ignore-errors
"""The backward kernels: a walk back over the chunks for the gradients of states and values, then all others at once.

With G the gradient of the state after a chunk and the names of the package docstring, P_ij = D_ij q_i.k_j, and
M_ij = D_ij k_i.k_j for i > j:

    dU = scale P^T do + exp(g_C - g) (k G)          the gradient of the writes
    dv = (T diag(b))^T dU
    G  <- exp(g_C) G + scale (exp(g) q)^T do - (exp(g) k)^T dv

is the walk; it writes dv and the G of every chunk. A second walk forward has written the states. Then, chunk by chunk,

    u  = T b (v - exp(g) k S)                       again
    e  = v - exp(g) k S - M u                       what the memory did not say: u = b e
    dx = dU - M^T dv                                T^T dU, the gradient of what T solves for: dv = b dx
    db = dx . e
    W  = scale D do u^T,  Z = D dv u^T              of which only i >= j and i > j count
    dq = W k + scale exp(g) do S^T
    dk = W^T q - (Z + Z^T) k - exp(g) dv S^T + exp(g_C - g) u G^T

and the gradient of g_i collects every product with its exponential; that of log a_t is its sum over i >= t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_delta_rule.triton_tiles import (
    chunk_decays,
    inverse_norm,
    load_norms,
    load_rows,
    load_tile,
    one,
    pair_factor,
    row_length,
    store_rows,
    store_tile,
)
from zoo.kernels.gated_delta_rule.triton_walk import load_inverse


@triton.jit
def _chunk_back(
    g_VK, q, q_desc, k, k_desc, grad_o, grad_o_desc, inverse, inverse_desc, gates, norms, dv, dv_desc, grad_states,
    row_start, t, end, length, place, stride_qt, stride_kt, stride_ot, q_column, k_column, o_column, scale,
    K: tl.constexpr, BLOCK_V: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, OUTPUT: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back over one chunk and return the gradient of the state before it."""
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    C: tl.constexpr = 64
    dtype = k.dtype.element_ty
    positions = tl.arange(0, C)
    k_CK = load_tile(k, k_desc, row_start, t, end, stride_kt, k_column, C, K, TMA, MASKED)
    q_CK = load_tile(q, q_desc, row_start, t, end, stride_qt, q_column, C, K, TMA, MASKED)
    do_CV = load_tile(grad_o, grad_o_desc, row_start, t, end, stride_ot, o_column, C, BLOCK_V, TMA, MASKED)
    inverse_CC = load_inverse(inverse, inverse_desc, place, C, TMA)
    gates_C = tl.load(gates + place * C + positions)
    from_start_C, to_end_C, whole = chunk_decays(gates_C, C, EXACT)
    norm_C, stored_norm_C = load_norms(norms + place * C, C, NORMALIZE, EXACT)
    q_norm_C = tl.full([C], scale, tl.float32)
    if NORMALIZE:
        q_norm_C = inverse_norm(q_CK) * scale
    g_lo_VK = g_VK.to(dtype)
    if OUTPUT:
        cells_VK = (o_column % V + tl.arange(0, BLOCK_V))[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(grad_states + place * K * V + cells_VK, g_lo_VK)
    p_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
    p_CC *= pair_factor(gates_C, one(C, EXACT), stored_norm_C, False, C, EXACT) * q_norm_C[:, None]
    do_VC = tl.trans(do_CV)
    du_VC = tl.dot(g_lo_VK, tl.trans(k_CK), input_precision=PRECISION) * (to_end_C * norm_C)[None, :]
    du_VC = tl.dot(do_VC, p_CC.to(dtype), du_VC, input_precision=PRECISION)
    dv_VC = tl.dot(du_VC.to(dtype), inverse_CC, input_precision=PRECISION)
    if OUTPUT:
        dv_CV = tl.trans(dv_VC.to(dtype))
        store_tile(dv, dv_desc, row_start, t, length, stride_ot, o_column, dv_CV, C, BLOCK_V, TMA, MASKED)
    read_VC = (do_VC.to(tl.float32) * (from_start_C * q_norm_C)[None, :]).to(dtype)
    g_VK = tl.dot(read_VC, q_CK, g_VK * whole, input_precision=PRECISION)
    return tl.dot((dv_VC * -(from_start_C * norm_C)[None, :]).to(dtype), k_CK, g_VK, input_precision=PRECISION)


@triton.jit(do_not_specialize=("length", "heads", "chunks", "segments", "segment_chunks"))
def walk_back_kernel(
    q, q_desc, k, k_desc, grad_o, grad_o_desc, inverse, inverse_desc, gates, norms, grad_final, lengths, spans, dv,
    dv_desc, grad_initial, grad_states,
    length, heads, chunks, segments, segment_chunks, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr, FINAL: tl.constexpr,
    OUTPUT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk back over one segment of chunks of one row and head for one block of values.

    ``grad_final`` is [B, H, segments, K, V] where FINAL, the gradient of the state after each segment. With OUTPUT
    write dv [B, T, H, V], the gradient of the initial state [B, H, K, V], from the first segment, and of the state
    after each chunk, transposed, [B, H, N, V, K] in the dtype of k; without, only the gradient of the state before each
    segment, to ``grad_initial`` [B, H, segments, K, V], leaving out the chunks that ``spans`` says do not see it.
    """
    C: tl.constexpr = 64
    value_blocks: tl.constexpr = V // BLOCK_V
    program = tl.program_id(0)
    first_column = program % value_blocks * BLOCK_V
    segment = program // value_blocks % segments
    rest = program // value_blocks // segments
    head = rest % heads
    row = rest // heads
    pair = row.to(tl.int64) * heads + head
    start = segment * segment_chunks
    stop = start * C + segment_chunks * C
    end = tl.maximum(tl.minimum(row_length(lengths, row, length), stop), start * C)
    if not OUTPUT:
        end = tl.minimum(end, (start + tl.load(spans + (pair * segments + segment) * 3 + 1)) * C)
    full = end // C
    row_start = row * length
    stride_ot = heads * V
    q += row.to(tl.int64) * stride_qb
    k += row.to(tl.int64) * stride_kb
    grad_o += row.to(tl.int64) * length * stride_ot
    dv += row.to(tl.int64) * length * stride_ot
    q_column = head * stride_qh
    k_column = head * stride_kh
    o_column = head * V + first_column
    columns = first_column + tl.arange(0, BLOCK_V)
    cells_VK = tl.arange(0, K)[None, :] * V + columns[:, None]
    g_VK = tl.zeros([BLOCK_V, K], tl.float32)
    if FINAL:
        g_VK += tl.load(grad_final + (pair * segments + segment) * K * V + cells_VK)
    if OUTPUT:
        stop = tl.minimum(stop, length)
        zeros_CV = tl.zeros([C, BLOCK_V], dv.dtype.element_ty)
        for t in tl.range((end + C - 1) // C * C, stop, C):
            store_tile(dv, dv, row_start, t, stop, stride_ot, o_column, zeros_CV, C, BLOCK_V, False, True)
    if full * C < end:
        g_VK = _chunk_back(
            g_VK, q, q_desc, k, k_desc, grad_o, grad_o_desc, inverse, inverse_desc, gates, norms, dv, dv_desc,
            grad_states, row_start, full * C, end, length, pair * chunks + full, stride_qt, stride_kt, stride_ot,
            q_column, k_column, o_column, scale, K, BLOCK_V, V, NORMALIZE, OUTPUT, TMA, True, PRECISION,
        )  # fmt: skip
    for step in tl.range(0, full - start, num_stages=STAGES):
        chunk = full - 1 - step
        g_VK = _chunk_back(
            g_VK, q, q_desc, k, k_desc, grad_o, grad_o_desc, inverse, inverse_desc, gates, norms, dv, dv_desc,
            grad_states, row_start, chunk * C, end, length, pair * chunks + chunk, stride_qt, stride_kt, stride_ot,
            q_column, k_column, o_column, scale, K, BLOCK_V, V, NORMALIZE, OUTPUT, TMA, False, PRECISION,
        )  # fmt: skip
    if not OUTPUT:
        tl.store(grad_initial + (pair * segments + segment) * K * V + cells_VK, g_VK)
    elif segment == 0:
        tl.store(grad_initial + pair * K * V + cells_VK, g_VK)


@triton.jit(do_not_specialize=("length", "heads", "chunks", "stride_bb", "stride_bt"))
def gradients_kernel(
    q, k, v, beta, grad_o, dv, inverse, gates, norms, states, grad_states, lengths, dq, dk, dlog_decay, dbeta,
    length, heads, chunks, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
    stride_vh, stride_bb, stride_bt, stride_bh, scale,
    K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk [B, T, H, K] and dlog_decay, dbeta [B, T, H] float32 of one chunk of one row and head."""
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    C: tl.constexpr = 64
    dtype = k.dtype.element_ty
    # Factors of short keys and queries leave the range of float16, whose last products are therefore tf32.
    DOT: tl.constexpr = tl.float32 if k.dtype.element_ty == tl.float16 else k.dtype.element_ty
    program = tl.program_id(0)
    head = program % heads
    rest = program // heads
    chunk = rest % chunks
    row = rest // chunks
    end = row_length(lengths, row, length)
    t = chunk * C
    positions = tl.arange(0, C)
    stride_dt = heads * K
    dq += row.to(tl.int64) * length * stride_dt + head * K
    dk += row.to(tl.int64) * length * stride_dt + head * K
    vector = (row.to(tl.int64) * length + t + positions) * heads + head
    inside_C = t + positions < length
    if t >= end:
        zeros_CK = tl.zeros([C, K_PADDED], dtype)
        store_rows(dq, zeros_CK, t, length, stride_dt, C, K, K_PADDED)
        store_rows(dk, zeros_CK, t, length, stride_dt, C, K, K_PADDED)
        tl.store(dlog_decay + vector, tl.zeros([C], tl.float32), mask=inside_C)
        tl.store(dbeta + vector, tl.zeros([C], tl.float32), mask=inside_C)
        return
    place = (row.to(tl.int64) * heads + head) * chunks + chunk
    q += row.to(tl.int64) * stride_qb + head * stride_qh
    k += row.to(tl.int64) * stride_kb + head * stride_kh
    v += row.to(tl.int64) * stride_vb + head * stride_vh
    stride_ot = heads * V
    grad_o += row.to(tl.int64) * length * stride_ot + head * V
    dv += row.to(tl.int64) * length * stride_ot + head * V
    q_CK = load_rows(q, t, end, stride_qt, C, K, K_PADDED)
    k_CK = load_rows(k, t, end, stride_kt, C, K, K_PADDED)
    gates_C = tl.load(gates + place * C + positions)
    from_start_C, to_end_C, whole = chunk_decays(gates_C, C, EXACT)
    norm_C, stored_norm_C = load_norms(norms + place * C, C, NORMALIZE, EXACT)
    q_norm_C = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        q_norm_C = inverse_norm(q_CK)
    inverse_square_C = q_norm_C * q_norm_C
    q_norm_C *= scale
    p_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
    p_CC *= pair_factor(gates_C, one(C, EXACT), stored_norm_C, False, C, EXACT)
    p_CC = (p_CC * q_norm_C[:, None]).to(dtype)
    m_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION)
    m_CC = (m_CC * pair_factor(gates_C, stored_norm_C, stored_norm_C, True, C, EXACT)).to(dtype)

    # First what stays within a block of values, and the sums of dP and dM. Tiles that serve a product and, much later,
    # something else are loaded twice: in between they would occupy registers.
    dp_CC = tl.zeros([C, C], tl.float32)
    dm_CC = tl.zeros([C, C], tl.float32)
    dg_C = tl.zeros([C], tl.float32)
    db_C = tl.zeros([C], tl.float32)
    db_divided_C = tl.zeros([C], tl.float32)
    after_C = tl.zeros([C], tl.float32)
    dlast = 0.0
    states += place * K * V
    grad_states += place * K * V
    inverse_CC = load_inverse(inverse, inverse, place, C, False)
    for first in tl.static_range(0, V, BLOCK_V):
        s_VK = load_rows(states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED)
        g_VK = load_rows(grad_states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED)
        dlast += tl.sum(tl.sum(s_VK.to(tl.float32) * g_VK.to(tl.float32), 1), 0)
        s_VK = load_rows(states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
        told_CV = tl.dot(k_CK, tl.trans(s_VK), input_precision=PRECISION) * (from_start_C * norm_C)[:, None]
        dv_CV = load_rows(dv + first, t, end, stride_ot, C, V - first, BLOCK_V)
        dg_C -= tl.sum(dv_CV.to(tl.float32) * told_CV, 1)
        x_CV = load_rows(v + first, t, end, stride_vt, C, V - first, BLOCK_V).to(tl.float32) - told_CV
        u_CV = tl.dot(inverse_CC, x_CV.to(dtype), input_precision=PRECISION).to(dtype)
        x_CV -= tl.dot(m_CC, u_CV, input_precision=PRECISION)
        g_VK = load_rows(grad_states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
        dx_CV = tl.dot(k_CK, tl.trans(g_VK), input_precision=PRECISION) * (to_end_C * norm_C)[:, None]
        after_C += tl.sum(dx_CV * u_CV.to(tl.float32), 1)
        do_CV = load_rows(grad_o + first, t, end, stride_ot, C, V - first, BLOCK_V)
        dx_CV = tl.dot(tl.trans(p_CC), do_CV, dx_CV, input_precision=PRECISION)
        dx_CV -= tl.dot(tl.trans(m_CC), dv_CV, input_precision=PRECISION)
        db_C += tl.sum(dx_CV * x_CV, 1)
        db_divided_C += tl.sum(dv_CV.to(tl.float32) * u_CV.to(tl.float32), 1)
        dp_CC = tl.dot(do_CV, tl.trans(u_CV), dp_CC, input_precision=PRECISION)
        dm_CC = tl.dot(dv_CV, tl.trans(u_CV), dm_CC, input_precision=PRECISION)

    # The gradients of q_i.k_j and, of opposite sign, of k_i.k_j. Of the gates that a pair of positions sees, the first
    # counts down; on the diagonal both are one and cancel. (Read again, so that nothing is kept in registers so long.)
    gates_C = tl.load(gates + place * C + positions, volatile=True)
    w_CC = dp_CC * pair_factor(gates_C, one(C, EXACT), stored_norm_C, False, C, EXACT) * q_norm_C[:, None]
    later = positions[:, None] > positions[None, :]
    pairs_CC = tl.where(later, tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION), 0.0) * w_CC
    w_CC = w_CC.to(DOT)
    z_CC = dm_CC * pair_factor(gates_C, stored_norm_C, stored_norm_C, True, C, EXACT)
    pairs_CC -= tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION) * z_CC
    z_CC = z_CC.to(DOT)
    if EXACT:
        # Summed over i >= t > j, so that nothing cancels.
        later_CC = tl.where(later, tl.cumsum(pairs_CC, 0, reverse=True), 0.0)
        pairs_C = tl.sum(later_CC, 1)
    else:
        dg_C += tl.sum(pairs_CC, 1) - tl.sum(pairs_CC, 0)
        pairs_C = tl.zeros([C], tl.float32)

    # Then the sums over all values, one after the other. With x' = x / |x| the gradient of x, times 1 / |x|, loses its
    # part along x'; the factors of the norms are in w, z and the rows' factors already.
    dq_CK = tl.zeros([C, K_PADDED], tl.float32)
    for first in tl.static_range(0, V, BLOCK_V):
        if V > BLOCK_V:
            do_CV = load_rows(grad_o + first, t, end, stride_ot, C, V - first, BLOCK_V)
            s_VK = load_rows(states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
        dq_CK = tl.dot(do_CV, s_VK, dq_CK, input_precision=PRECISION)
    dq_CK *= (from_start_C * q_norm_C)[:, None]
    q_float_CK = load_rows(q, t, end, stride_qt, C, K, K_PADDED, True).to(tl.float32)
    dg_C += tl.sum(q_float_CK * dq_CK, 1)
    dq_CK = tl.dot(w_CC, k_CK.to(DOT), dq_CK, input_precision=PRECISION)
    if NORMALIZE:
        along_C = tl.sum(q_float_CK * dq_CK, 1) * inverse_square_C
        dq_CK -= q_float_CK * along_C[:, None]
    store_rows(dq, dq_CK, t, length, stride_dt, C, K, K_PADDED)
    dk_CK = tl.zeros([C, K_PADDED], tl.float32)
    for first in tl.static_range(0, V, BLOCK_V):
        if V > BLOCK_V:
            dv_CV = load_rows(dv + first, t, end, stride_ot, C, V - first, BLOCK_V)
            s_VK = load_rows(states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
        dk_CK = tl.dot(dv_CV, s_VK, dk_CK, input_precision=PRECISION)
    dk_CK *= -(from_start_C * norm_C)[:, None]
    for first in tl.static_range(0, V, BLOCK_V):
        if V > BLOCK_V:
            s_VK = load_rows(states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
            told_CV = tl.dot(k_CK, tl.trans(s_VK), input_precision=PRECISION) * (from_start_C * norm_C)[:, None]
            x_CV = load_rows(v + first, t, end, stride_vt, C, V - first, BLOCK_V, True).to(tl.float32) - told_CV
            u_CV = tl.dot(inverse_CC, x_CV.to(dtype), input_precision=PRECISION).to(dtype)
            g_VK = load_rows(grad_states + first * K, 0, V - first, K, BLOCK_V, K, K_PADDED, True)
        kept_CV = (u_CV.to(tl.float32) * (to_end_C * norm_C)[:, None]).to(DOT)
        dk_CK = tl.dot(kept_CV, g_VK.to(DOT), dk_CK, input_precision=PRECISION)
    dk_CK = tl.dot(tl.trans(w_CC), q_CK.to(DOT), dk_CK, input_precision=PRECISION)
    zz_CC = z_CC + tl.trans(z_CC)
    dk_CK -= tl.dot(zz_CC, k_CK.to(DOT), input_precision=PRECISION)
    if NORMALIZE:
        k_float_CK = load_rows(k, t, end, stride_kt, C, K, K_PADDED, True).to(tl.float32)
        along_C = tl.sum(k_float_CK * dk_CK, 1) * norm_C * norm_C
        dk_CK -= k_float_CK * along_C[:, None]
    store_rows(dk, dk_CK, t, length, stride_dt, C, K, K_PADDED)
    dg_C += tl.where(positions == C - 1, whole * dlast, 0.0)
    valid_C = t + positions < end
    # What the write at j leaves in the state after the chunk sees the decays after j: a sum over earlier writes.
    earlier_C = tl.sum(tl.where(later, after_C[None, :], 0.0), 1)
    dlog_a_C = tl.cumsum(dg_C, 0, reverse=True) + earlier_C + pairs_C
    dlog_a_C = tl.where(valid_C, dlog_a_C, 0.0)
    tl.store(dlog_decay + vector, dlog_a_C, mask=inside_C)
    # dv = b dx and u = b e: their product over b^2 loses less than sums that nearly cancel, where b is not near zero.
    beta += row.to(tl.int64) * stride_bb + head * stride_bh + (t + positions).to(tl.int64) * stride_bt
    beta_C = tl.load(beta, mask=valid_C, other=0.0).to(tl.float32)
    divides_C = tl.abs(beta_C) > 0.015625
    db_C = tl.where(divides_C, db_divided_C / tl.where(divides_C, beta_C * beta_C, 1.0), db_C)
    tl.store(dbeta + vector, tl.where(valid_C, db_C, 0.0), mask=inside_C)
