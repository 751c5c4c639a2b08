# mypy: ignore-errors
"""The backward kernels, one pass over queries and one over keys; the names are those of ``triton_forward``.

With num = sum_d f_d V_d and O = num / den, and w^_jd = w_jd / z_d, so that V_d = sum_j w^_jd v_j:

    dnum = rho (g - n mean(g n))            n = num rho, g = dY weight silu(r), rho = 1 / sqrt(mean(num^2) + eps den^2);
                                            dnum = dY / den without the gated norm
    c    = -dnum . O                        the gradient of den
    G_d  = sum_i f_id dnum_i                t_d = sum_i f_id c_i
    dq   = (dnum . V_d + c) exp(e(q) + l - c_max)
    dw   = v_j . G_d + t_d
    dv_j = sum_d w^_jd G_d                  dk = dw exp(s + e(k) - m_d) / z_d        ds_j = sum_d dw w^_jd

The first pass writes dq and dr and sums G, t and the gradient of the norm weight; the second writes dk, dv and ds.
With the gated norm c is -(g . n) eps den rho^2: RMSNorm cancels the scale of O up to eps, and this form says so exactly
where -dnum . O would be a difference of equal numbers.

Gradients can be far smaller than float16 reaches, so float16 operands of the gradient products are widened: DOT is the
dtype that they take, bfloat16 for bfloat16 and float32 (as tf32) for float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_bidirectional_linear_attention.triton_forward import attend, query_weights
from zoo.kernels.gated_bidirectional_linear_attention.triton_tiles import (
    above_zero,
    below_zero,
    exp_rows_columns,
    inverse,
    inverse_root,
    load_gate,
    load_tile,
    row_length,
    sigmoid,
    split_program,
    store_tile,
    to_operand,
    wait_for_previous,
    whole_tiles,
    wide,
    zero_tiles,
)


@triton.jit
def column_sums(sums_XD, scale_L, x_LD, BLOCK_L: tl.constexpr, DOT: tl.constexpr):
    """Add sum_l scale_l x_ld to sixteen equal rows, on the tensor cores unless in float32.

    Sixteen rows are the fewest that they take. (The transposed product, with sixteen columns, reads outside its shared
    memory in some configurations of Triton 3.6 on Hopper; compute-sanitizer found it.)
    """
    if DOT == tl.float32:  # noqa: SIM300
        sums_XD += tl.sum(x_LD * scale_L[:, None], 0)[None, :]
    else:
        scale_XL = tl.broadcast_to(scale_L[None, :], [16, BLOCK_L]).to(DOT)
        sums_XD = tl.dot(scale_XL, x_LD.to(DOT), sums_XD)
    return sums_XD


@triton.jit
def _queries_tile(
    g_DD, t_XD, weight_XD, grad, grad_desc, packed, desc, row_start, t, end, stop, grad_stride_l, stride_l, width,
    out_column, query_column, gate_column, eps, v_DD, v_dot_DD, l_D, weight_D, grad_packed,
    out_desc,
    D: tl.constexpr, BLOCK_L: tl.constexpr, GATED_NORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = v_DD.dtype == tl.float32
    q_LD = load_tile(packed, desc, row_start, t, end, stride_l, query_column, D, BLOCK_L, TMA, MASKED)
    grad_LD = load_tile(grad, grad_desc, row_start, t, end, grad_stride_l, out_column, D, BLOCK_L, TMA, MASKED)
    exp_LD, f_LD = query_weights(q_LD.to(tl.float32), l_D, EXACT)
    num_LD, den_L = attend(f_LD, v_DD, PRECISION)
    grad_LD = grad_LD.to(tl.float32)
    if GATED_NORM:
        r_LD = load_tile(packed, desc, row_start, t, end, stride_l, gate_column, D, BLOCK_L, TMA, MASKED)
        r_LD = r_LD.to(tl.float32)
        inverse_L = inverse_root(tl.sum(num_LD * num_LD, 1) / D + eps * den_L * den_L, EXACT)
        normed_LD = num_LD * inverse_L[:, None]
        sigmoid_LD = sigmoid(r_LD, EXACT)
        grad_sigmoid_LD = grad_LD * sigmoid_LD
        grad_silu_LD = grad_sigmoid_LD * r_LD
        dr_LD = (grad_sigmoid_LD + grad_silu_LD - grad_silu_LD * sigmoid_LD) * (normed_LD * weight_D[None, :])
        store_tile(grad_packed, out_desc, row_start, t, stop, width, gate_column, dr_LD, D, BLOCK_L, TMA, MASKED)
        weight_XD = column_sums(weight_XD, tl.full([BLOCK_L], 1.0, tl.float32), grad_silu_LD * normed_LD, BLOCK_L, DOT)
        g_LD = grad_silu_LD * weight_D[None, :]
        product_L = tl.sum(g_LD * normed_LD, 1)
        dnum_LD = g_LD * inverse_L[:, None] - normed_LD * (product_L * inverse_L / D)[:, None]
        c_L = -product_L * (eps * den_L * inverse_L * inverse_L)
    else:
        reciprocal_L = inverse(den_L, EXACT)
        dnum_LD = grad_LD * reciprocal_L[:, None]
        c_L = -tl.sum(grad_LD * num_LD, 1) * reciprocal_L * reciprocal_L
    dnum_lo_LD = to_operand(dnum_LD, DOT, DOT_PRECISION)
    df_LD = tl.dot(dnum_lo_LD, v_dot_DD, input_precision=DOT_PRECISION) + c_L[:, None]
    dq_LD = df_LD * exp_LD
    store_tile(grad_packed, out_desc, row_start, t, stop, width, query_column, dq_LD, D, BLOCK_L, TMA, MASKED)
    g_DD = tl.dot(tl.trans(to_operand(f_LD, DOT, DOT_PRECISION)), dnum_lo_LD, g_DD, input_precision=DOT_PRECISION)
    t_XD = column_sums(t_XD, c_L, f_LD, BLOCK_L, DOT)
    return g_DD, t_XD, weight_XD


@triton.jit
def backward_queries_kernel(
    grad, grad_desc, packed, desc, lengths, state, log_z, norm_weight, grad_packed, out_desc,
    part_state, part_z, part_weight,
    length, heads, splits, chunk, grad_stride_b, grad_stride_l, stride_b, stride_l, width, query_column, gate_column,
    eps,
    D: tl.constexpr, BLOCK_L: tl.constexpr, GATED_NORM: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr, DOT_PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write dq and dr of one chunk of one row and head, and the chunk's sums of G, t and the norm weight's gradient."""
    wait_for_previous(OVERLAP)
    head, split, row = split_program(heads, splits)
    valid = row_length(lengths, row, length)
    start = split * chunk
    stop = tl.minimum(start + chunk, length)
    end = tl.minimum(stop, valid)
    full_end = whole_tiles(start, end, BLOCK_L)
    columns = tl.arange(0, D)
    pair = row.to(tl.int64) * heads + head
    packed += row.to(tl.int64) * stride_b
    grad += row.to(tl.int64) * grad_stride_b
    grad_packed += row.to(tl.int64) * length * width
    query_column += head * D
    gate_column += head * D
    v_DD = tl.load(state + pair * D * D + columns[:, None] * D + columns[None, :])
    l_D = tl.load(log_z + pair * D + columns)
    v_dot_DD = tl.trans(v_DD).to(DOT)
    weight_D = l_D
    if GATED_NORM:
        weight_D = tl.load(norm_weight + head * D + columns).to(tl.float32)
    g_DD = tl.zeros([D, D], tl.float32)
    t_XD = tl.zeros([16, D], tl.float32)
    weight_XD = tl.zeros([16, D], tl.float32)
    for t in tl.range(start, full_end, BLOCK_L, num_stages=STAGES):
        g_DD, t_XD, weight_XD = _queries_tile(
            g_DD, t_XD, weight_XD, grad, grad_desc, packed, desc, row * length, t, end, stop, grad_stride_l, stride_l,
            width, head * D, query_column, gate_column, eps, v_DD, v_dot_DD, l_D, weight_D, grad_packed, out_desc,
            D, BLOCK_L, GATED_NORM, TMA, False, PRECISION, DOT, DOT_PRECISION,
        )  # fmt: skip
    if full_end < end:
        g_DD, t_XD, weight_XD = _queries_tile(
            g_DD, t_XD, weight_XD, grad, grad_desc, packed, desc, row * length, full_end, end, stop, grad_stride_l,
            stride_l, width, head * D, query_column, gate_column, eps, v_DD, v_dot_DD, l_D, weight_D, grad_packed,
            out_desc,
            D, BLOCK_L, GATED_NORM, TMA, True, PRECISION, DOT, DOT_PRECISION,
        )  # fmt: skip
    part = pair * splits + split
    tl.store(part_state + part * D * D + columns[:, None] * D + columns[None, :], g_DD)
    tl.store(part_z + part * D + columns, tl.max(t_XD, 0))
    zero_tiles(grad_packed, start, end, stop, width, query_column, D, BLOCK_L)
    if GATED_NORM:
        tl.store(part_weight + part * D + columns, tl.max(weight_XD, 0))
        zero_tiles(grad_packed, start, end, stop, width, gate_column, D, BLOCK_L)


@triton.jit
def backward_combine_kernel(
    part_state, part_z, grad_state, grad_z, splits,
    D: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the chunks' G and t of one row and head; one program for COLUMNS columns of G."""
    wait_for_previous(OVERLAP)
    parts: tl.constexpr = D // COLUMNS
    pair = (tl.program_id(0) // parts).to(tl.int64)
    block = tl.program_id(0) % parts
    rows = tl.arange(0, D)
    cells = rows[:, None] * D + (block * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    state_DX = tl.zeros([D, COLUMNS], tl.float32)
    z_D = tl.zeros([D], tl.float32)
    for split in tl.range(0, splits, num_stages=STAGES):
        part = pair * splits + split
        state_DX += tl.load(part_state + part * D * D + cells)
        z_D += tl.load(part_z + part * D + rows)
    state_DX = to_operand(state_DX, grad_state.dtype.element_ty, DOT_PRECISION)
    tl.store(grad_state + pair * D * D + cells, state_DX)
    if block == 0:
        tl.store(grad_z + pair * D + rows, z_D)


@triton.jit
def _keys_tile(
    packed, desc, row_start, t, end, stop, stride_l, width, key_column, value_column, gate_column, g_DD,
    g_transposed_DD, t_D, l_D, gate, largest, grad_packed, out_desc,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    DOT: tl.constexpr, DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    k_LD = load_tile(packed, desc, row_start, t, end, stride_l, key_column, D, BLOCK_L, TMA, MASKED)
    v_LD = load_tile(packed, desc, row_start, t, end, stride_l, value_column, D, BLOCK_L, TMA, MASKED)
    gate_L = load_gate(packed, t, end, stride_l, gate_column, BLOCK_L, KEY_GATE, MASKED) - gate
    dw_LD = tl.dot(v_LD.to(DOT), g_transposed_DD, input_precision=DOT_PRECISION) + t_D[None, :]
    k_LD = k_LD.to(tl.float32)
    exp_LD = exp_rows_columns(below_zero(k_LD), largest, gate_L, l_D, v_LD.dtype == tl.float32)
    w_LD = above_zero(k_LD) * exp_LD
    dk_LD = dw_LD * exp_LD
    store_tile(grad_packed, out_desc, row_start, t, stop, width, key_column, dk_LD, D, BLOCK_L, TMA, MASKED)
    dv_LD = tl.dot(to_operand(w_LD, DOT, DOT_PRECISION), g_DD, input_precision=DOT_PRECISION)
    store_tile(grad_packed, out_desc, row_start, t, stop, width, value_column, dv_LD, D, BLOCK_L, TMA, MASKED)
    if KEY_GATE:
        rows = tl.arange(0, BLOCK_L)
        target = grad_packed + wide(t) * width + gate_column + rows * width
        ds_L = tl.sum(dw_LD * w_LD, 1).to(grad_packed.dtype.element_ty)
        if MASKED:
            tl.store(target, ds_L, mask=t + rows < stop)
        else:
            tl.store(target, ds_L)


@triton.jit
def backward_keys_kernel(
    packed, desc, lengths, log_z, shift, grad_state, grad_z, grad_packed, out_desc,
    length, heads, splits, chunk, stride_b, stride_l, width, used_width, key_column, value_column, gate_column,
    D: tl.constexpr, BLOCK_L: tl.constexpr, KEY_GATE: tl.constexpr, TMA: tl.constexpr,
    DOT: tl.constexpr, DOT_PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and ds of one chunk of one row and head, and the head's share of the columns that align the row."""
    wait_for_previous(OVERLAP)
    head, split, row = split_program(heads, splits)
    valid = row_length(lengths, row, length)
    start = split * chunk
    stop = tl.minimum(start + chunk, length)
    end = tl.minimum(stop, valid)
    full_end = whole_tiles(start, end, BLOCK_L)
    columns = tl.arange(0, D)
    pair = row.to(tl.int64) * heads + head
    packed += row.to(tl.int64) * stride_b
    grad_packed += row.to(tl.int64) * length * width
    gate_column += head
    key_column += head * D
    value_column += head * D
    g_DD = tl.load(grad_state + pair * D * D + columns[:, None] * D + columns[None, :])
    g_transposed_DD = tl.trans(g_DD)
    t_D = tl.load(grad_z + pair * D + columns)
    l_D = tl.load(log_z + pair * D + columns)
    gate = tl.load(shift + 2 * pair)
    largest = tl.load(shift + 2 * pair + 1)
    for t in tl.range(start, full_end, BLOCK_L, num_stages=STAGES):
        _keys_tile(
            packed, desc, row * length, t, end, stop, stride_l, width, key_column, value_column, gate_column, g_DD,
            g_transposed_DD, t_D, l_D, gate, largest, grad_packed, out_desc,
            D, BLOCK_L, KEY_GATE, TMA, False, DOT, DOT_PRECISION,
        )  # fmt: skip
    if full_end < end:
        _keys_tile(
            packed, desc, row * length, full_end, end, stop, stride_l, width, key_column, value_column, gate_column,
            g_DD, g_transposed_DD, t_D, l_D, gate, largest, grad_packed, out_desc,
            D, BLOCK_L, KEY_GATE, TMA, True, DOT, DOT_PRECISION,
        )  # fmt: skip
    zero_tiles(grad_packed, start, end, stop, width, key_column, D, BLOCK_L)
    zero_tiles(grad_packed, start, end, stop, width, value_column, D, BLOCK_L)
    if KEY_GATE:
        for t in tl.range(end, stop, BLOCK_L):
            rows = t + tl.arange(0, BLOCK_L)
            zeros_L = tl.zeros([BLOCK_L], grad_packed.dtype.element_ty)
            tl.store(grad_packed + gate_column + rows.to(tl.int64) * width, zeros_L, mask=rows < stop)
    for column in tl.range(used_width + head * 8, width, heads * 8):
        spare = column + tl.arange(0, 8)
        for t in tl.range(start, stop, BLOCK_L):
            rows = t + tl.arange(0, BLOCK_L)
            zeros_LX = tl.zeros([BLOCK_L, 8], grad_packed.dtype.element_ty)
            target = grad_packed + rows.to(tl.int64)[:, None] * width + spare[None, :]
            tl.store(target, zeros_LX, mask=(rows < stop)[:, None] & (spare < width)[None, :])
