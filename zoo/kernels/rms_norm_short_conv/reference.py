"""RMSNorm with the short causal convolution, and the gradients, in plain PyTorch for any float dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.kernels.causal_short_conv.reference import causal_short_conv_backward_reference, causal_short_conv_reference
from zoo.kernels.ragged import accumulation_dtype, valid_positions


def rms_norm_short_conv_reference(
    x_BLC: Tensor,
    norm_weight_C: Tensor,
    weight_CW: Tensor,
    lengths_B: Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return y [B, L, C] in ``out_dtype`` and rstd [B, L] in the accumulation dtype, both 0 at padding."""
    dtype = accumulation_dtype(x_BLC.dtype)
    padding_BL = ~valid_positions(lengths_B, x_BLC.shape[1])
    x = x_BLC.to(dtype).masked_fill(padding_BL.unsqueeze(-1), 0)
    rstd_BL = torch.rsqrt(x.square().mean(-1) + eps)
    n_BLC = x * rstd_BL.unsqueeze(-1) * norm_weight_C.to(dtype)
    y_BLC = causal_short_conv_reference(n_BLC, weight_CW, lengths_B, "none")
    return y_BLC.to(out_dtype), rstd_BL.masked_fill(padding_BL, 0)


def rms_norm_short_conv_backward_reference(
    grad_BLC: Tensor,
    x_BLC: Tensor,
    norm_weight_C: Tensor,
    weight_CW: Tensor,
    lengths_B: Tensor,
    rstd_BL: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``norm_weight`` and ``weight`` for the output gradient ``grad`` [B, L, C]."""
    dtype = accumulation_dtype(x_BLC.dtype)
    padding_BL1 = ~valid_positions(lengths_B, x_BLC.shape[1]).unsqueeze(-1)
    scale_C = norm_weight_C.to(dtype)
    rstd_BL1 = rstd_BL.to(dtype).unsqueeze(-1)
    h_BLC = x_BLC.to(dtype).masked_fill(padding_BL1, 0) * rstd_BL1
    grad_n_BLC, grad_weight_CW = causal_short_conv_backward_reference(
        grad_BLC.to(dtype), h_BLC * scale_C, weight_CW.to(dtype), lengths_B, "none"
    )
    d_BLC = grad_n_BLC * scale_C
    grad_x_BLC = rstd_BL1 * (d_BLC - h_BLC * (d_BLC * h_BLC).mean(-1, keepdim=True))
    grad_norm_weight_C = (grad_n_BLC * h_BLC).sum((0, 1))
    return grad_x_BLC.to(x_BLC.dtype), grad_norm_weight_C.to(norm_weight_C.dtype), grad_weight_CW.to(weight_CW.dtype)
