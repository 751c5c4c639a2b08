# mypy: ignore-errors
"""The walk over the chunks of one row and head: writes, outputs and states, with the state in registers.

Where rows and heads are few, a row is cut into segments that are walked side by side. What a segment does to a state is
linear, S <- M S + N, so a first walk finds M and N of every segment, a scan the state before each, a second walk the
rest.

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
    load_norms,
    load_tile,
    one,
    pair_factor_transposed,
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
    K: tl.constexpr, BLOCK_V: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, MODE: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over one chunk and return the state after it; MODE as in ``walk_kernel``."""
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    C: tl.constexpr = 64
    dtype = k.dtype.element_ty
    positions = tl.arange(0, C)
    k_CK = load_tile(k, k_desc, row_start, t, end, stride_kt, k_column, C, K, TMA, MASKED)
    inverse_CC = load_inverse(inverse, inverse_desc, place, C, TMA)
    gates_C = tl.load(gates + place * C + positions)
    from_start_C, to_end_C, whole = chunk_decays(gates_C, C, EXACT)
    norm_C, stored_norm_C = load_norms(norms + place * C, C, NORMALIZE, EXACT)
    s_lo_VK = s_VK.to(dtype)
    told_VC = tl.dot(s_lo_VK, tl.trans(k_CK), input_precision=PRECISION)
    x_VC = -told_VC * (from_start_C * norm_C)[None, :]
    if MODE != "transition":
        v_CV = load_tile(v, v_desc, row_start, t, end, stride_vt, v_column, C, BLOCK_V, TMA, MASKED)
        x_VC += tl.trans(v_CV).to(tl.float32)
    u_VC = tl.dot(x_VC.to(dtype), tl.trans(inverse_CC), input_precision=PRECISION)
    if MODE == "output":
        q_CK = load_tile(q, q_desc, row_start, t, end, stride_qt, q_column, C, K, TMA, MASKED)
        q_norm_C = tl.full([C], scale, tl.float32)
        if NORMALIZE:
            q_norm_C = inverse_norm(q_CK) * scale
        p_CC = tl.dot(k_CK, tl.trans(q_CK), input_precision=PRECISION)
        p_CC *= pair_factor_transposed(gates_C, one(C, EXACT), stored_norm_C, C, EXACT) * q_norm_C[None, :]
        o_VC = tl.dot(s_lo_VK, tl.trans(q_CK), input_precision=PRECISION) * (from_start_C * q_norm_C)[None, :]
        o_VC = tl.dot(u_VC.to(dtype), p_CC.to(dtype), o_VC, input_precision=PRECISION)
        o_CV = tl.trans(o_VC.to(dtype))
        store_tile(o, o_desc, row_start, t, length, stride_ot, o_column, o_CV, C, BLOCK_V, TMA, MASKED)
    if MODE == "states":
        cells_VK = (o_column % V + tl.arange(0, BLOCK_V))[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(states + place * K * V + cells_VK, s_lo_VK)
    u_VC *= (to_end_C * norm_C)[None, :]
    return tl.dot(u_VC.to(dtype), k_CK, s_VK * whole, input_precision=PRECISION)


@triton.jit(do_not_specialize=("length", "heads", "chunks", "segments", "segment_chunks"))
def walk_kernel(
    q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, initial, lengths, spans, o, o_desc, final,
    states, length, heads, chunks, segments, segment_chunks, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt,
    stride_kh, stride_vb, stride_vt, stride_vh, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr, INITIAL: tl.constexpr,
    MODE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk one segment of chunks of one row and head for one block of values.

    ``initial`` is [B, H, segments, K, V] where INITIAL, the state before each segment. MODE is one of

        "output"        write o [B, T, H, V] and, from the last segment, the final state [B, H, K, V]
        "states"        write the state before each chunk, transposed, [B, H, N, V, K] in the dtype of k
        "sum"           write the state after each segment, [B, H, segments, K, V] float32, to ``final``
        "transition"    the same from the identity, with no values: what a segment makes of the state before it

    The last two leave out what ``spans`` says does not last: chunks, and transitions as a whole.
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
    end = row_length(lengths, row, length)
    start = segment * segment_chunks * C
    end = tl.minimum(end, start + segment_chunks * C)
    full_end = start + tl.maximum(end - start, 0) // C * C
    span = spans + (pair * segments + segment) * 3
    if MODE == "transition":  # noqa: SIM102 (a load that other modes do not have)
        if tl.load(span + 2) == 0:
            return
    first_t = start
    if MODE == "sum":
        first_t += tl.load(span) * C
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
    keys = tl.arange(0, K)
    cells_VK = keys[None, :] * V + columns[:, None]
    s_VK = tl.zeros([BLOCK_V, K], tl.float32)
    if INITIAL:
        s_VK += tl.load(initial + (pair * segments + segment) * K * V + cells_VK)
    if MODE == "transition":
        s_VK = tl.where(keys[None, :] == columns[:, None], 1.0, s_VK)
    for t in tl.range(first_t, full_end, C, num_stages=STAGES):
        s_VK = _chunk(
            s_VK, q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, o, o_desc, states,
            row_start, t, end, length, pair * chunks + t // C, stride_qt, stride_kt, stride_vt, stride_ot,
            q_column, k_column, v_column, o_column, scale,
            K, BLOCK_V, V, NORMALIZE, MODE, TMA, False, PRECISION,
        )  # fmt: skip
    if full_end < end:
        s_VK = _chunk(
            s_VK, q, q_desc, k, k_desc, v, v_desc, inverse, inverse_desc, gates, norms, o, o_desc, states,
            row_start, full_end, end, length, pair * chunks + full_end // C, stride_qt, stride_kt, stride_vt,
            stride_ot, q_column, k_column, v_column, o_column, scale,
            K, BLOCK_V, V, NORMALIZE, MODE, TMA, True, PRECISION,
        )  # fmt: skip
    if MODE == "output":
        if segment == segments - 1:
            tl.store(final + pair * K * V + cells_VK, s_VK)
        stop = tl.minimum(length, start + segment_chunks * C)
        zeros_CV = tl.zeros([C, BLOCK_V], o.dtype.element_ty)
        for t in tl.range(tl.maximum(start, (end + C - 1) // C * C), stop, C):
            store_tile(o, o, row_start, t, stop, stride_ot, o_column, zeros_CV, C, BLOCK_V, False, True)
    if (MODE == "sum") | (MODE == "transition"):
        tl.store(final + (pair * segments + segment) * K * V + cells_VK, s_VK)


@triton.jit(do_not_specialize=("length", "heads", "chunks", "segments", "segment_chunks"))
def spans_kernel(bounds, lengths, spans, length, heads, chunks, segments, segment_chunks, LIMIT: tl.constexpr):
    """Write what of a segment matters outside of it, ``spans`` [B, H, segments, 3] int32, from the chunks' ``bounds``.

    The first chunk whose writes are left in the state after the segment; the end of those whose outputs see the state
    before it; whether any of the state before is left after. Less than 2^-LIMIT of something does not count as left.
    """
    BLOCK: tl.constexpr = 64
    program = tl.program_id(0)
    segment = program % segments
    pair = program // segments
    start = segment * segment_chunks
    end = tl.minimum((row_length(lengths, pair // heads, length) + 63) // 64, start + segment_chunks)
    count = tl.maximum(end - start, 0)
    bounds += pair.to(tl.int64) * chunks + start
    places = tl.arange(0, BLOCK)
    later = places[None, :] > places[:, None]
    first = count
    total = 0.0
    for block in range(tl.cdiv(count, BLOCK) - 1, -1, -1):
        chunk_B = block * BLOCK + places
        bound_B = tl.load(bounds + chunk_B, mask=chunk_B < count, other=0.0)
        # A bound that is NaN forbids to leave anything out. Masked sums, as -inf has no difference to itself.
        left_B = total + tl.sum(tl.where(later, bound_B[None, :], 0.0), 1)
        first = tl.minimum(first, tl.min(tl.where(left_B < -LIMIT, count, chunk_B), 0))
        total += tl.sum(bound_B, 0)
    stop = 0
    before = 0.0
    for block in range(tl.cdiv(count, BLOCK)):
        chunk_B = block * BLOCK + places
        bound_B = tl.load(bounds + chunk_B, mask=chunk_B < count, other=0.0)
        left_B = before + tl.sum(tl.where(later, bound_B[:, None], 0.0), 0)
        stop = tl.maximum(stop, tl.max(tl.where((left_B < -LIMIT) | (chunk_B >= count), 0, chunk_B + 1), 0))
        before += tl.sum(bound_B, 0)
    spans += program.to(tl.int64) * 3
    tl.store(spans, first)
    tl.store(spans + 1, stop)
    tl.store(spans + 2, tl.where(total < -LIMIT, 0, 1))


@triton.jit(do_not_specialize=("segments",))
def scan_kernel(
    sums, transitions, first, spans, states, segments,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, INITIAL: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every segment, [B, H, segments, K, V] float32, from what each segment does.

        S <- M S + N,  with the segments' transitions M [K, K] and sums N [K, V] and the first state where INITIAL

    M is taken for zero where ``spans`` says that nothing lasts; its place may hold anything.
    BACK goes from the last segment to the first with M transposed: then the states are gradients.
    """
    value_blocks: tl.constexpr = V // BLOCK_V
    program = tl.program_id(0)
    columns = program % value_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    pair = (program // value_blocks).to(tl.int64)
    keys = tl.arange(0, K)
    cells_VK = keys[None, :] * V + columns[:, None]
    s_VK = tl.zeros([BLOCK_V, K], tl.float32)
    if INITIAL:
        s_VK += tl.load(first + pair * K * V + cells_VK)
    for step in tl.range(0, segments, num_stages=1):
        segment = pair * segments + (segments - 1 - step if BACK else step)
        tl.store(states + segment * K * V + cells_VK, s_VK)
        n_VK = tl.load(sums + segment * K * V + cells_VK)
        if tl.load(spans + segment * 3 + 2) != 0:
            m_KK = tl.load(transitions + segment * K * K + keys[:, None] * K + keys[None, :])
            if not BACK:
                m_KK = tl.trans(m_KK)
            s_VK = tl.dot(s_VK, m_KK, n_VK, input_precision=PRECISION)
        else:
            s_VK = n_VK
