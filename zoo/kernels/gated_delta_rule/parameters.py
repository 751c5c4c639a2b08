"""Launch parameters of every kernel by key width, value width, dtype and compute capability; no live device needed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from zoo.kernels.launch import is_interpreting

CHUNK = 64
HEAD_DIMS = (16, 32, 64, 128, 256)
FEWEST_COLUMNS = 64
"""What the kernel of the gradients pads narrower heads to: with 32 columns Triton 3.6 on Hopper gave wrong results with
4 warps and read outside its memory with 8 (2026-11-30)."""

MOST_REGISTERS = 255
"""Of a thread. Said aloud: where a kernel needs more, ptxas 13 otherwise gave 32 of them on 8.0 and spilled everything
(gradients, bfloat16, 64 wide: 13.6 KB spilled, 2.1 KB with this)."""

LONGEST_STEP = 8
"""Positions up to which the recurrence itself is run, one after the other."""
WIDEST_TRANSITION = 128
"""Most keys of a row that is cut: what a segment makes of the state before it is [K, K]."""

_FEWEST_CHUNKS = 16
"""Of a segment: with usual decays, about exp(-2) a chunk, shorter ones end before their writes are forgotten, so that
nothing of them is left out."""
_SUM_COST, _TRANSITION_COST = 0.2, 0.5
_SCAN_COST = 4 / 128
_LAUNCH_COST = 6.0


class SolveConfig(NamedTuple):
    """Of the kernel that inverts a chunk: warps of a program, most registers of a thread."""

    num_warps: int
    max_registers: int = MOST_REGISTERS


class WalkConfig(NamedTuple):
    """Of a kernel that walks over chunks: values of a program, warps, chunks in flight, tensor memory access."""

    block_v: int
    num_warps: int
    num_stages: int
    tma: bool


class RingConfig(NamedTuple):
    """Of a warp-specialised walk: chunks in flight from memory, chunks between two groups of warps, groups that write
    outputs, and the most registers of a thread."""

    num_stages: int
    num_slots: int
    num_outputs: int = 1
    max_registers: int | None = None


class GradientsConfig(NamedTuple):
    """Of the kernel that writes a chunk's gradients: values at a time, warps."""

    block_v: int
    num_warps: int


class GradientsRing(NamedTuple):
    """Of the warp-specialised kernel of a chunk's gradients: chunks and blocks of values in flight, whether two pairs
    of tiles share shared memory, registers of a thread of the values' warps and of the loader's."""

    num_chunks: int
    num_blocks: int
    shared: bool
    values_registers: int
    loader_registers: int


class StepConfig(NamedTuple):
    """Of the kernel of a few positions: values of a program, warps."""

    block_v: int
    num_warps: int


class Segments(NamedTuple):
    """Into how many segments rows are cut, and how many chunks one has."""

    number: int
    chunks: int


@functools.cache
def segments(programs: int, transitions: int, chunks: int, key_dim: int, slots: int) -> Segments:
    """Return how a walk is cut: as takes least time by a count whose unit is one chunk of the walk that writes outputs.

    Rows cut into n segments are walked three times: for what segments add, for their transitions and for the outputs. A
    scan over the segments goes between, and launches. So cutting pays where it fills multiprocessors that would stand
    idle. How much of the first two walks is left out depends on decays, which no rule of shapes knows. The constants
    are a compromise between rows of which nothing and rows of which most is left out, as ``benchmarks.delta_schedule``
    measured both on an H200: where most is left out the rule loses 1.5% to the best cut tried on average and 23% at
    most, where nothing is 2.3% and 30%.

    Args:
        programs: of a walk over whole rows.
        transitions: programs of a walk for transitions; 0 where keys are too wide to have one.
        chunks: of a row.
        key_dim: K, which a scan's cost grows with.
        slots: programs that run at a time.
    """

    def cost(cut: Segments) -> float:
        rounds, others = (-(-walks * cut.number // slots) for walks in (programs, transitions))
        if cut.number == 1:
            return rounds * cut.chunks
        return (
            ((1 + _SUM_COST) * rounds + _TRANSITION_COST * others) * cut.chunks
            + _SCAN_COST * key_dim * cut.number
            + _LAUNCH_COST
        )

    whole = Segments(1, max(chunks, 1))
    if not (programs and transitions):
        return whole
    most = min(chunks // _FEWEST_CHUNKS, 2 * slots // programs)
    lengths = sorted({-(-chunks // number) for number in range(2, most + 1)}, reverse=True)
    return min([whole, *(Segments(-(-chunks // length), length) for length in lengths)], key=cost)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of products of float32 operands for tensors in this dtype.

    tf32 has the bits of float16, but tensor cores cut off what float16 rounds, so it serves bfloat16 only. Three tf32
    products lose two bits of float32; six bfloat16 ones, at the same rate, lose none. (Triton's interpreter computes
    all the same and does not know the last name.)
    """
    if dtype == torch.bfloat16:
        return "tf32"
    return "tf32x3" if dtype == torch.float16 or is_interpreting() else "bf16x6"


def forgotten_bits(dtype: torch.dtype) -> int:
    """Return n such that cut rows leave out what is left of a state or a write if it is less than 2^-n of it.

    Far below the rounding of the dtype: the rest of a sum may be smaller by 2^32 in bfloat16, by 2^29 in float16 and by
    2^41 in float32 before that can be seen.
    """
    return 64 if dtype == torch.float32 else 40


def solve_config(key_dim: int, dtype: torch.dtype, capability: int) -> SolveConfig:
    """Return the parameters of the inverse."""
    return SolveConfig(4 if dtype == torch.float32 else 1)


def walk_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> WalkConfig:
    """Return the parameters of the walk."""
    block_v = min(value_dim, 64)
    if dtype == torch.float32:
        return WalkConfig(min(block_v, 32), 4, 1, False)
    if max(key_dim, block_v) <= 32:
        return WalkConfig(block_v, 2, 2, capability >= 90)
    stages = 3 if key_dim <= 64 else 2 if key_dim == 128 else 1
    return WalkConfig(block_v, 8 if key_dim == 256 else 4, stages, capability >= 90)


def walk_back_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> WalkConfig:
    """Return the parameters of the walk back."""
    config = walk_config(key_dim, value_dim, dtype, capability)
    return config._replace(block_v=16, num_stages=3) if config.num_warps == 2 else config


def is_specialized(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> bool:
    """Return whether the warp-specialised kernels take these; they need the tensor cores of 9.0 and 64-row tiles."""
    return capability == 90 and dtype.itemsize == 2 and key_dim in (64, 128) and value_dim >= CHUNK


def resident_walks(*, specialized: bool) -> int:
    """Return how many programs of a walk a multiprocessor is taken to run at a time; without, an estimate."""
    return 1 if specialized else 2


def solve_registers(key_dim: int, dtype: torch.dtype, capability: int) -> int | None:
    """Return the most registers of a thread of the inverse in registers; None where it does not take these.

    Its products are tf32, which serves bfloat16 only.
    """
    if capability != 90 or dtype != torch.bfloat16 or key_dim not in (32, 64, 128):
        return None
    return 128 if key_dim == 64 else MOST_REGISTERS


def walk_ring(key_dim: int, mode: str) -> RingConfig:
    """Return the parameters of the warp-specialised walk."""
    if mode == "output":
        return RingConfig(3, 2, 2) if key_dim == 64 else RingConfig(2, 2)
    return RingConfig(3, 2, max_registers=128 if mode == "transition" and key_dim == 128 else None)


def walk_back_ring(key_dim: int) -> RingConfig:
    """Return the parameters of the warp-specialised walk back."""
    return RingConfig(3, 2) if key_dim == 64 else RingConfig(2, 1)


def has_kernels(key_dim: int, dtype: torch.dtype, capability: int) -> bool:
    """Return whether there are kernels for keys of this width: 256 in float32 not where a program has 99 KB of shared
    memory, of which the inverse would need 128."""
    return key_dim <= 128 or dtype != torch.float32 or capability not in (86, 89, 120, 121)


def has_gradients(key_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels of the gradients take keys of this width: 256 only in bfloat16.

    Otherwise the products of a chunk would need 238 to 295 KB of shared memory, and 9.0 and 10.0 have 227.
    """
    return key_dim <= 128 or dtype == torch.bfloat16


def gradients_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> GradientsConfig:
    """Return the parameters of the kernel of the other gradients."""
    # With 4 warps ptxas finds no registers for float32 on 10.0; on 9.0 it does, and 4 is what has run there.
    return GradientsConfig(FEWEST_COLUMNS, 8 if dtype == torch.float32 and capability >= 100 else 4)


def gradients_ring(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> GradientsRing | None:
    """Return the parameters of the warp-specialised kernel of the other gradients; None where it does not take these.

    float16 would leave its range in the last products.
    """
    wide = is_specialized(key_dim, value_dim, dtype, capability)
    narrow = capability == 90 and key_dim == value_dim == 32
    if dtype != torch.bfloat16 or not (wide or narrow):
        return None
    return GradientsRing(2, 2, True, 224, 40) if key_dim == 128 else GradientsRing(2, 3, False, 208, 64)


def step_config(key_dim: int, value_dim: int) -> StepConfig:
    """Return the parameters of the kernel of a few positions: up to 16 KiB of state a warp."""
    block_v = min(value_dim, 64)
    return StepConfig(block_v, max(1, key_dim * block_v // 4096))
