"""``zoo::gated_bidirectional_linear_attention``: registration with torch.library and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels.gated_bidirectional_linear_attention import launch
from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.gated_bidirectional_linear_attention.reference import (
    gated_bidirectional_linear_attention_backward_reference,
    gated_bidirectional_linear_attention_reference,
)
from zoo.kernels.ragged import FLOAT_DTYPES, check_batch, check_device, check_sequence, check_tensors

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
    check_tensors(_NAME, packed=packed, norm_weight=norm_weight, lengths=lengths)
    arguments = (packed, norm_weight, lengths, num_heads, head_dim, eps, key_gate, gated_norm)
    wants_grad = torch.is_grad_enabled() and (packed.requires_grad or norm_weight.requires_grad)
    if wants_grad and not torch.compiler.is_exporting():
        return torch.ops.zoo.gated_bidirectional_linear_attention_training(*arguments)[0]
    return torch.ops.zoo.gated_bidirectional_linear_attention(*arguments)


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
    return _attend(packed, norm_weight, lengths, layout, eps)[0]


@torch.library.custom_op(f"zoo::{_NAME}_training", mutates_args=())
def _training(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op with the state that its backward would otherwise compute again; that of the reference is all NaN.

    Its shape is that of the kernels' state: compiled graphs are cached, and a cache outlives the choice of the two.
    (All of one call, forward and backward, must run under one choice.)
    """
    layout = PackedLayout(num_heads, head_dim, key_gate, gated_norm)
    y, state = _attend(packed, norm_weight, lengths, layout, eps)
    if state is None:
        state = launch.State(*(part.fill_(torch.nan) for part in launch.empty_state(packed, layout)))
    return y, *state


@torch.library.custom_op(f"zoo::{_NAME}_backward", mutates_args=())
def _backward(
    grad: Tensor,
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    values: Tensor,
    log_z: Tensor,
    shift: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> tuple[Tensor, Tensor]:
    layout = PackedLayout(num_heads, head_dim, key_gate, gated_norm)
    if launch.choose(packed, layout).ok:
        lengths = lengths.contiguous()
        state = launch.State(values, log_z, shift)
        if values.numel() == 0:
            state = launch.reduce_state(packed, lengths, layout)
        return launch.backward(grad, packed, norm_weight, lengths, state, layout, eps)
    with torch.autocast(packed.device.type, enabled=False):
        grad_packed, grad_norm_weight = gated_bidirectional_linear_attention_backward_reference(
            grad, packed, norm_weight, lengths, layout, eps
        )
    return grad_packed, grad_norm_weight.contiguous()


def _attend(
    packed: Tensor, norm_weight: Tensor, lengths: Tensor, layout: PackedLayout, eps: float
) -> tuple[Tensor, launch.State | None]:
    _check(packed, norm_weight, lengths, layout)
    check_batch(_NAME, "packed", packed, lengths)
    lengths = lengths.contiguous()
    if not eps >= 0:
        raise ConfigError(f"{_NAME}: eps is {eps}; it must be 0 or more")
    if launch.choose(packed, layout).ok:
        state = launch.reduce_state(packed, lengths, layout)
        return launch.apply_state(packed, norm_weight, lengths, state, layout, eps), state
    # The reference multiplies float32 matrices; an autocast around the op must not narrow them.
    with torch.autocast(packed.device.type, enabled=False):
        return gated_bidirectional_linear_attention_reference(packed, norm_weight, lengths, layout, eps), None


def _no_state(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return packed.new_empty(0), packed.new_empty(0, dtype=torch.float32), packed.new_empty(0, dtype=torch.float32)


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


@_training.register_fake
def _training_fake(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    eps: float,
    key_gate: bool,
    gated_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = _forward_fake(packed, norm_weight, lengths, num_heads, head_dim, eps, key_gate, gated_norm)
    return y, *launch.empty_state(packed, PackedLayout(num_heads, head_dim, key_gate, gated_norm))


@_backward.register_fake
def _backward_fake(
    grad: Tensor, packed: Tensor, norm_weight: Tensor, lengths: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    grad_norm_weight = torch.empty(norm_weight.shape, dtype=norm_weight.dtype, device=norm_weight.device)
    return torch.empty(packed.shape, dtype=packed.dtype, device=packed.device), grad_norm_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    packed, norm_weight, lengths, *ctx.settings = inputs
    state = output[1:] if isinstance(output, tuple) else _no_state(packed)
    ctx.save_for_backward(packed, norm_weight, lengths, *state)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*state)


def _autograd(ctx: Any, grad: Tensor, *state_grads: Any) -> tuple[Tensor | None, ...]:
    grad_packed, grad_norm_weight = torch.ops.zoo.gated_bidirectional_linear_attention_backward(
        grad, *ctx.saved_tensors, *ctx.settings
    )
    return (grad_packed, grad_norm_weight, None, *(None for _ in ctx.settings))


_forward.register_autograd(_autograd, setup_context=_setup_context)
_training.register_autograd(_autograd, setup_context=_setup_context)


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
