"""Every Triton kernel of the op with its types and parameters, for compilation ahead of time with no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.kernels.gated_delta_rule import parameters
from zoo.kernels.launch import TRITON_TYPE, KernelBuild

_WIDTHS = ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (64, 128))
_FLOAT32 = (
    "log_decay", "gates", "norms", "initial", "final", "grad_final", "grad_initial", "dlog_decay", "dbeta",
)  # fmt: skip


def builds(capability: int) -> list[KernelBuild]:
    """Return what the table gives for one compute capability: equal widths, and one pair of unequal ones."""
    return [
        build
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for key_dim, value_dim in (_WIDTHS if dtype == torch.bfloat16 else _WIDTHS[1:4])
        for build in _builds_of(key_dim, value_dim, dtype, capability)
    ]


def _builds_of(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> Iterator[KernelBuild]:
    from zoo.kernels.gated_delta_rule import triton_backward, triton_solve, triton_walk

    where = f"{TRITON_TYPE[dtype]} K{key_dim} V{value_dim}"
    solve = parameters.solve_config(key_dim, dtype, capability)
    precisions = {"DOT_PRECISION": parameters.dot_precision(dtype), "PRECISION": parameters.solve_precision(dtype)}
    if key_dim == value_dim:
        constants = {"K": key_dim, "NORMALIZE": True, **precisions}
        yield _build(f"gated_delta solve {where}", triton_solve.solve_kernel, dtype, constants, solve.num_warps, 1)
    walk = parameters.walk_config(key_dim, value_dim, dtype, capability)
    for output in (True, False):
        for tma in {False, walk.tma}:
            constants = {
                "K": key_dim, "V": value_dim, "BLOCK_V": walk.block_v, "NORMALIZE": True, "INITIAL": True, "TMA": tma,
                "OUTPUT": output, "PRECISION": parameters.dot_precision(dtype), "STAGES": walk.num_stages,
            }  # fmt: skip
            name = f"gated_delta {'walk' if output else 'states'} {where}{' tma' if tma else ''}"
            yield _build(name, triton_walk.walk_kernel, dtype, constants, walk.num_warps, walk.num_stages)
    back = parameters.walk_back_config(key_dim, value_dim, dtype, capability)
    for tma in {False, back.tma}:
        constants = {
            "K": key_dim, "V": value_dim, "BLOCK_V": back.block_v, "NORMALIZE": True, "FINAL": True, "TMA": tma,
            "PRECISION": parameters.dot_precision(dtype), "STAGES": back.num_stages,
        }  # fmt: skip
        name = f"gated_delta walk back {where}{' tma' if tma else ''}"
        yield _build(name, triton_backward.walk_back_kernel, dtype, constants, back.num_warps, back.num_stages)
    gradients = parameters.gradients_config(key_dim, value_dim, dtype, capability)
    constants = {
        "K": key_dim, "K_PADDED": max(key_dim, parameters.FEWEST_COLUMNS), "V": value_dim,
        "BLOCK_V": gradients.block_v, "NORMALIZE": True, "PRECISION": parameters.dot_precision(dtype),
    }  # fmt: skip
    name = f"gated_delta gradients {where}"
    yield _build(name, triton_backward.gradients_kernel, dtype, constants, gradients.num_warps, 1)


def _build(
    name: str, kernel: Any, dtype: torch.dtype, constants: dict[str, Any], warps: int, stages: int
) -> KernelBuild:
    io = TRITON_TYPE[dtype]
    widths = {"q_desc": "K", "k_desc": "K"} | dict.fromkeys(("v_desc", "o_desc", "grad_o_desc", "dv_desc"), "BLOCK_V")
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument.startswith("stride") or argument in ("length", "heads", "chunks"):
            signature[argument] = "i32"
        elif argument == "scale":
            signature[argument] = "fp32"
        elif argument == "lengths":
            signature[argument] = "*i32"
        elif argument.endswith("_desc") and constants["TMA"] and (argument != "o_desc" or constants["OUTPUT"]):
            width = constants[widths[argument]] if argument in widths else parameters.CHUNK
            signature[argument] = f"tensordesc<{io}[{parameters.CHUNK}, {width}]>"
        else:
            signature[argument] = "*fp32" if argument in _FLOAT32 else f"*{io}"
    divisible = tuple(
        name for name in signature if name.startswith("stride_") and name[-1] in "bth" and name[7] in "qkv"
    )
    return KernelBuild(name, kernel, signature, constants, warps, stages, divisible)
