"""Launch parameters of every kernel by key width, value width, dtype and compute capability; no live device needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64
HEAD_DIMS = (16, 32, 64, 128, 256)


class SolveConfig(NamedTuple):
    """Of the kernel that inverts a chunk: warps of a program."""

    num_warps: int


class WalkConfig(NamedTuple):
    """Of a kernel that walks over chunks: values of a program, warps, chunks in flight, tensor memory access."""

    block_v: int
    num_warps: int
    num_stages: int
    tma: bool


class GradientsConfig(NamedTuple):
    """Of the kernel that writes a chunk's gradients: values at a time, warps."""

    block_v: int
    num_warps: int


def dot_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of products of tensors in this dtype."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def solve_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of the inverse, which is computed in float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def solve_config(key_dim: int, dtype: torch.dtype, capability: int) -> SolveConfig:
    """Return the parameters of the inverse."""
    return SolveConfig(4)


def walk_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> WalkConfig:
    """Return the parameters of the walk."""
    block_v = min(value_dim, 64)
    if dtype == torch.float32:
        return WalkConfig(min(block_v, 32), 4, 1, False)
    tma = capability >= 90 and key_dim <= 256
    return WalkConfig(block_v, 8 if key_dim == 256 else 4, 2 if key_dim <= 128 else 1, tma)


def walk_back_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> WalkConfig:
    """Return the parameters of the walk back."""
    return walk_config(key_dim, value_dim, dtype, capability)


def gradients_config(key_dim: int, value_dim: int, dtype: torch.dtype, capability: int) -> GradientsConfig:
    """Return the parameters of the kernel of the other gradients."""
    if dtype == torch.float32:
        return GradientsConfig(min(value_dim, 32), 8)
    return GradientsConfig(min(value_dim, 64), 8)
