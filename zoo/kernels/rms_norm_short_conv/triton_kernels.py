# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton compiles tuple sums, not starred tuples)
"""RMSNorm and the short causal convolution in one pass over x, forward and backward.

As in ``causal_short_conv``, a program walks a run of positions of one row, but it owns all channels, because the norm
needs them. ``norm_weight`` is folded into the taps, so only one number a position, rstd, separates the two kernels.
Four positions share one reduction: the exchange between warps is then paid once for all four.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.causal_short_conv.triton_kernels import SIZES, both, load_row, load_taps, place, valid_length


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _folded_taps(weight_ptr, norm_weight_ptr, channels, mask, stride_c, stride_w, W: tl.constexpr):
    norm_weight = tl.load(norm_weight_ptr + channels, mask=mask, other=0).to(tl.float32)
    taps = load_taps(weight_ptr, channels, mask, stride_c, stride_w, W)
    folded = ()
    for w in tl.static_range(W):
        folded = folded + (taps[w] * norm_weight,)
    return folded


@triton.jit
def _sums(rows, ROWS: tl.constexpr):
    """Return the sum over channels of each of ROWS rows, four to a reduction."""
    sums = ()
    for i in tl.static_range(0, ROWS, 4):
        sums = sums + tl.reduce((rows[i], rows[i + 1], rows[i + 2], rows[i + 3]), 0, _add4)
    return sums


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    lengths_ptr,
    y_ptr,
    rstd_ptr,
    eps,
    length,
    run,
    runs,
    stride_xb,
    stride_xl,
    stride_wc,
    stride_ww,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y[t] = sum_w weight[w] * norm_weight * rstd[t'] * x[t'] with t' = t - (W - 1) + w; rstd [B, L], 0 at padding."""
    b, first, stop, channels, mask = place(length, run, runs, C, BLOCK_C)
    valid = valid_length(lengths_ptr, b, length)
    last = tl.minimum(valid, stop)
    stride_xl = tl.cast(stride_xl, tl.int64)
    stride_yl = tl.full((), C, tl.int64)
    x_ptr += b * tl.cast(stride_xb, tl.int64)
    y_ptr += b * length * stride_yl
    rstd_ptr += b * tl.cast(length, tl.int64)
    taps = _folded_taps(weight_ptr, norm_weight_ptr, channels, mask, stride_wc, stride_ww, W)

    window = ()
    for i in tl.static_range(W - 1):
        t = first - (W - 1) + i
        inside = (t >= 0) & (t < valid)
        row = load_row(x_ptr + t * stride_xl, channels, mask, inside)
        # Without eps the norm of nothing is infinite: its factor is 0 outside, as its positions are.
        window = window + (row * tl.where(inside, tl.rsqrt(tl.sum(row * row, axis=0) / C + eps), 0),)
    for start in range(first, stop, ROWS):
        rows = ()
        squares = ()
        for u in tl.static_range(ROWS):
            t = start + u
            rows = rows + (load_row(x_ptr + t * stride_xl, channels, mask, t < last),)
        for u in tl.static_range(ROWS):
            squares = squares + (rows[u] * rows[u],)
        sums = _sums(squares, ROWS)
        for u in tl.static_range(ROWS):
            t = start + u
            rstd = tl.rsqrt(sums[u] / C + eps)
            tl.store(rstd_ptr + t, tl.where(t < valid, rstd, 0), mask=t < stop)
            window = window + (rows[u] * rstd,)
        for u in tl.static_range(ROWS):
            t = start + u
            y = taps[0] * window[u]
            for w in tl.static_range(1, W):
                y += taps[w] * window[u + w]
            y = tl.where(t < valid, y, 0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + t * stride_yl + channels, y, mask=both(mask, t < stop))
        kept = ()
        for i in tl.static_range(W - 1):
            kept = kept + (window[ROWS + i],)
        window = kept


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr,
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    lengths_ptr,
    rstd_ptr,
    grad_x_ptr,
    partials_ptr,
    length,
    run,
    runs,
    stride_gb,
    stride_gl,
    stride_xb,
    stride_xl,
    stride_wc,
    stride_ww,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of one run: grad_x [B, L, C] and partials [B * runs, W, C] float32 (see ``sum_partials_kernel``).

    With h[t] = rstd[t] * x[t] and d[t] = sum_w weight[w] * norm_weight * grad[t + (W - 1) - w]:
    grad_x[t] = rstd[t] * (d[t] - h[t] * mean(d[t] * h[t])) and partials[w] = sum_t grad[t] * h[t - (W - 1) + w].
    """
    b, first, stop, channels, mask = place(length, run, runs, C, BLOCK_C)
    valid = valid_length(lengths_ptr, b, length)
    last = tl.minimum(valid, stop + (W - 1))
    stride_gl = tl.cast(stride_gl, tl.int64)
    stride_xl = tl.cast(stride_xl, tl.int64)
    stride_yl = tl.full((), C, tl.int64)
    grad_ptr += b * tl.cast(stride_gb, tl.int64)
    x_ptr += b * tl.cast(stride_xb, tl.int64)
    grad_x_ptr += b * length * stride_yl
    rstd_ptr += b * tl.cast(length, tl.int64)
    taps = _folded_taps(weight_ptr, norm_weight_ptr, channels, mask, stride_wc, stride_ww, W)

    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((BLOCK_C,), tl.float32),)
    h_window = ()
    g_window = ()
    rstds = ()
    for i in tl.static_range(W - 1):
        t = first - (W - 1) + i
        inside = (t >= 0) & (t < valid)
        rstd = tl.load(rstd_ptr + t, mask=inside, other=0)
        rstds = rstds + (rstd,)
        h_window = h_window + (load_row(x_ptr + t * stride_xl, channels, mask, inside) * rstd,)
        g_window = g_window + (tl.zeros((BLOCK_C,), tl.float32),)
    for start in range(first, stop + (W - 1), ROWS):
        for u in tl.static_range(ROWS):
            t = start + u
            rstd = tl.load(rstd_ptr + t, mask=t < last, other=0)
            rstds = rstds + (rstd,)
            h_window = h_window + (load_row(x_ptr + t * stride_xl, channels, mask, t < last) * rstd,)
            g_window = g_window + (load_row(grad_ptr + t * stride_gl, channels, mask, t < last),)
        dots = ()
        products = ()
        for u in tl.static_range(ROWS):
            d = taps[0] * g_window[u + (W - 1)]
            for w in tl.static_range(1, W):
                d += taps[w] * g_window[u + (W - 1) - w]
            dots = dots + (d,)
            products = products + (d * h_window[u],)
        means = _sums(products, ROWS)
        for u in tl.static_range(ROWS):
            t = start + u
            done = t - (W - 1)
            grad_x = rstds[u] * (dots[u] - h_window[u] * (means[u] / C))
            grad_x = tl.where(done < valid, grad_x, 0).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + done * stride_yl + channels, grad_x, mask=both(mask, (done >= first) & (done < stop)))
        own = ()
        for u in tl.static_range(ROWS):
            own = own + (tl.where(start + u < stop, g_window[u + (W - 1)], 0),)
        grown = ()
        for w in tl.static_range(W):
            step = own[0] * h_window[w]
            for u in tl.static_range(1, ROWS):
                step += own[u] * h_window[u + w]
            grown = grown + (sums[w] + step,)
        sums = grown
        r_kept = ()
        h_kept = ()
        g_kept = ()
        for i in tl.static_range(W - 1):
            r_kept = r_kept + (rstds[ROWS + i],)
            h_kept = h_kept + (h_window[ROWS + i],)
            g_kept = g_kept + (g_window[ROWS + i],)
        rstds = r_kept
        h_window = h_kept
        g_window = g_kept

    partials_ptr += (b * runs + first // run) * W * stride_yl
    for w in tl.static_range(W):
        tl.store(partials_ptr + w * C + channels, sums[w], mask=mask)
