"""``zoo::rms_norm_short_conv``: registration with torch.library and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels.ragged import (
    FLOAT_DTYPES,
    accumulation_dtype,
    check_batch,
    check_device,
    check_sequence,
    check_tensors,
)
from zoo.kernels.rms_norm_short_conv import launch
from zoo.kernels.rms_norm_short_conv.reference import (
    rms_norm_short_conv_backward_reference,
    rms_norm_short_conv_reference,
)

OP = "rms_norm_short_conv"


def rms_norm_short_conv(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    lengths: Tensor,
    *,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise each position of a ragged batch over its channels, then convolve each channel causally.

    There is no ONNX translation: under export, write ``F.rms_norm`` and ``causal_short_conv`` instead.

    Args:
        x: [B, L, C], float16, bfloat16, float32 or float64; padded positions may hold anything, NaN included.
        norm_weight: [C], any floating dtype.
        weight: [C, W], any floating dtype; ``weight[:, W - 1]`` meets the present position.
        lengths: int32 [B], valid positions of each row, clamped to [0, L].
        eps: added to the mean square, 0 or more.
        out_dtype: dtype of the result; None for that of ``x``.

    Returns:
        [B, L, C], zero at padded positions. Differentiable once in ``x``, ``norm_weight`` and ``weight``.

    Raises:
        ShapeError, DTypeError, ConfigError: an argument does not fit; the message names it.
    """
    check_tensors(OP, x=x, norm_weight=norm_weight, weight=weight, lengths=lengths)
    y, _ = torch.ops.zoo.rms_norm_short_conv(x, norm_weight, weight, lengths, eps, out_dtype or x.dtype)
    return y


@torch.library.custom_op("zoo::rms_norm_short_conv", mutates_args=())
def _forward(
    x: Tensor, norm_weight: Tensor, weight: Tensor, lengths: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(x, norm_weight, weight, lengths, out_dtype)
    check_batch(OP, "x", x, lengths)
    if not eps >= 0:
        raise ConfigError(f"{OP}: eps is {eps}; it must be 0 or more")
    if launch.choose(x.device, x.dtype, out_dtype, *weight.shape).ok:
        return launch.forward(x, norm_weight, weight, lengths, eps, out_dtype)
    return rms_norm_short_conv_reference(x, norm_weight, weight, lengths, eps, out_dtype)


@torch.library.custom_op("zoo::rms_norm_short_conv_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, lengths: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if launch.choose(x.device, x.dtype, grad.dtype, *weight.shape).ok:
        return launch.backward(grad, x, norm_weight, weight, lengths, rstd)
    return rms_norm_short_conv_backward_reference(grad, x, norm_weight, weight, lengths, rstd)


@_forward.register_fake
def _forward_fake(
    x: Tensor, norm_weight: Tensor, weight: Tensor, lengths: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(x, norm_weight, weight, lengths, out_dtype)
    rstd = torch.empty(x.shape[:2], dtype=accumulation_dtype(x.dtype), device=x.device)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device), rstd


@_backward.register_fake
def _backward_fake(
    grad: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, lengths: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, torch.empty_like(norm_weight), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, norm_weight, weight, lengths, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, norm_weight, weight, lengths, output[1])


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, norm_weight, weight, lengths, rstd = ctx.saved_tensors
    grads = torch.ops.zoo.rms_norm_short_conv_backward(grad, x, norm_weight, weight, lengths, rstd)
    return *grads, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _check(x: Tensor, norm_weight: Tensor, weight: Tensor, lengths: Tensor, out_dtype: torch.dtype) -> None:
    check_sequence(OP, "x", x, lengths)
    channels = x.shape[2]
    for name, value in (("norm_weight", norm_weight), ("weight", weight)):
        check_device(OP, name, value, x)
        if value.dtype not in FLOAT_DTYPES:
            raise DTypeError(f"{OP}: {name} has dtype {value.dtype}; give it a floating dtype")
    if norm_weight.dim() != 1 or norm_weight.shape[0] != channels:
        raise ShapeError(
            f"{OP}: norm_weight has shape {list(norm_weight.shape)}, but x with {channels} channels needs [{channels}]"
        )
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ShapeError(
            f"{OP}: weight has shape {list(weight.shape)}, but x with {channels} channels "
            f"needs [{channels}, W] with W of 1 or more"
        )
    if out_dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{OP}: out_dtype is {out_dtype}; use float16, bfloat16, float32 or float64")
