"""Launch parameters and launchers of the Triton kernels; the kernels themselves are imported at the first launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.launch import TRITON_TYPE, Choice, KernelBuild, choose_triton, multiprocessors, on_device

MAX_WIDTH = 8
MAX_WARPS = 16
NUM_STAGES = 1
"""The walk has its loads in flight by itself; Triton's software pipeline has nothing to add."""


@dataclass(frozen=True)
class Config:
    """How one kernel is cut into programs.

    Attributes:
        vector: channels a thread; 16 bytes of a row are one load instruction.
        block: most channels a program, a power of two.
        rows: positions in one step of the walk, all loaded before the first is used.
        run: most positions a program walks; fewer where the batch is small.
    """

    vector: int
    block: int
    rows: int
    run: int

    def block_c(self, channels: int) -> int:
        """Return the channels of one program."""
        return min(next_power_of_two(channels), self.block)

    def num_warps(self, channels: int) -> int:
        """Return the warps of one program."""
        return min(max(self.block_c(channels) // (32 * self.vector), 1), MAX_WARPS)

    def run_length(self, batch: int, length: int, channels: int, processors: int) -> int:
        """Return the positions a program walks: fewer than ``run`` where that leaves multiprocessors without work."""
        warps_a_run = batch * -(-channels // self.block_c(channels)) * self.num_warps(channels)
        run = self.run
        while run > SHORTEST_RUN and warps_a_run * -(-length // run) < WARPS_A_PROCESSOR * processors:
            run //= 2
        return run


FORWARD = {2: Config(vector=4, block=512, rows=8, run=32), 4: Config(vector=4, block=512, rows=4, run=64)}
BACKWARD = {2: Config(vector=4, block=1024, rows=4, run=256), 4: Config(vector=4, block=512, rows=4, run=256)}
"""By the bytes of a value. Two bytes: measured in bfloat16 on an H200, 2026-11-30, profiler's kernel times, beside a
copy at 4.23 TB/s. [8, 32768, 1024], [8, 2048, 1024], [8, 512, 1024]: forward 268, 20.2, 6.2 us (95%, 84%, 78% of the
copy's speed), backward 441, 35.6, 14.6 us (86% at the first). Four bytes: not measured."""

WARPS_A_PROCESSOR = 4
SHORTEST_RUN = 8
"""Small batches: runs are halved until each multiprocessor has this many warps, but not below this many positions."""

SUM_BLOCK_S, SUM_BLOCK_C, SUM_WARPS = 128, 16, 8
"""Programs and channels in one step of the sum over programs, and its warps."""


def configs() -> dict[str, tuple[Config, ...]]:
    """Return every configuration that can be picked, by direction."""
    return {"forward": tuple(FORWARD.values()), "backward": tuple(BACKWARD.values())}


def choose(device: torch.device, dtype: torch.dtype, width: int) -> Choice:
    """Return whether the Triton kernels run for ``x`` of ``dtype`` on ``device`` with ``width`` taps, and why."""
    choice = choose_triton(device, dtype)
    if choice.ok and width > MAX_WIDTH:
        return Choice(False, f"the kernel has {width} taps, and the Triton kernels keep at most {MAX_WIDTH}")
    return choice


def forward(x: Tensor, weight: Tensor, lengths: Tensor, activation: str, config: Config | None = None) -> Tensor:
    """Launch the forward kernel.

    Args:
        x: [B, L, C] of any strides; copied if neighbouring channels are not neighbours in memory.
        weight: [C, W], W at most ``MAX_WIDTH``.
        lengths: int32 [B].
        activation: ``"none"`` or ``"silu"``.
        config: None for the table's.
    """
    from zoo.kernels.causal_short_conv.triton_kernels import forward_kernel

    x = with_adjacent_channels(x)
    _, length, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    config = config or FORWARD[x.element_size()]
    run, runs, grid = split(config, x)
    with on_device(x):
        forward_kernel[grid](
            x,
            weight,
            lengths.contiguous(),
            y,
            length,
            run,
            runs,
            *x.stride()[:2],
            *weight.stride(),
            C=channels,
            W=weight.shape[1],
            SILU=activation == "silu",
            BLOCK_C=config.block_c(channels),
            ROWS=config.rows,
            num_warps=config.num_warps(channels),
            num_stages=NUM_STAGES,
        )
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, lengths: Tensor, activation: str, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel and the sum over its programs; same bits each time.

    Args as in ``forward``, with ``grad`` [B, L, C]. Returns grad_x [B, L, C] and grad_weight, strided as ``weight``.
    """
    from zoo.kernels.causal_short_conv.triton_kernels import backward_kernel

    x, grad = with_adjacent_channels(x), with_adjacent_channels(grad)
    batch, length, channels = x.shape
    width = weight.shape[1]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad_x.numel() == 0:
        return grad_x, torch.zeros_like(weight)
    config = config or BACKWARD[x.element_size()]
    run, runs, grid = split(config, x)
    partials = torch.empty(batch * runs, width, channels, dtype=torch.float32, device=x.device)
    with on_device(x):
        backward_kernel[grid](
            grad,
            x,
            weight,
            lengths.contiguous(),
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
            SILU=activation == "silu",
            BLOCK_C=config.block_c(channels),
            ROWS=config.rows,
            num_warps=config.num_warps(channels),
            num_stages=NUM_STAGES,
        )
    grad_weight, _ = sum_partials(partials, weight, None)
    return grad_x, grad_weight


def sum_partials(partials_SWC: Tensor, weight: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add the partial sums of all programs; see ``sum_partials_kernel``. The results are typed as the weights."""
    from zoo.kernels.partial_sums import sum_partials_kernel

    splits, width, channels = partials_SWC.shape
    grad_weight = torch.empty_like(weight)
    grad_norm_weight = None if norm_weight is None else torch.empty_like(norm_weight)
    with on_device(weight):
        sum_partials_kernel[(-(-channels // SUM_BLOCK_C),)](
            partials_SWC,
            weight,
            norm_weight,
            grad_weight,
            grad_norm_weight,
            splits,
            *weight.stride(),
            *grad_weight.stride(),
            C=channels,
            W=width,
            NORM=norm_weight is not None,
            BLOCK_S=SUM_BLOCK_S,
            BLOCK_C=SUM_BLOCK_C,
            num_warps=SUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return grad_weight, grad_norm_weight


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is ``n`` or more."""
    return 1 << max(n - 1, 0).bit_length()


def with_adjacent_channels(x: Tensor) -> Tensor:
    """Return ``x``, copied if its last stride is not 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def split(config: Config, x: Tensor) -> tuple[int, int, tuple[int]]:
    """Return the positions of a run, the runs of a row and the launch grid for ``x`` [B, L, C]."""
    batch, length, channels = x.shape
    run = config.run_length(batch, length, channels, multiprocessors(x.device))
    runs = -(-length // run)
    return run, runs, (batch * runs * -(-channels // config.block_c(channels)),)


def builds(capability: int) -> list[KernelBuild]:
    """Return the kernels of every configuration, for ahead-of-time compilation; the same for every capability."""
    from zoo.kernels.causal_short_conv import triton_kernels as kernels

    found = [sum_build(norm=False)]
    for dtype, channels, width, silu in (
        (torch.bfloat16, 1024, 4, False),
        (torch.bfloat16, 1024, 4, True),
        (torch.float32, 1024, 4, True),
        (torch.float16, 40, 8, True),
        (torch.float16, 1, 1, False),
    ):
        name = f"{TRITON_TYPE[dtype]} C={channels} W={width} silu={silu}"
        for direction, kernel, config in (
            ("forward", kernels.forward_kernel, FORWARD[dtype.itemsize]),
            ("backward", kernels.backward_kernel, BACKWARD[dtype.itemsize]),
        ):
            constants = {"C": channels, "W": width, "SILU": silu}
            found.append(walk_build(f"causal_short_conv {direction} {name}", kernel, config, dtype, dtype, constants))
    return found


def walk_build(
    name: str, kernel: Any, config: Config, dtype: torch.dtype, out_dtype: torch.dtype, constants: dict[str, int]
) -> KernelBuild:
    """Return the build of a walking kernel for contiguous tensors, with strides fixed so that loads are wide."""
    channels, width = constants["C"], constants["W"]
    x, y = f"*{TRITON_TYPE[dtype]}", f"*{TRITON_TYPE[out_dtype]}"
    types = {"x_ptr": x, "grad_x_ptr": x, "y_ptr": y, "grad_ptr": y, "lengths_ptr": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("weight_ptr", "norm_weight_ptr", "rstd_ptr", "partials_ptr"), "*fp32")
    types |= dict.fromkeys(("length", "run", "runs"), "i32")
    constants = {
        "stride_xb": 4096 * channels,
        "stride_gb": 4096 * channels,
        "stride_xl": channels,
        "stride_gl": channels,
        "stride_wc": width,
        "stride_ww": 1,
        "BLOCK_C": config.block_c(channels),
        "ROWS": config.rows,
        **constants,
    }
    names = kernel.arg_names
    return KernelBuild(
        name=name,
        kernel=kernel,
        signature={name: types[name] for name in names if name in types},
        constants={name: constants[name] for name in names if name in constants},
        num_warps=config.num_warps(channels),
        num_stages=NUM_STAGES,
    )


def sum_build(*, norm: bool, channels: int = 1024, width: int = 4) -> KernelBuild:
    """Return the build of ``sum_partials_kernel``."""
    from zoo.kernels.partial_sums import sum_partials_kernel

    pointers = ("partials_ptr", "weight_ptr", "norm_weight_ptr", "grad_weight_ptr", "grad_norm_weight_ptr")
    return KernelBuild(
        name=f"sum_partials C={channels} W={width} norm={norm}",
        kernel=sum_partials_kernel,
        signature={**dict.fromkeys(pointers, "*fp32"), "splits": "i32"},
        constants={
            "stride_wc": width,
            "stride_ww": 1,
            "stride_gc": width,
            "stride_gw": 1,
            "C": channels,
            "W": width,
            "NORM": norm,
            "BLOCK_S": SUM_BLOCK_S,
            "BLOCK_C": SUM_BLOCK_C,
        },
        num_warps=SUM_WARPS,
        num_stages=NUM_STAGES,
    )
