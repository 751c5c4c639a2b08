"""``zoo::causal_short_conv``: registration with torch.library and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels.causal_short_conv import launch
from zoo.kernels.causal_short_conv.reference import causal_short_conv_backward_reference, causal_short_conv_reference
from zoo.kernels.ragged import FLOAT_DTYPES, check_batch, check_device, check_sequence, check_tensors

ACTIVATIONS = ("none", "silu")


def causal_short_conv(x: Tensor, weight: Tensor, lengths: Tensor, *, activation: str = "none") -> Tensor:
    """Convolve each channel of a ragged batch with its own short causal kernel.

    Args:
        x: [B, L, C], float16, bfloat16, float32 or float64; padded positions may hold anything, NaN included.
        weight: [C, W], any floating dtype; ``weight[:, W - 1]`` meets the present position.
        lengths: int32 [B], valid positions of each row, clamped to [0, L].
        activation: ``"none"`` or ``"silu"``.

    Returns:
        [B, L, C] in the dtype of ``x``, zero at padded positions. Differentiable once in ``x`` and ``weight``.

    Raises:
        ShapeError, DTypeError, ConfigError: an argument does not fit; the message names it.
    """
    check_tensors("causal_short_conv", x=x, weight=weight, lengths=lengths)
    return torch.ops.zoo.causal_short_conv(x, weight, lengths, activation)


@torch.library.custom_op("zoo::causal_short_conv", mutates_args=())
def _forward(x: Tensor, weight: Tensor, lengths: Tensor, activation: str) -> Tensor:
    _check(x, weight, lengths, activation)
    check_batch("causal_short_conv", "x", x, lengths)
    if launch.choose(x.device, x.dtype, weight.shape[1]).ok:
        return launch.forward(x, weight, lengths, activation)
    return causal_short_conv_reference(x, weight, lengths, activation)


@torch.library.custom_op("zoo::causal_short_conv_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weight: Tensor, lengths: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if launch.choose(x.device, x.dtype, weight.shape[1]).ok:
        return launch.backward(grad, x, weight, lengths, activation)
    return causal_short_conv_backward_reference(grad, x, weight, lengths, activation)


@_forward.register_fake
def _forward_fake(x: Tensor, weight: Tensor, lengths: Tensor, activation: str) -> Tensor:
    _check(x, weight, lengths, activation)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_backward.register_fake
def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, lengths: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, lengths, ctx.activation = inputs
    ctx.save_for_backward(x, weight, lengths)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, lengths = ctx.saved_tensors
    grad_x, grad_weight = torch.ops.zoo.causal_short_conv_backward(grad, x, weight, lengths, ctx.activation)
    return grad_x, grad_weight, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _check(x: Tensor, weight: Tensor, lengths: Tensor, activation: str) -> None:
    check_sequence("causal_short_conv", "x", x, lengths)
    check_device("causal_short_conv", "weight", weight, x)
    if weight.dtype not in FLOAT_DTYPES:
        raise DTypeError(f"causal_short_conv: weight has dtype {weight.dtype}; give it a floating dtype")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ShapeError(
            f"causal_short_conv: weight has shape {list(weight.shape)}, but x with {x.shape[2]} channels "
            f"needs [{x.shape[2]}, W] with W of 1 or more"
        )
    if activation not in ACTIVATIONS:
        raise ConfigError(f"causal_short_conv: activation {activation!r} is unknown; use one of {ACTIVATIONS}")
