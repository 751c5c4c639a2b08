# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton compiles tuple sums, not starred tuples)
"""The second half of a weight gradient: partial sums of many programs, added in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("splits",))
def sum_partials_kernel(
    partials_ptr,
    weight_ptr,
    norm_weight_ptr,
    grad_weight_ptr,
    grad_norm_weight_ptr,
    splits,
    stride_wc,
    stride_ww,
    stride_gc,
    stride_gw,
    C: tl.constexpr,
    W: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_weight[c, w] = sum_s partials[s, w, c], of partials [splits, W, C] float32.

    With NORM, partials are of the normalised x without its weight n, so
    grad_weight[c, w] = n[c] * sum_s partials[s, w, c] and grad_n[c] = sum_w weight[c, w] * sum_s partials[s, w, c].
    """
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    rows = tl.arange(0, BLOCK_S)
    row_size = tl.full((), W * C, tl.int64)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((BLOCK_S, BLOCK_C), tl.float32),)
    for start in range(0, splits, BLOCK_S):
        s = start + rows
        tile_ptr = partials_ptr + s[:, None] * row_size + channels[None, :]
        grown = ()
        for w in tl.static_range(W):
            tile = tl.load(tile_ptr + w * C, mask=(s < splits)[:, None] & mask[None, :], other=0)
            grown = grown + (sums[w] + tile,)
        sums = grown
    scale = tl.full((BLOCK_C,), 1, tl.float32)
    if NORM:
        scale = tl.load(norm_weight_ptr + channels, mask=mask, other=0).to(tl.float32)
    grad_norm_weight = tl.zeros((BLOCK_C,), tl.float32)
    for w in tl.static_range(W):
        total = tl.sum(sums[w], axis=0)
        grad = (total * scale).to(grad_weight_ptr.dtype.element_ty)
        tl.store(grad_weight_ptr + channels * stride_gc + w * stride_gw, grad, mask=mask)
        if NORM:
            tap = tl.load(weight_ptr + channels * stride_wc + w * stride_ww, mask=mask, other=0)
            grad_norm_weight += total * tap.to(tl.float32)
    if NORM:
        grad_norm_weight = grad_norm_weight.to(grad_norm_weight_ptr.dtype.element_ty)
        tl.store(grad_norm_weight_ptr + channels, grad_norm_weight, mask=mask)
