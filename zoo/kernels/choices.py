"""Which implementation of each op a device gets, why, and with which launch parameters (``zoo inspect kernels``)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from zoo.errors import ConfigError
from zoo.kernels import launch
from zoo.kernels.causal_short_conv import launch as conv
from zoo.kernels.gated_bidirectional_linear_attention import launch as attention
from zoo.kernels.gated_delta_rule import launch as delta_rule
from zoo.kernels.gated_delta_rule import parameters as delta_rule_parameters
from zoo.kernels.launch import Choice
from zoo.kernels.rms_norm_short_conv import launch as norm_conv

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class OpSizes:
    """What the choice depends on: channels C of the layer, taps W of the convolution, width D of a head."""

    channels: int
    conv_width: int
    head_dim: int


@dataclass(frozen=True)
class Launch:
    """One kernel's parameters.

    Attributes:
        kernel: its part in the op.
        positions: positions a tile.
        channels: channels a tile; of the walks, the gradients and the steps of the gated delta rule: values.
        warps: warps a program.
        stages: tiles in flight.
        tma: tiles move through the tensor memory accelerator, where the tensor's rows start on 16 bytes.
        resident: programs at a time on a multiprocessor, from which a row's split follows; None where nothing does.
    """

    kernel: str
    positions: int
    channels: int
    warps: int
    stages: int
    tma: bool = False
    resident: int | None = None


@dataclass(frozen=True)
class OpChoice:
    """One op in one dtype: ``triton`` with its launches or ``reference``, and a sentence that says why."""

    op: str
    dtype: str
    implementation: str
    reason: str
    launches: tuple[Launch, ...] = ()


def choices(sizes: OpSizes, *, device: str | None = None, capability: int | None = None) -> tuple[OpChoice, ...]:
    """Return what each op takes in each dtype; nothing is compiled or launched.

    Args:
        sizes: of the layers.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...; default: the GPU if there is one, else the CPU.
        capability: answer for a GPU of this compute capability instead, 90 for 9.0; it need not be here.

    Raises:
        ConfigError: no such device here, or not a compute capability.
    """
    chosen = _device(device, capability)
    with nullcontext() if capability is None else launch.assumed_capability(capability):
        return tuple(
            choice
            for name, dtype in DTYPES.items()
            for choice in (
                _convolution(sizes, chosen, name, dtype),
                _norm_and_convolution(sizes, chosen, name, dtype),
                _attention(sizes, chosen, name, dtype),
                _delta_rule(sizes, chosen, name, dtype),
            )
        )


def _device(name: str | None, capability: int | None) -> torch.device:
    if capability is not None:
        if not 30 <= capability < 200:
            raise ConfigError(f"capability is {capability}; write it as one number, 90 for 9.0")
        if name is not None and not name.startswith("cuda"):
            raise ConfigError(f"a compute capability is a GPU's, but device is {name!r}; give one of the two")
        return torch.device("cuda")
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; use cpu, cuda or cuda:NUMBER") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {name} here; --capability 90 answers for such a GPU without one")
    return device


def _convolution(sizes: OpSizes, device: torch.device, name: str, dtype: torch.dtype) -> OpChoice:
    choice = conv.choose(device, dtype, sizes.conv_width)
    launches = _walks(conv.FORWARD[dtype.itemsize], conv.BACKWARD[dtype.itemsize], sizes.channels)
    return _op("causal_short_conv", name, choice, launches)


def _norm_and_convolution(sizes: OpSizes, device: torch.device, name: str, dtype: torch.dtype) -> OpChoice:
    choice = norm_conv.choose(device, dtype, dtype, sizes.channels, sizes.conv_width)
    launches = _walks(norm_conv.FORWARD[dtype.itemsize], norm_conv.BACKWARD[dtype.itemsize], sizes.channels)
    return _op("rms_norm_short_conv", name, choice, launches)


def _walks(forward: conv.Config, backward: conv.Config, channels: int) -> tuple[Launch, ...]:
    return tuple(
        Launch(kernel, config.rows, config.block_c(channels), config.num_warps(channels), conv.NUM_STAGES)
        for kernel, config in (("forward", forward), ("backward", backward))
    )


def _attention(sizes: OpSizes, device: torch.device, name: str, dtype: torch.dtype) -> OpChoice:
    dim = sizes.head_dim
    choice = attention.choose_for(device, dtype, dim)
    launches = []
    if choice.ok:
        found = launch.capability(device)
        gradients = attention.gradient_dtype(dtype, dim, found)
        configs = {kernel: attention.forward_config(kernel, dim, dtype, found) for kernel in ("reduce", "apply")}
        configs |= {kernel: attention.backward_config(kernel, dim, gradients, found) for kernel in ("queries", "keys")}
        for kernel, config in configs.items():
            shape = (config.block_l, dim, config.num_warps, config.num_stages)
            launches.append(Launch(kernel, *shape, tma=config.tma, resident=config.resident))
    return _op("gated_bidirectional_linear_attention", name, choice, tuple(launches))


def _delta_rule(sizes: OpSizes, device: torch.device, name: str, dtype: torch.dtype) -> OpChoice:
    dim = sizes.head_dim
    choice = delta_rule.choose_for(device, dtype, dim, dim)
    launches: list[Launch] = []
    if choice.ok:
        launches = _delta_rule_launches(dim, dtype, launch.capability(device))
    return _op("gated_delta_rule", name, choice, tuple(launches))


def _delta_rule_launches(dim: int, dtype: torch.dtype, capability: int) -> list[Launch]:
    table = delta_rule_parameters
    registers = table.solve_registers(dim, dtype, capability)
    solve = table.SolveConfig(1) if registers is not None else table.solve_config(dim, dtype, capability)
    specialized = table.is_specialized(dim, dim, dtype, capability)
    resident = table.resident_walks(specialized=specialized)
    if specialized:
        forward, back = table.walk_ring(dim, "output").num_stages, table.walk_back_ring(dim).num_stages
        walks = [
            Launch(f"{kernel}, specialised", table.CHUNK, table.CHUNK, 9, stages, tma=True, resident=resident)
            for kernel, stages in (("walk", forward), ("walk back", back))
        ]
    else:
        configs = {
            "walk": table.walk_config(dim, dim, dtype, capability),
            "walk back": table.walk_back_config(dim, dim, dtype, capability),
        }
        walks = [
            Launch(kernel, table.CHUNK, x.block_v, x.num_warps, x.num_stages, x.tma, resident)
            for kernel, x in configs.items()
        ]
    config, step = table.gradients_config(dim, dim, dtype, capability), table.step_config(dim, dim)
    gradients = Launch("gradients", table.CHUNK, config.block_v, config.num_warps, 1)
    ring = table.gradients_ring(dim, dim, dtype, capability)
    if ring is not None:
        block_v = min(dim, table.CHUNK)
        gradients = Launch("gradients, specialised", table.CHUNK, block_v, 10, ring.num_blocks, tma=True)
    return [
        Launch("solve" if registers is None else "solve, in registers", table.CHUNK, dim, solve.num_warps, 1),
        *walks,
        gradients,
        Launch("step", 1, step.block_v, step.num_warps, 1),
    ]


def _op(op: str, dtype: str, choice: Choice, launches: tuple[Launch, ...]) -> OpChoice:
    if not choice.ok:
        return OpChoice(op, dtype, "reference", choice.reason)
    return OpChoice(op, dtype, "triton", choice.reason, launches)
