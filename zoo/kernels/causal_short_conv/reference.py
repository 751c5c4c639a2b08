"""The short causal convolution and its gradient in plain PyTorch, for any float dtype and device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.ragged import accumulation_dtype, valid_positions


def causal_short_conv_reference(x_BLC: Tensor, weight_CW: Tensor, lengths_B: Tensor, activation: str) -> Tensor:
    """Return the convolution of ``x`` [B, L, C] with ``weight`` [C, W], in the dtype of ``x``."""
    dtype = accumulation_dtype(x_BLC.dtype)
    mask_BL1 = valid_positions(lengths_B, x_BLC.shape[1]).unsqueeze(-1)
    z_BLC = _convolve(x_BLC.to(dtype).masked_fill(~mask_BL1, 0), weight_CW.to(dtype))
    y_BLC = F.silu(z_BLC) if activation == "silu" else z_BLC
    return y_BLC.masked_fill(~mask_BL1, 0).to(x_BLC.dtype)


def causal_short_conv_backward_reference(
    grad_BLC: Tensor, x_BLC: Tensor, weight_CW: Tensor, lengths_B: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight`` for the output gradient ``grad`` [B, L, C]."""
    dtype = accumulation_dtype(x_BLC.dtype)
    width, length = weight_CW.shape[1], x_BLC.shape[1]
    padding_BL1 = ~valid_positions(lengths_B, length).unsqueeze(-1)
    x = x_BLC.to(dtype).masked_fill(padding_BL1, 0)
    weight = weight_CW.to(dtype)
    grad_z = grad_BLC.to(dtype).masked_fill(padding_BL1, 0)
    if activation == "silu":
        z = _convolve(x, weight)
        sigmoid = torch.sigmoid(z)
        grad_z = grad_z * sigmoid * (1 + z * (1 - sigmoid))
    x_padded = F.pad(x, (0, 0, width - 1, 0))
    grad_padded = F.pad(grad_z, (0, 0, 0, width - 1))
    grad_x = torch.zeros_like(x)
    grad_weight = torch.zeros_like(weight)
    for tap in range(width):
        grad_x += grad_padded[:, width - 1 - tap : width - 1 - tap + length] * weight[:, tap]
        grad_weight[:, tap] = (grad_z * x_padded[:, tap : tap + length]).sum((0, 1))
    return grad_x.masked_fill(padding_BL1, 0).to(x_BLC.dtype), grad_weight.to(weight_CW.dtype)


def _convolve(x_BLC: Tensor, weight_CW: Tensor) -> Tensor:
    width, length = weight_CW.shape[1], x_BLC.shape[1]
    x_padded = F.pad(x_BLC, (0, 0, width - 1, 0))
    z_BLC = torch.zeros_like(x_BLC)
    for tap in range(width):
        z_BLC = z_BLC + x_padded[:, tap : tap + length] * weight_CW[:, tap]
    return z_BLC
