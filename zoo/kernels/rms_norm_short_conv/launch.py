"""Launch parameters and launchers of the Triton kernels; the kernels themselves are imported at the first launch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.kernels.causal_short_conv.launch import (
    MAX_WIDTH,
    NUM_STAGES,
    Config,
    split,
    sum_build,
    sum_partials,
    walk_build,
    with_adjacent_channels,
)
from zoo.kernels.launch import TRITON_DTYPES, TRITON_TYPE, Choice, KernelBuild, choose_triton, on_device

MAX_CHANNELS = 2048
"""One program holds a whole position."""

FORWARD = {
    2: Config(vector=8, block=MAX_CHANNELS, rows=4, run=128),
    4: Config(vector=4, block=MAX_CHANNELS, rows=8, run=128),
}
BACKWARD = {
    2: Config(vector=8, block=MAX_CHANNELS, rows=4, run=256),
    4: Config(vector=8, block=MAX_CHANNELS, rows=4, run=256),
}
"""By the bytes of a value of x. ``rows`` is a multiple of four: that many share one reduction.

Measured on an H200, 2026-11-30, profiler's kernel times, in percent of a copy's 4.23 TB/s; output bfloat16.
At [8, 32768, 1024] from bfloat16: forward 335 us (76%), backward 615 us (62%). From float32: forward 424 us (90%),
backward 848 us (75%); the forward takes 32.3 us at L 2048 and 11.7 us at L 512."""


def configs() -> dict[str, tuple[Config, ...]]:
    """Return every configuration that can be picked, by direction."""
    return {"forward": tuple(FORWARD.values()), "backward": tuple(BACKWARD.values())}


def choose(device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, channels: int, width: int) -> Choice:
    """Return whether the Triton kernels run for these dtypes and sizes, and why."""
    choice = choose_triton(device, dtype)
    if not choice.ok:
        return choice
    if out_dtype not in TRITON_DTYPES:
        return Choice(False, f"out_dtype {out_dtype} has no Triton kernel; float16, bfloat16 and float32 have")
    if width > MAX_WIDTH:
        return Choice(False, f"the kernel has {width} taps, and the Triton kernels keep at most {MAX_WIDTH}")
    if channels > MAX_CHANNELS:
        return Choice(False, f"x has {channels} channels, and a Triton program holds at most {MAX_CHANNELS}")
    return choice


def forward(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    lengths: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        x: [B, L, C] of any strides, C at most ``MAX_CHANNELS``.
        norm_weight: [C].
        weight: [C, W], W at most ``MAX_WIDTH``.
        lengths: int32 [B].
        eps: of the norm.
        out_dtype: of the output.
        config: None for the table's.

    Returns:
        y [B, L, C] and rstd [B, L] float32, the factor of each position's norm.
    """
    from zoo.kernels.rms_norm_short_conv.triton_kernels import forward_kernel

    x = with_adjacent_channels(x)
    batch, length, channels = x.shape
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(batch, length, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y, rstd.zero_()
    config = config or FORWARD[x.element_size()]
    run, runs, grid = split(config, x)
    with on_device(x):
        forward_kernel[grid](
            x,
            norm_weight.contiguous(),
            weight,
            lengths.contiguous(),
            y,
            rstd,
            eps,
            length,
            run,
            runs,
            *x.stride()[:2],
            *weight.stride(),
            C=channels,
            W=weight.shape[1],
            BLOCK_C=config.block_c(channels),
            ROWS=config.rows,
            num_warps=config.num_warps(channels),
            num_stages=NUM_STAGES,
        )
    return y, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    lengths: Tensor,
    rstd: Tensor,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernel and the sum over its programs; same bits each time.

    Args as in ``forward``, with ``grad`` [B, L, C] and the ``rstd`` [B, L] that ``forward`` returned.
    Returns grad_x [B, L, C], grad_norm_weight [C] and grad_weight, strided as ``weight``.
    """
    from zoo.kernels.rms_norm_short_conv.triton_kernels import backward_kernel

    x, grad = with_adjacent_channels(x), with_adjacent_channels(grad)
    batch, length, channels = x.shape
    width = weight.shape[1]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad_x.numel() == 0:
        return grad_x, torch.zeros_like(norm_weight), torch.zeros_like(weight)
    config = config or BACKWARD[x.element_size()]
    run, runs, grid = split(config, x)
    partials = torch.empty(batch * runs, width, channels, dtype=torch.float32, device=x.device)
    norm_weight = norm_weight.contiguous()
    with on_device(x):
        backward_kernel[grid](
            grad,
            x,
            norm_weight,
            weight,
            lengths.contiguous(),
            rstd,
            grad_x,
            partials,
            length,
            run,
            runs,
            *grad.stride()[:2],
            *x.stride()[:2],
            *weight.stride(),
            C=channels,
            W=width,
            BLOCK_C=config.block_c(channels),
            ROWS=config.rows,
            num_warps=config.num_warps(channels),
            num_stages=NUM_STAGES,
        )
    grad_weight, grad_norm_weight = sum_partials(partials, weight, norm_weight)
    assert grad_norm_weight is not None
    return grad_x, grad_norm_weight, grad_weight


def builds(capability: int) -> list[KernelBuild]:
    """Return the kernels of every configuration, for ahead-of-time compilation; the same for every capability."""
    from zoo.kernels.rms_norm_short_conv import triton_kernels as kernels

    found = [sum_build(norm=True)]
    for dtype, out_dtype, channels, width in (
        (torch.bfloat16, torch.bfloat16, 1024, 4),
        (torch.float32, torch.bfloat16, 1024, 4),
        (torch.float32, torch.float32, 2048, 4),
        (torch.float16, torch.float16, 40, 8),
        (torch.float32, torch.float16, 1, 1),
    ):
        name = f"{TRITON_TYPE[dtype]} to {TRITON_TYPE[out_dtype]} C={channels} W={width}"
        for direction, kernel, config in (
            ("forward", kernels.forward_kernel, FORWARD[dtype.itemsize]),
            ("backward", kernels.backward_kernel, BACKWARD[dtype.itemsize]),
        ):
            constants = {"C": channels, "W": width}
            found.append(
                walk_build(f"rms_norm_short_conv {direction} {name}", kernel, config, dtype, out_dtype, constants)
            )
    return found
