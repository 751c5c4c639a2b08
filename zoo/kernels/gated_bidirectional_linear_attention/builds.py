"""Every Triton kernel of the op with its types and parameters, for compilation ahead of time with no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.kernels.gated_bidirectional_linear_attention import parameters
from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.launch import TRITON_TYPE, KernelBuild

_SIZES = dict.fromkeys(("length", "heads", "splits", "chunk", "width", "used_width"), "i32")
_STRIDES = dict.fromkeys(("stride_b", "stride_l", "grad_stride_b", "grad_stride_l"), "i32")
_COLUMNS = dict.fromkeys(("key_column", "value_column", "gate_column", "query_column"), "i32")
_DESCRIPTORS = ("desc", "grad_desc", "out_desc")
_PARTS = ("part_kv", "part_z", "part_max", "part_gate", "part_state", "part_weight")
_POINTERS_TO_FLOAT = ("log_z", "shift", "grad_z", *_PARTS)


def builds(capability: int) -> list[KernelBuild]:
    """Return what the table gives for one compute capability.

    All dtypes and head widths with both switches on, and head width 64 in bfloat16 with both off: no kernel has two.
    The float16 forward, which has the parameters and the sizes of the bfloat16 one, at head width 64 alone.
    """
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in parameters.HEAD_DIMS:
            found += list(_builds_of(PackedLayout(16, dim), dtype, capability))
    found += list(_builds_of(PackedLayout(16, 64, key_gate=False, gated_norm=False), torch.bfloat16, capability))
    return found


def _builds_of(layout: PackedLayout, dtype: torch.dtype, capability: int) -> Iterator[KernelBuild]:
    from zoo.kernels.gated_bidirectional_linear_attention import triton_backward, triton_forward

    dim = layout.head_dim
    switches = f"{'+gate' if layout.key_gate else ''}{'+norm' if layout.gated_norm else ''}"
    forward, backward = parameters.forward_config, parameters.backward_config
    kernels: list[tuple[str, Any, parameters.TileConfig]] = [
        ("reduce", triton_forward.reduce_kernel, forward("reduce", dim, dtype, capability)),
        ("apply", triton_forward.apply_kernel, forward("apply", dim, dtype, capability)),
        (
            "queries",
            triton_backward.backward_queries_kernel,
            backward("queries", dim, dtype, capability),
        ),
        ("keys", triton_backward.backward_keys_kernel, backward("keys", dim, dtype, capability)),
    ]
    if dtype == torch.float16 and dim != 64:
        kernels = kernels[2:]
    if parameters.gradient_dtype(dtype, dim, capability) != dtype:
        kernels = [kernel for kernel in kernels if kernel[0] in ("reduce", "apply")]
    for name, kernel, config in kernels:
        constants = parameters.constants(name, layout, dtype, config)
        for tma in {False, config.tma}:
            for final in (False, True) if name == "reduce" else (None,):
                chosen = {
                    **constants,
                    "TMA": tma,
                    "OVERLAP": capability >= 90,
                    **({} if final is None else {"FINAL": final}),
                }
                marks = f"{' tma' if tma else ''}{' final' if final else ''}"
                yield KernelBuild(
                    f"gbla {name} {TRITON_TYPE[dtype]} D{dim}{switches}{marks}",
                    kernel,
                    _signature(kernel, dtype, config, dim, tma),
                    chosen,
                    config.num_warps,
                    config.num_stages,
                )
    for name, kernel in (
        ("combine", triton_forward.combine_kernel),
        ("backward combine", triton_backward.backward_combine_kernel),
    ):
        constants = parameters.combine_constants(dim) | {"OVERLAP": capability >= 90}
        if name == "backward combine":
            constants["DOT_PRECISION"] = "tf32" if dtype == torch.float16 else "ieee"
        yield KernelBuild(
            f"gbla {name} {TRITON_TYPE[dtype]} D{dim}",
            kernel,
            _signature(kernel, dtype, None, dim, False),
            constants,
            parameters.COMBINE_WARPS,
            1,
        )


def _signature(
    kernel: Any, dtype: torch.dtype, config: parameters.TileConfig | None, dim: int, tma: bool
) -> dict[str, str]:
    io = TRITON_TYPE[dtype]
    types = {**_SIZES, **_STRIDES, **_COLUMNS, "lengths": "*i32", "eps": "fp32", "norm_weight": "*fp32"}
    types |= dict.fromkeys(_POINTERS_TO_FLOAT, "*fp32")
    types |= dict.fromkeys((*_DESCRIPTORS, "packed", "grad", "state", "out", "grad_packed"), f"*{io}")
    types["grad_state"] = f"*{TRITON_TYPE[parameters.gradient_dot_dtype(dtype)]}"
    if tma and config is not None:
        types |= dict.fromkeys(_DESCRIPTORS, f"tensordesc<{io}[{config.block_l}, {dim}]>")
    return {name: types[name] for name in kernel.arg_names if name in types}
