"""Every Triton kernel of the op with its types and parameters, for compilation ahead of time with no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.kernels.gated_delta_rule import parameters
from zoo.kernels.gated_delta_rule.walks import shared_layout
from zoo.kernels.launch import TRITON_TYPE, KernelBuild

_WIDTHS = ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (64, 128))
_FLOAT32 = (
    "log_decay", "gates", "norms", "bounds", "initial", "final", "grad_final", "grad_initial", "dlog_decay", "dbeta",
    "sums", "transitions", "first",
)  # fmt: skip


_SIZES = ("batch", "length", "heads", "chunks", "segments", "segment_chunks")
_WRITTEN_BY = {"o_desc": ("MODE", "output"), "dv_desc": ("OUTPUT", True)}
"""Descriptors that only some kernels have."""


def builds(capability: int) -> list[KernelBuild]:
    """Return what the table gives for one compute capability: equal widths, and one pair of unequal ones."""
    return [
        build
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for key_dim, value_dim in (_WIDTHS if dtype == torch.bfloat16 else _WIDTHS[1:5])
        if parameters.has_kernels(key_dim, dtype, capability)
        for build in _builds_of(key_dim, value_dim, dtype, capability)
    ]


def _builds_of(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> Iterator[KernelBuild]:
    from zoo.kernels.gated_delta_rule import triton_backward, triton_solve, triton_step, triton_walk

    where = f"{TRITON_TYPE[dtype]} K{key_dim} V{value_dim}"
    solve = parameters.solve_config(key_dim, dtype, capability)
    precision = parameters.dot_precision(dtype)
    if key_dim == value_dim:
        constants = {"K": key_dim, "NORMALIZE": True, "PRECISION": precision}
        yield _build(f"gated_delta solve {where}", triton_solve.solve_kernel, dtype, constants, solve.num_warps, 1)
        registers = parameters.solve_registers(key_dim, dtype, capability)
        if registers is not None:
            yield _solve_in_registers(key_dim, dtype, registers)
    walk = parameters.walk_config(key_dim, value_dim, dtype, capability)
    cut = ("sum", "transition") if key_dim <= parameters.WIDEST_TRANSITION else ()
    for mode in ("output", "states", *cut):
        for tma in {False, walk.tma}:
            values = key_dim if mode == "transition" else value_dim
            constants = {
                "K": key_dim, "V": values, "BLOCK_V": min(walk.block_v, values), "NORMALIZE": True, "INITIAL": True,
                "TMA": tma, "MODE": mode, "PRECISION": precision, "STAGES": walk.num_stages,
            }  # fmt: skip
            name = f"gated_delta walk {mode} {where}{' tma' if tma else ''}"
            yield _build(name, triton_walk.walk_kernel, dtype, constants, walk.num_warps, walk.num_stages)
    if key_dim == value_dim == 64:
        constants = {"LIMIT": parameters.forgotten_bits(dtype)}
        yield _build(f"gated_delta spans {TRITON_TYPE[dtype]}", triton_walk.spans_kernel, dtype, constants, 1, 1)
    for back in (False, True) if cut else ():
        constants = {
            "K": key_dim, "V": value_dim, "BLOCK_V": min(value_dim, 16), "INITIAL": True, "BACK": back,
            "PRECISION": parameters.dot_precision(torch.float32),
        }  # fmt: skip
        yield _build(
            f"gated_delta scan{' back' if back else ''} {where}", triton_walk.scan_kernel, dtype, constants, 4, 1
        )
    step = parameters.step_config(key_dim, value_dim)
    constants = {"K": key_dim, "V": value_dim, "BLOCK_V": step.block_v, "NORMALIZE": True, "INITIAL": True}
    yield _build(f"gated_delta step {where}", triton_step.step_kernel, dtype, constants, step.num_warps, 1)
    if parameters.is_specialized(key_dim, value_dim, dtype, capability):
        yield from _specialized(key_dim, value_dim, dtype)
    walk = parameters.walk_back_config(key_dim, value_dim, dtype, capability)
    for output in (True, False) if cut else (True,):
        for tma in {False, walk.tma}:
            constants = {
                "K": key_dim, "V": value_dim, "BLOCK_V": walk.block_v, "NORMALIZE": True, "FINAL": True, "TMA": tma,
                "OUTPUT": output, "PRECISION": precision, "STAGES": walk.num_stages,
            }  # fmt: skip
            name = f"gated_delta walk back {'output' if output else 'sum'} {where}{' tma' if tma else ''}"
            yield _build(name, triton_backward.walk_back_kernel, dtype, constants, walk.num_warps, walk.num_stages)
    if not parameters.has_gradients(key_dim, dtype):
        return
    gradients = parameters.gradients_config(key_dim, value_dim, dtype, capability)
    constants = {
        "K": key_dim, "K_PADDED": max(key_dim, parameters.FEWEST_COLUMNS), "V": value_dim,
        "BLOCK_V": gradients.block_v, "NORMALIZE": True, "PRECISION": precision,
    }  # fmt: skip
    name = f"gated_delta gradients {where}"
    ring = parameters.gradients_ring(key_dim, value_dim, dtype, capability)
    if ring is not None:
        yield _gradients_ring_build(f"{name} specialized", dtype, key_dim, value_dim, ring)
    yield _build(name, triton_backward.gradients_kernel, dtype, constants, gradients.num_warps, 1)


def _solve_in_registers(key_dim: int, dtype: torch.dtype, registers: int) -> KernelBuild:
    from zoo.kernels.gated_delta_rule import gluon_solve

    name = f"gated_delta solve {TRITON_TYPE[dtype]} K{key_dim} V{key_dim} specialized"
    constants = {"K": key_dim, "NORMALIZE": True}
    return _build(name, gluon_solve.specialized_solve_kernel, dtype, constants, 1, 1, registers)


def _specialized(key_dim: int, value_dim: int, dtype: torch.dtype) -> Iterator[KernelBuild]:
    from zoo.kernels.gated_delta_rule import gluon_backward, gluon_walk

    where = f"{TRITON_TYPE[dtype]} K{key_dim} V{value_dim} specialized"
    sizes = {"K": key_dim, "V": value_dim, "BLOCK_V": parameters.CHUNK, "NORMALIZE": True}
    for mode in ("output", "states", "sum", "transition"):
        constants = {**sizes, "V": key_dim if mode == "transition" else value_dim, "INITIAL": True, "MODE": mode}
        ring = parameters.walk_ring(key_dim, mode)
        constants["GROUPS"] = ring.num_outputs
        kernel = gluon_walk.specialized_walk_kernel
        yield _ring_build(f"gated_delta walk {mode} {where}", kernel, dtype, constants, ring)
    ring = parameters.walk_back_ring(key_dim)
    for output in (True, False):
        name = f"gated_delta walk back {'output' if output else 'sum'} {where}"
        constants = {**sizes, "FINAL": True, "OUTPUT": output}
        yield _ring_build(name, gluon_backward.specialized_walk_back_kernel, dtype, constants, ring)


def _gradients_ring_build(
    name: str, dtype: torch.dtype, key_dim: int, value_dim: int, ring: parameters.GradientsRing
) -> KernelBuild:
    from zoo.kernels.gated_delta_rule.gluon_gradients import specialized_gradients_kernel

    constants = {
        "K": key_dim, "V": value_dim, "BLOCK_V": min(value_dim, parameters.CHUNK), "NORMALIZE": True,
        "CHUNKS": ring.num_chunks, "BLOCKS": ring.num_blocks, "SHARED": ring.shared,
        "VALUES_REGISTERS": ring.values_registers, "LOADER_REGISTERS": ring.loader_registers,
    }  # fmt: skip
    return _build(name, specialized_gradients_kernel, dtype, constants, 4, 1, 0)


def _ring_build(
    name: str, kernel: Any, dtype: torch.dtype, constants: dict[str, Any], ring: parameters.RingConfig
) -> KernelBuild:
    constants = {**constants, "STAGES": ring.num_stages, "SLOTS": ring.num_slots}
    return _build(name, kernel, dtype, constants, 4, 1, ring.max_registers or 0)


def _build(
    name: str,
    kernel: Any,
    dtype: torch.dtype,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    registers: int = parameters.MOST_REGISTERS,
) -> KernelBuild:
    io = TRITON_TYPE[dtype]
    states = ("states_desc", "grad_states_desc", "s_desc", "g_desc")
    widths = dict.fromkeys(("q_desc", "k_desc", "dq_desc", "dk_desc", *states), "K")
    widths |= dict.fromkeys(("v_desc", "o_desc", "grad_o_desc", "do_desc", "dv_desc"), "BLOCK_V")
    tma = constants.get("TMA", True)
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument.startswith("stride") or argument in _SIZES:
            signature[argument] = "i32"
        elif argument == "scale":
            signature[argument] = "fp32"
        elif argument in ("lengths", "spans"):
            signature[argument] = "*i32"
        elif argument.endswith("_desc") and tma and ("TMA" not in constants or _has(argument, constants)):
            width = constants[widths[argument]] if argument in widths else parameters.CHUNK
            rows = constants["BLOCK_V"] if argument in states else parameters.CHUNK
            layout = "" if "TMA" in constants else f",{shared_layout(rows, width, dtype)!r}"
            signature[argument] = f"tensordesc<{io}[{rows}, {width}]{layout}>"
        else:
            signature[argument] = "*fp32" if argument in _FLOAT32 else f"*{io}"
    divisible = tuple(
        name for name in signature if name.startswith("stride_") and name[-1] in "bth" and name[7] in "qkv"
    )
    return KernelBuild(name, kernel, signature, constants, warps, stages, divisible, registers)


def _has(descriptor: str, constants: dict[str, Any]) -> bool:
    name, value = _WRITTEN_BY.get(descriptor, ("TMA", True))
    return bool(constants[name] == value)
