"""``zoo::gated_bidirectional_linear_attention``: registration with torch.library and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.gated_bidirectional_linear_attention.reference import (
    gated_bidirectional_linear_attention_backward_reference,
    gated_bidirectional_linear_attention_reference,
)
from zoo.kernels.ragged import FLOAT_DTYPES, check_batch, check_device, check_sequence

_NAME = "gated_bidirectional_linear_attention"


def gated_bidirectional_linear_attention(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    key_gate: bool = True,
    gated_norm: bool = True,
) -> Tensor:
    """Attend from every valid position to every valid position of its row in linear time (arXiv 2606.07317).

    Args:
        packed: [B, L, P] with P = ``packed_width(...)``: [q | k | v | r | s | padding] as the package docstring says;
            float16, bfloat16, float32 or float64; padded positions may hold anything, NaN included.
        norm_weight: [H, D], any floating dtype; not read without ``gated_norm``.
        lengths: int32 [B], valid positions of each row, clamped to [0, L].
        num_heads: H.
        head_dim: D.
        eps: added to the mean square in the RMSNorm.
        key_gate: weigh keys by the softmax over the sequence of s; without it all weigh the same and s is absent.
        gated_norm: finish with RMSNorm(O) * norm_weight * SiLU(r); without it r is absent.

    Returns:
        [B, L, H * D] in the dtype of ``packed``, zero at padded positions.
        Differentiable once in ``packed`` and ``norm_weight``.

    Raises:
        ShapeError, DTypeError, ConfigError: an argument does not fit; the message names it.
    """
    return torch.ops.zoo.gated_bidirectional_linear_attention(
        packed, norm_weight, lengths, num_heads, head_dim, eps, key_gate, gated_norm
    )


@torch.library.custom_op(f"zoo::{_NAME}", mutates_args=())
def _forward(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> Tensor:
    layout = PackedLayout(num_heads, head_dim, key_gate, gated_norm)
    _check(packed, norm_weight, lengths, layout)
    check_batch(_NAME, "packed", packed, lengths)
    if not eps >= 0:
        raise ConfigError(f"{_NAME}: eps is {eps}; it must be 0 or more")
    return gated_bidirectional_linear_attention_reference(packed, norm_weight, lengths, layout, eps)


@torch.library.custom_op(f"zoo::{_NAME}_backward", mutates_args=())
def _backward(
    grad: Tensor,
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> tuple[Tensor, Tensor]:
    layout = PackedLayout(num_heads, head_dim, key_gate, gated_norm)
    return gated_bidirectional_linear_attention_backward_reference(grad, packed, norm_weight, lengths, layout, eps)


@_forward.register_fake
def _forward_fake(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> Tensor:
    _check(packed, norm_weight, lengths, PackedLayout(num_heads, head_dim, key_gate, gated_norm))
    return torch.empty((*packed.shape[:2], num_heads * head_dim), dtype=packed.dtype, device=packed.device)


@_backward.register_fake
def _backward_fake(
    grad: Tensor, packed: Tensor, norm_weight: Tensor, lengths: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty(packed.shape, dtype=packed.dtype, device=packed.device), torch.empty_like(norm_weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, norm_weight, lengths, *ctx.settings = inputs
    ctx.save_for_backward(packed, norm_weight, lengths)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, norm_weight, lengths = ctx.saved_tensors
    grad_packed, grad_norm_weight = torch.ops.zoo.gated_bidirectional_linear_attention_backward(
        grad, packed, norm_weight, lengths, *ctx.settings
    )
    return (grad_packed, grad_norm_weight, None, *(None for _ in ctx.settings))


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _check(packed: Tensor, norm_weight: Tensor, lengths: Tensor, layout: PackedLayout) -> None:
    check_sequence(_NAME, "packed", packed, lengths)
    if layout.num_heads < 1 or layout.head_dim < 1:
        raise ConfigError(f"{_NAME}: num_heads {layout.num_heads} and head_dim {layout.head_dim} must be 1 or more")
    if packed.shape[2] != layout.width:
        raise ShapeError(
            f"{_NAME}: packed has {packed.shape[2]} columns, but {layout.num_heads} heads of {layout.head_dim} with "
            f"key_gate={layout.key_gate} and gated_norm={layout.gated_norm} need {layout.width}; see packed_width"
        )
    check_device(_NAME, "norm_weight", norm_weight, packed)
    if norm_weight.dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{_NAME}: norm_weight has dtype {norm_weight.dtype}; give it a floating dtype")
    if list(norm_weight.shape) != [layout.num_heads, layout.head_dim]:
        raise ShapeError(
            f"{_NAME}: norm_weight has shape {list(norm_weight.shape)}, "
            f"but [num_heads, head_dim] = [{layout.num_heads}, {layout.head_dim}] is needed"
        )
