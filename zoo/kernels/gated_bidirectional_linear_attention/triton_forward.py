# mypy: ignore-errors
"""The forward kernels: reduce keys and values to one state a head, combine the splits, apply the state to queries.

With a(x) = max(x, 0) + 1 and e(x) = min(x, 0), phi(x) = a(x) exp(e(x)) without a branch. For a key column d,

    m_d  = max_j (s_j + e(k_jd))            w_jd = a(k_jd) exp(s_j + e(k_jd) - m_d)
    z_d  = sum_j w_jd                       V_d  = sum_j w_jd v_j / z_d         a weighted mean of the values
    l_d  = m_d - max_d m_d + log z_d

and for a query, with c = max_d (e(q_d) + l_d),

    f_d  = a(q_d) exp(e(q_d) + l_d - c)     O    = sum_d f_d V_d / sum_d f_d

which is the op's formula with every exponent at most 0 and every sum at least 1: nothing overflows, and nothing
vanishes that a sum needs, in 16 bits too. The maxima cost a reduction over every tile, so a chunk is first summed
relative to its first gate logit alone; only where a column's sum then comes out too small or too large
is the chunk summed again with the maxima. The gated RMSNorm multiplies numerator and eps by the squared denominator,
so it needs no division: O / sqrt(mean(O^2) + eps) = num / sqrt(mean(num^2) + eps den^2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_bidirectional_linear_attention.triton_tiles import (
    LOG2_E,
    above_zero,
    below_zero,
    exp_rows,
    exponential,
    inverse_root,
    load_gate,
    load_tile,
    logarithm,
    quotient,
    row_length,
    sigmoid,
    split_program,
    store_tile,
    wait_for_previous,
    whole_tiles,
    wide,
    zero_tiles,
)


@triton.jit
def _add(kv_DD, z_DX, w_LD, v_LD, PRECISION: tl.constexpr):
    """Add w^T v and the column sums of w, on the tensor cores both (sixteen equal columns) unless in float32."""
    w_DL = tl.trans(w_LD.to(v_LD.dtype))
    kv_DD = tl.dot(w_DL, v_LD, kv_DD, input_precision=PRECISION)
    if v_LD.dtype == tl.float32:
        z_DX += tl.sum(w_LD, 0)[:, None]
    else:
        z_DX = tl.dot(w_DL, tl.full([w_LD.shape[0], 16], 1.0, v_LD.dtype), z_DX)
    return kv_DD, z_DX


@triton.jit
def _accumulate(
    kv_DD, z_DX, packed, desc, row_start, t, end, stride_l, key_column, value_column, gate_column, shift,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the positions t .. t + BLOCK_L, all keys weighed relative to one shift."""
    k_LD = load_tile(packed, desc, row_start, t, end, stride_l, key_column, D, BLOCK_L, TMA, MASKED)
    v_LD = load_tile(packed, desc, row_start, t, end, stride_l, value_column, D, BLOCK_L, TMA, MASKED)
    gate_L = load_gate(packed, t, end, stride_l, gate_column, BLOCK_L, KEY_GATE, MASKED) - shift
    k_LD = k_LD.to(tl.float32)
    w_LD = above_zero(k_LD) * exp_rows(below_zero(k_LD), gate_L, v_LD.dtype == tl.float32)
    return _add(kv_DD, z_DX, w_LD, v_LD, PRECISION)


@triton.jit
def _accumulate_with_maxima(
    kv_DD, z_DX, max_D, packed, desc, row_start, t, end, stride_l, key_column, value_column, gate_column, gate, key,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the positions t .. t + BLOCK_L, every key column relative to its own running maximum.

    Gates and keys are taken relative to ``gate`` and ``key`` first: a gate of 1e4 would swallow a key's last bits.
    """
    EXACT: tl.constexpr = packed.dtype.element_ty == tl.float32
    k_LD = load_tile(packed, desc, row_start, t, end, stride_l, key_column, D, BLOCK_L, TMA, True)
    v_LD = load_tile(packed, desc, row_start, t, end, stride_l, value_column, D, BLOCK_L, TMA, True)
    gate_L = load_gate(packed, t, end, stride_l, gate_column, BLOCK_L, KEY_GATE, True) - gate
    k_LD = k_LD.to(tl.float32)
    e_LD = (below_zero(k_LD) - key) + gate_L[:, None]
    new_max_D = tl.maximum(max_D, tl.max(e_LD, 0))
    shift_D = tl.where(new_max_D > float("-inf"), new_max_D, 0.0)
    scale_D = exponential(max_D - shift_D, EXACT)
    w_LD = above_zero(k_LD) * exponential(e_LD - shift_D[None, :], EXACT)
    kv_DD, z_DX = _add(kv_DD * scale_D[:, None], z_DX * scale_D[:, None], w_LD, v_LD, PRECISION)
    return kv_DD, z_DX, new_max_D


@triton.jit
def _largest_gate_and_key(
    packed, desc, row_start, start, end, stride_l, key_column, gate_column,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the largest gate logit of a chunk and the largest e(k), 0 where there is none above -inf.

    The rounding of keys matters in float32 only; in 16 bits theirs is coarser, and 0 does as well.
    """
    gate_L = tl.full([BLOCK_L], float("-inf"), tl.float32)
    key_L = tl.full([BLOCK_L], float("-inf"), tl.float32)
    for t in tl.range(start, end, BLOCK_L, num_stages=1):
        gate_L = tl.maximum(gate_L, load_gate(packed, t, end, stride_l, gate_column, BLOCK_L, KEY_GATE, True))
        if packed.dtype.element_ty == tl.float32:
            k_LD = load_tile(packed, desc, row_start, t, end, stride_l, key_column, D, BLOCK_L, TMA, True)
            valid_L = t + tl.arange(0, BLOCK_L) < end
            key_L = tl.maximum(key_L, tl.where(valid_L, tl.max(below_zero(k_LD), 1), float("-inf")))
    gate = tl.max(gate_L, 0)
    key = tl.max(key_L, 0)
    return tl.where(gate > float("-inf"), gate, 0.0), tl.where(key > float("-inf"), key, 0.0)


@triton.jit
def _first_gate(packed, start, end, stride_l, column, KEY_GATE: tl.constexpr):
    """Return the gate logit of a chunk's first position, 0 without a key gate or positions."""
    gate = 0.0
    if KEY_GATE:
        pointer = packed + wide(start) * stride_l + column
        gate = tl.load(pointer, mask=start < end, other=0.0).to(tl.float32)
    return gate


@triton.jit
def _store_state(
    state, log_z, shift, kv_DD, z_D, max_D, gate, key, columns, offset, first, COLUMNS: tl.constexpr, D: tl.constexpr
):
    """Write V = kv / z, l, the gate that all exponents are relative to, and the largest maximum relative to it.

    An empty history gives zeros. The two shifts stay apart because their sum would lose the bits of the smaller one;
    what the second loses, being the sum of ``key`` and a maximum relative to both, is in l.
    """
    EXACT: tl.constexpr = state.dtype.element_ty == tl.float32
    rows = tl.arange(0, D)
    empty = tl.max(z_D, 0) == 0.0
    some_D = tl.where(z_D > 0, z_D, 1.0)
    v_DX = quotient(kv_DD, tl.broadcast_to(some_D[:, None], kv_DD.shape), EXACT)
    tl.store(state + offset * D * D + rows[:, None] * D + columns[None, :], v_DX.to(state.dtype.element_ty))
    if first:
        largest = tl.where(empty, 0.0, key + tl.max(max_D, 0))
        l_D = tl.where(z_D > 0, max_D - (largest - key) + logarithm(some_D, EXACT), 0.0)
        tl.store(log_z + offset * D + rows, l_D)
        tl.store(shift + 2 * offset, tl.where(empty, 0.0, gate))
        tl.store(shift + 2 * offset + 1, largest)


@triton.jit
def _is_sound(z_D, count, dtype: tl.constexpr):
    """Return whether one shift was good for all columns, by the sums of the ``count`` weights of each.

    Too large, and a weight has overflown or may make the state do so. Too small, and weights have vanished: below 2^-24
    they do in float16, and together they must stay below one rounding of the sum.
    """
    smallest = 1e-25
    if dtype == tl.float16:
        smallest = count * 0.00006103515625
    return (tl.min(z_D, 0) >= smallest) & (tl.max(z_D, 0) <= 1e30)


@triton.jit
def reduce_kernel(
    packed, desc, lengths, state, log_z, shift, part_kv, part_z, part_max, part_gate,
    length, heads, splits, chunk, stride_b, stride_l, key_column, value_column, gate_column,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum w_jd v_j and w_jd over one chunk of one row and head; FINAL (one chunk a row) writes the finished state."""
    wait_for_previous(OVERLAP)
    head, split, row = split_program(heads, splits)
    valid = row_length(lengths, row, length)
    start = split * chunk
    end = tl.minimum(start + chunk, valid)
    full_end = whole_tiles(start, end, BLOCK_L)
    packed += row.to(tl.int64) * stride_b
    gate_column += head
    key_column += head * D
    value_column += head * D
    row_start = row * length

    first = _first_gate(packed, start, end, stride_l, gate_column, KEY_GATE)
    kv_DD = tl.zeros([D, D], tl.float32)
    z_DX = tl.zeros([D, 16], tl.float32)
    for t in tl.range(start, full_end, BLOCK_L, num_stages=STAGES):
        kv_DD, z_DX = _accumulate(
            kv_DD, z_DX, packed, desc, row_start, t, end, stride_l, key_column, value_column, gate_column, first,
            D, BLOCK_L, KEY_GATE, TMA, False, PRECISION,
        )  # fmt: skip
    if full_end < end:
        kv_DD, z_DX = _accumulate(
            kv_DD, z_DX, packed, desc, row_start, full_end, end, stride_l, key_column, value_column, gate_column,
            first, D, BLOCK_L, KEY_GATE, TMA, True, PRECISION,
        )  # fmt: skip
    z_D = tl.max(z_DX, 1)
    gate = first
    key = 0.0
    max_D = tl.zeros([D], tl.float32) + (0.0 if start < end else float("-inf"))
    if (start < end) & (_is_sound(z_D, end - start, packed.dtype.element_ty) == 0):
        # Other gates tower over the first one, or a column of keys lies far below its gates: start over.
        kv_DD = tl.zeros([D, D], tl.float32)
        z_DX = tl.zeros([D, 16], tl.float32)
        max_D = tl.full([D], float("-inf"), tl.float32)
        gate, key = _largest_gate_and_key(
            packed, desc, row_start, start, end, stride_l, key_column, gate_column, D, BLOCK_L, KEY_GATE, TMA
        )
        for t in tl.range(start, end, BLOCK_L, num_stages=1):
            kv_DD, z_DX, max_D = _accumulate_with_maxima(
                kv_DD, z_DX, max_D, packed, desc, row_start, t, end, stride_l, key_column, value_column, gate_column,
                gate, key, D, BLOCK_L, KEY_GATE, TMA, PRECISION,
            )  # fmt: skip
        z_D = tl.max(z_DX, 1)
        # A chunk of nothing but NaN has no maximum, and yet its sums count.
        max_D = tl.where((max_D > float("-inf")) | (z_D == 0.0), max_D, 0.0)

    columns = tl.arange(0, D)
    pair = row.to(tl.int64) * heads + head
    if FINAL:
        _store_state(state, log_z, shift, kv_DD, z_D, max_D, gate, key, columns, pair, True, D, D)
    else:
        part = pair * splits + split
        some = tl.max(max_D, 0) > float("-inf")
        tl.store(part_max + part * D + columns, max_D)
        tl.store(part_gate + 2 * part, tl.where(some, gate, float("-inf")))
        tl.store(part_gate + 2 * part + 1, tl.where(some, key, float("-inf")))
        if start < end:
            tl.store(part_z + part * D + columns, z_D)
            tl.store(part_kv + part * D * D + columns[:, None] * D + columns[None, :], kv_DD)


@triton.jit
def combine_kernel(
    part_kv, part_z, part_max, part_gate, state, log_z, shift, splits,
    D: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one row and head, each rescaled to the common maximum; one program for COLUMNS values."""
    wait_for_previous(OVERLAP)
    parts: tl.constexpr = D // COLUMNS
    pair = (tl.program_id(0) // parts).to(tl.int64)
    block = tl.program_id(0) % parts
    rows = tl.arange(0, D)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    kv_DX = tl.zeros([D, COLUMNS], tl.float32)
    z_D = tl.zeros([D], tl.float32)
    max_D = tl.full([D], float("-inf"), tl.float32)
    EXACT: tl.constexpr = state.dtype.element_ty == tl.float32
    gate = float("-inf")
    key = float("-inf")
    for split in tl.range(0, splits, num_stages=STAGES):
        part = pair * splits + split
        own_gate = tl.load(part_gate + 2 * part)
        own_key = tl.load(part_gate + 2 * part + 1)
        new_gate = tl.maximum(gate, own_gate)
        new_key = tl.maximum(key, own_key)
        # Maxima are relative to a gate and a key: bring both to the larger ones before they are compared.
        max_D += tl.where(gate > float("-inf"), (gate - new_gate) + (key - new_key), 0.0)
        own_max_D = tl.load(part_max + part * D + rows)
        some_D = own_max_D > float("-inf")
        own_max_D += tl.where(own_gate > float("-inf"), (own_gate - new_gate) + (own_key - new_key), 0.0)
        new_max_D = tl.maximum(max_D, own_max_D)
        old_D = tl.where(max_D > float("-inf"), exponential(max_D - new_max_D, EXACT), 0.0)
        own_D = tl.where(some_D, exponential(own_max_D - new_max_D, EXACT), 0.0)
        z_D = z_D * old_D + own_D * tl.load(part_z + part * D + rows, mask=some_D, other=0.0)
        added_DX = tl.load(
            part_kv + part * D * D + rows[:, None] * D + columns[None, :], mask=some_D[:, None], other=0.0
        )
        kv_DX = kv_DX * old_D[:, None] + own_D[:, None] * added_DX
        max_D = new_max_D
        gate = new_gate
        key = new_key
    _store_state(state, log_z, shift, kv_DX, z_D, max_D, gate, key, columns, pair, block == 0, COLUMNS, D)


@triton.jit
def query_weights(q_LD, l_D, EXACT: tl.constexpr):
    """Return exp(e(q) + l - c) and f = a(q) times that, both [L, D] in float32."""
    if EXACT:
        # Queries far below zero come back near it first, where the sum with l loses no bits of l.
        e_LD = below_zero(q_LD)
        e_LD = (e_LD - tl.max(e_LD, 1)[:, None]) + l_D[None, :]
        exp_LD = exponential(e_LD - tl.max(e_LD, 1)[:, None], True)
    else:
        e_LD = below_zero(q_LD) * LOG2_E + (l_D * LOG2_E)[None, :]
        exp_LD = tl.exp2(e_LD - tl.max(e_LD, 1)[:, None])
    return exp_LD, above_zero(q_LD) * exp_LD


@triton.jit
def attend(f_LD, v_DD, PRECISION: tl.constexpr):
    """Return the numerator [L, D] and the denominator [L] of O from the query weights and the state."""
    dtype = v_DD.dtype
    f_lo_LD = f_LD.to(dtype)
    num_LD = tl.dot(f_lo_LD, v_DD, input_precision=PRECISION)
    if dtype == tl.float32:
        den_L = tl.sum(f_LD, 1)
    else:
        ones_DX = tl.full([v_DD.shape[0], 16], 1.0, dtype)
        den_L = tl.max(tl.dot(f_lo_LD, ones_DX), 1)
    return num_LD, den_L


@triton.jit
def _apply_tile(
    packed, desc, row_start, t, end, stop, stride_l, query_column, gate_column, eps, v_DD, l_D, weight_D, out, width,
    D: tl.constexpr, BLOCK_L: tl.constexpr, GATED_NORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = v_DD.dtype == tl.float32
    q_LD = load_tile(packed, desc, row_start, t, end, stride_l, query_column, D, BLOCK_L, TMA, MASKED)
    _, f_LD = query_weights(q_LD.to(tl.float32), l_D, EXACT)
    num_LD, den_L = attend(f_LD, v_DD, PRECISION)
    if GATED_NORM:
        r_LD = load_tile(packed, desc, row_start, t, end, stride_l, gate_column, D, BLOCK_L, TMA, MASKED)
        r_LD = r_LD.to(tl.float32)
        inverse_L = inverse_root(tl.sum(num_LD * num_LD, 1) / D + eps * den_L * den_L, EXACT)
        y_LD = num_LD * inverse_L[:, None] * weight_D[None, :] * (r_LD * sigmoid(r_LD, EXACT))
    else:
        y_LD = quotient(num_LD, tl.broadcast_to(den_L[:, None], num_LD.shape), EXACT)
    if MASKED:
        y_LD = tl.where((t + tl.arange(0, BLOCK_L) < end)[:, None], y_LD, 0.0)
    store_tile(out, out, 0, t, stop, width, 0, y_LD, D, BLOCK_L, False, MASKED)


@triton.jit
def apply_kernel(
    packed, desc, lengths, state, log_z, norm_weight, out,
    length, heads, splits, chunk, stride_b, stride_l, query_column, gate_column, eps,
    D: tl.constexpr, BLOCK_L: tl.constexpr, GATED_NORM: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write Y for one chunk of one row and head; zeros at padding, which is not read."""
    wait_for_previous(OVERLAP)
    head, split, row = split_program(heads, splits)
    valid = row_length(lengths, row, length)
    start = split * chunk
    stop = tl.minimum(start + chunk, length)
    end = tl.minimum(stop, valid)
    full_end = whole_tiles(start, end, BLOCK_L)
    columns = tl.arange(0, D)
    pair = row.to(tl.int64) * heads + head
    width = heads * D
    packed += row.to(tl.int64) * stride_b
    out += row.to(tl.int64) * length * width + head * D
    query_column += head * D
    gate_column += head * D
    v_DD = tl.load(state + pair * D * D + columns[:, None] * D + columns[None, :])
    l_D = tl.load(log_z + pair * D + columns)
    weight_D = l_D
    if GATED_NORM:
        weight_D = tl.load(norm_weight + head * D + columns).to(tl.float32)
    for t in tl.range(start, full_end, BLOCK_L, num_stages=STAGES):
        _apply_tile(
            packed, desc, row * length, t, end, stop, stride_l, query_column, gate_column, eps, v_DD, l_D, weight_D,
            out, width, D, BLOCK_L, GATED_NORM, TMA, False, PRECISION,
        )  # fmt: skip
    if full_end < end:
        _apply_tile(
            packed, desc, row * length, full_end, end, stop, stride_l, query_column, gate_column, eps, v_DD, l_D,
            weight_D, out, width, D, BLOCK_L, GATED_NORM, TMA, True, PRECISION,
        )  # fmt: skip
    zero_tiles(out, start, end, stop, width, 0, D, BLOCK_L)
