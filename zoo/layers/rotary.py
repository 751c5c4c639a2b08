"""Rotary positions (RoFormer, arXiv 2104.09864), rotating the two halves of a head against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.kernels.ragged import accumulation_dtype


def rotate(x_BHLD: Tensor, positions_L: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate ``x`` [B, H, L, D] by its positions.

    Args:
        x_BHLD: queries or keys; D even.
        positions_L: [L] or [B, L], any integer dtype, negative values allowed.
        base: wavelength base; pair i turns by position * base ** (-2 i / D).

    Returns:
        The same shape and dtype. Angles are float32 (float64 for float64 input) whatever the dtype of ``x``.
    """
    angles = _angles(x_BHLD, positions_L, base)
    return _turn(x_BHLD, angles.unsqueeze(1) if positions_L.dim() == 2 else angles)


def rotate_tokens(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate tokens [..., H, D] by ``positions`` [...] (or what broadcasts to it); otherwise as ``rotate``."""
    return _turn(x, _angles(x, positions, base).unsqueeze(-2))


def _angles(x: Tensor, positions: Tensor, base: float) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    return positions.to(dtype).unsqueeze(-1) * frequencies


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
