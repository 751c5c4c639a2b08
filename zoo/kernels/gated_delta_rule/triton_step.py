# mypy: ignore-errors
"""A few positions at a time, as in serving: the recurrence itself, with the state read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.gated_delta_rule.triton_tiles import NORM_EPS, exponential, row_length


@triton.jit
def _row(x, stride_t, t, NORMALIZE: tl.constexpr, W: tl.constexpr):
    """Load one position [W] as float32, normalised if asked."""
    x_W = tl.load(x + t.to(tl.int64) * stride_t + tl.arange(0, W)).to(tl.float32)
    if NORMALIZE:
        x_W *= tl.rsqrt(tl.sum(x_W * x_W, 0) + NORM_EPS)
    return x_W


@triton.jit(
    do_not_specialize=("length", "heads", "stride_gb", "stride_gt", "stride_bb", "stride_bt")
)  # fmt: skip
def step_kernel(
    q, k, v, log_decay, beta, initial, lengths, o, final,
    length, heads, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V] and the final state [B, H, K, V] of one row and head for one block of values.

    The state passes through once; keeping it in the cache would only push out what is used again.
    """
    value_blocks: tl.constexpr = V // BLOCK_V
    program = tl.program_id(0)
    columns = program % value_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    head = program // value_blocks % heads
    row = program // value_blocks // heads
    cells_KV = (row.to(tl.int64) * heads + head) * K * V + tl.arange(0, K)[:, None] * V + columns[None, :]
    s_KV = tl.zeros([K, BLOCK_V], tl.float32)
    if INITIAL:
        s_KV += tl.load(initial + cells_KV, eviction_policy="evict_first")
    end = row_length(lengths, row, length)
    q += row.to(tl.int64) * stride_qb + head * stride_qh
    k += row.to(tl.int64) * stride_kb + head * stride_kh
    v += row.to(tl.int64) * stride_vb + head * stride_vh
    log_decay += row.to(tl.int64) * stride_gb + head * stride_gh
    beta += row.to(tl.int64) * stride_bb + head * stride_bh
    o += row.to(tl.int64) * length * heads * V + head * V
    zero = tl.zeros([], tl.int64)
    for position in tl.range(0, end):
        t = zero + position
        k_K = _row(k, stride_kt, t, NORMALIZE, K)
        q_K = _row(q, stride_qt, t, NORMALIZE, K)
        v_V = tl.load(v + t * stride_vt + columns).to(tl.float32)
        s_KV *= exponential(tl.load(log_decay + t * stride_gt).to(tl.float32))
        error_V = v_V - tl.sum(s_KV * k_K[:, None], 0)
        write_V = error_V * tl.load(beta + t * stride_bt).to(tl.float32)
        s_KV += k_K[:, None] * write_V[None, :]
        o_V = tl.sum(s_KV * q_K[:, None], 0) * scale
        tl.store(o + t * heads * V + columns, o_V.to(o.dtype.element_ty))
    tl.store(final + cells_KV, s_KV, eviction_policy="evict_first")
    for position in tl.range(end, length):
        tl.store(o + (zero + position) * heads * V + columns, tl.zeros([BLOCK_V], o.dtype.element_ty))
