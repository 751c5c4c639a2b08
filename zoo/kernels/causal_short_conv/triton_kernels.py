# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton compiles tuple sums, not starred tuples)
"""The short causal convolution in Triton: one pass over x forward, one pass over x and grad backward.

A program owns one row of the batch, one block of channels and a run of consecutive positions. It walks the run ``ROWS``
positions at a time: that many independent wide loads are in flight, and the W - 1 positions before them stay in
registers, so every position is read once (plus W - 1 at the edge of a run). Nothing is read at padded positions.

Offsets are 64 bits wide; sums are float32 whatever the dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("length", "run", "runs")
"""Arguments that change from batch to batch: no kernel is compiled anew for them."""


@triton.jit
def place(length, run, runs, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return what the program owns: row b, positions [first, stop), channels and their mask."""
    program = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    channels = program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    program = program // blocks
    first = program % runs * run
    return program // runs, first, tl.minimum(first + run, length), channels, channels < C


@triton.jit
def valid_length(lengths_ptr, b, length):
    """Return the row's length clamped to [0, L]."""
    return tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), length)


@triton.jit
def load_taps(weight_ptr, channels, mask, stride_c, stride_w, W: tl.constexpr):
    """Return the W columns of the weight [C, W], float32."""
    taps = ()
    for w in tl.static_range(W):
        tap = tl.load(weight_ptr + channels * stride_c + w * stride_w, mask=mask, other=0)
        taps = taps + (tap.to(tl.float32),)
    return taps


@triton.jit
def both(mask, condition):
    """Return a mask restricted by a scalar condition; the comparison is for the interpreter, which widens booleans."""
    return (mask & condition) != 0


@triton.jit
def load_row(row_ptr, channels, mask, condition):
    """Return the channels of one position in float32, 0 where the mask or the condition is false."""
    return tl.load(row_ptr + channels, mask=both(mask, condition), other=0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr,
    weight_ptr,
    lengths_ptr,
    y_ptr,
    length,
    run,
    runs,
    stride_xb,
    stride_xl,
    stride_wc,
    stride_ww,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y[t] = f(sum_w weight[w] * x[t - (W - 1) + w]) for one run; y [B, L, C] is contiguous."""
    b, first, stop, channels, mask = place(length, run, runs, C, BLOCK_C)
    valid = valid_length(lengths_ptr, b, length)
    last = tl.minimum(valid, stop)
    stride_xl = tl.cast(stride_xl, tl.int64)
    stride_yl = tl.full((), C, tl.int64)
    x_ptr += b * tl.cast(stride_xb, tl.int64)
    y_ptr += b * length * stride_yl
    taps = load_taps(weight_ptr, channels, mask, stride_wc, stride_ww, W)

    window = ()
    for i in tl.static_range(W - 1):
        t = first - (W - 1) + i
        window = window + (load_row(x_ptr + t * stride_xl, channels, mask, (t >= 0) & (t < valid)),)
    for start in range(first, stop, ROWS):
        for u in tl.static_range(ROWS):
            t = start + u
            window = window + (load_row(x_ptr + t * stride_xl, channels, mask, t < last),)
        for u in tl.static_range(ROWS):
            t = start + u
            z = taps[0] * window[u]
            for w in tl.static_range(1, W):
                z += taps[w] * window[u + w]
            if SILU:
                z = z / (1 + tl.exp(-z))
            y = tl.where(t < valid, z, 0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + t * stride_yl + channels, y, mask=both(mask, t < stop))
        kept = ()
        for i in tl.static_range(W - 1):
            kept = kept + (window[ROWS + i],)
        window = kept


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    lengths_ptr,
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
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Both gradients of one run: grad_x [B, L, C] and its share of grad_weight, partials [B * runs, W, C] float32.

    With g[t] the gradient of z[t]: grad_x[t] = sum_w weight[w] * g[t + (W - 1) - w] and
    grad_weight[w] = sum_t g[t] * x[t - (W - 1) + w]. The walk goes W - 1 positions past the run, and position t
    completes grad_x[t - (W - 1)].
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
    taps = load_taps(weight_ptr, channels, mask, stride_wc, stride_ww, W)

    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((BLOCK_C,), tl.float32),)
    x_window = ()
    g_window = ()
    for i in tl.static_range(W - 1):
        t = first - (W - 1) + i
        x_window = x_window + (load_row(x_ptr + t * stride_xl, channels, mask, (t >= 0) & (t < valid)),)
        g_window = g_window + (tl.zeros((BLOCK_C,), tl.float32),)
    for start in range(first, stop + (W - 1), ROWS):
        for u in tl.static_range(ROWS):
            t = start + u
            x_window = x_window + (load_row(x_ptr + t * stride_xl, channels, mask, t < last),)
        for u in tl.static_range(ROWS):
            t = start + u
            g = load_row(grad_ptr + t * stride_gl, channels, mask, t < last)
            if SILU:
                z = taps[0] * x_window[u]
                for w in tl.static_range(1, W):
                    z += taps[w] * x_window[u + w]
                sigmoid = 1 / (1 + tl.exp(-z))
                g *= sigmoid * (1 + z * (1 - sigmoid))
            g_window = g_window + (g,)
        for u in tl.static_range(ROWS):
            t = start + u
            grad_x = taps[0] * g_window[u + (W - 1)]
            for w in tl.static_range(1, W):
                grad_x += taps[w] * g_window[u + (W - 1) - w]
            done = t - (W - 1)
            grad_x = tl.where(done < valid, grad_x, 0).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + done * stride_yl + channels, grad_x, mask=both(mask, (done >= first) & (done < stop)))
        own = ()
        for u in tl.static_range(ROWS):
            own = own + (tl.where(start + u < stop, g_window[u + (W - 1)], 0),)
        grown = ()
        for w in tl.static_range(W):
            step = own[0] * x_window[w]
            for u in tl.static_range(1, ROWS):
                step += own[u] * x_window[u + w]
            grown = grown + (sums[w] + step,)
        sums = grown
        x_kept = ()
        g_kept = ()
        for i in tl.static_range(W - 1):
            x_kept = x_kept + (x_window[ROWS + i],)
            g_kept = g_kept + (g_window[ROWS + i],)
        x_window = x_kept
        g_window = g_kept

    partials_ptr += (b * runs + first // run) * W * stride_yl
    for w in tl.static_range(W):
        tl.store(partials_ptr + w * C + channels, sums[w], mask=mask)
