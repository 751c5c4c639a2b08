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
    dtype = accumulation_dtype(x_BHLD.dtype)
    half = x_BHLD.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=dtype, device=x_BHLD.device) / half)
    angles = positions_L.to(dtype).unsqueeze(-1) * frequencies
    if positions_L.dim() == 2:
        angles = angles.unsqueeze(1)
    cos, sin = torch.cos(angles).to(x_BHLD.dtype), torch.sin(angles).to(x_BHLD.dtype)
    first, second = x_BHLD[..., :half], x_BHLD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
