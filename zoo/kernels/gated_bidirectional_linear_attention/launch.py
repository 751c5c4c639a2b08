"""The functions that launch the Triton kernels, and what they need to know of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.gated_bidirectional_linear_attention.parameters import (
    COMBINE_WARPS,
    HEAD_DIMS,
    TileConfig,
    backward_config,
    best_split,
    combine_constants,
    constants,
    dot_precision,
    forward_config,
    gradient_dot_dtype,
    gradient_dtype,
)
from zoo.kernels.launch import Choice, capability, choose_triton, multiprocessors, on_device

_FIRST_WITH_OVERLAP = 90
_TMA_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1
_LONGEST_TILE = 128


class State(NamedTuple):
    """What the keys and values of a row and head amount to; the names are those of ``triton_forward``."""

    values: Tensor
    """V [B, H, D, D] in the dtype of the projection: a weighted mean of the values for every key column."""
    log_z: Tensor
    """l [B, H, D] float32."""
    shift: Tensor
    """[B, H, 2] float32: the gate logit that the exponents are relative to, and max_d m_d relative to that."""


def choose(packed: Tensor, layout: PackedLayout) -> Choice:
    """Return whether the Triton kernels take this projection, and why."""
    return choose_for(packed.device, packed.dtype, layout.head_dim)


def choose_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """Return whether the Triton kernels take this device, dtype and head width, and why."""
    choice = choose_triton(device, dtype)
    if choice.ok and head_dim not in HEAD_DIMS:
        return Choice(False, f"head width {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    return choice


def overlap(device: torch.device) -> dict[str, bool]:
    """Return the launch options that let a kernel be launched while the one before it still runs (9.0 and up)."""
    able = device.type == "cuda" and capability(device) >= _FIRST_WITH_OVERLAP
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


def empty_state(packed: Tensor, layout: PackedLayout) -> State:
    """Return room for the state of every row and head of ``packed`` [B, L, P]."""
    batch, heads, dim = packed.shape[0], layout.num_heads, layout.head_dim
    return State(
        packed.new_empty(batch, heads, dim, dim),
        packed.new_empty(batch, heads, dim, dtype=torch.float32),
        packed.new_empty(batch, heads, 2, dtype=torch.float32),
    )


def reduce_state(packed: Tensor, lengths: Tensor, layout: PackedLayout, config: TileConfig | None = None) -> State:
    """Return the state of every row and head of ``packed`` [B, L, P]; zeros for empty rows."""
    from zoo.kernels.gated_bidirectional_linear_attention.triton_forward import combine_kernel, reduce_kernel

    packed = _columns_together(packed)
    batch, length, _ = packed.shape
    heads, dim = layout.num_heads, layout.head_dim
    config = config or forward_config("reduce", dim, packed.dtype, capability(packed.device))
    float32: dict[str, Any] = {"dtype": torch.float32, "device": packed.device}
    state = empty_state(packed, layout)
    if batch == 0:
        return state
    splits, chunk = _split(batch * heads, length, config, packed.device, combines=True)
    parts: tuple[Tensor, ...] = (state.log_z,) * 4
    if splits > 1:
        sizes = ((dim, dim), (dim,), (dim,), (2,))
        parts = tuple(torch.empty(batch, heads, splits, *size, **float32) for size in sizes)
    desc, tma = _descriptors([packed], config, dim)
    with on_device(packed):
        reduce_kernel[(batch * heads * splits,)](
            packed, desc, lengths, *state, *parts,
            length, heads, splits, chunk, packed.stride(0), packed.stride(1),
            layout.key, layout.value, layout.key_gate_logit or 0,
            **constants("reduce", layout, packed.dtype, config), TMA=tma, FINAL=splits == 1,
            num_warps=config.num_warps, **overlap(packed.device),
        )  # fmt: skip
        if splits > 1:
            combine = combine_constants(dim)
            combine_kernel[(batch * heads * (dim // combine["COLUMNS"]),)](
                *parts, *state, splits, **combine, num_warps=COMBINE_WARPS, **overlap(packed.device)
            )
    return state


def apply_state(
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    state: State,
    layout: PackedLayout,
    eps: float,
    config: TileConfig | None = None,
) -> Tensor:
    """Return Y [B, L, H * D] in the dtype of ``packed``, zero at padded positions."""
    from zoo.kernels.gated_bidirectional_linear_attention.triton_forward import apply_kernel

    packed, norm_weight = _columns_together(packed), norm_weight.contiguous()
    batch, length, _ = packed.shape
    heads, dim = layout.num_heads, layout.head_dim
    config = config or forward_config("apply", dim, packed.dtype, capability(packed.device))
    out = torch.empty(batch, length, heads * dim, dtype=packed.dtype, device=packed.device)
    if out.numel() == 0:
        return out
    splits, chunk = _split(batch * heads, length, config, packed.device, combines=False)
    desc, tma = _descriptors([packed], config, dim)
    with on_device(packed):
        apply_kernel[(batch * heads * splits,)](
            packed, desc, lengths, state.values, state.log_z, norm_weight, out,
            length, heads, splits, chunk, packed.stride(0), packed.stride(1),
            layout.query, layout.residual_gate or 0, eps,
            **constants("apply", layout, packed.dtype, config), TMA=tma, num_warps=config.num_warps,
            **overlap(packed.device),
        )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    packed: Tensor,
    norm_weight: Tensor,
    lengths: Tensor,
    state: State,
    layout: PackedLayout,
    eps: float,
    queries_config: TileConfig | None = None,
    keys_config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``packed`` [B, L, P] and ``norm_weight`` [H, D]; deterministic.

    Args:
        grad: [B, L, H * D], gradient of Y.
        packed: as in the forward.
        norm_weight: as in the forward.
        lengths: as in the forward.
        state: what ``reduce_state`` returned.
        layout: as in the forward.
        eps: as in the forward.
        queries_config: parameters of the pass over queries; default: the table's.
        keys_config: parameters of the pass over keys; default: the table's.
    """
    from zoo.kernels.gated_bidirectional_linear_attention.triton_backward import (
        backward_combine_kernel,
        backward_keys_kernel,
        backward_queries_kernel,
    )

    packed, grad, norm_weight = _columns_together(packed), grad.contiguous(), norm_weight.contiguous()
    batch, length, width = packed.shape
    heads, dim, device = layout.num_heads, layout.head_dim, packed.device
    grad_packed = torch.empty(batch, length, width, dtype=packed.dtype, device=device)
    if grad_packed.numel() == 0:
        return grad_packed, torch.zeros_like(norm_weight)
    dtype = gradient_dtype(packed.dtype, dim, capability(device))
    if dtype != packed.dtype:
        state = state._replace(values=state.values.to(dtype))
        grads = backward(grad.to(dtype), packed.to(dtype), norm_weight, lengths, state, layout, eps)
        return grads[0].to(packed.dtype), grads[1]
    grad = grad.to(packed.dtype)
    dot = gradient_dot_dtype(packed.dtype)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    config = queries_config or backward_config("queries", dim, packed.dtype, capability(device))
    splits, chunk = _split(batch * heads, length, config, device, combines=True)
    part_state = torch.empty(batch, heads, splits, dim, dim, **float32)
    part_z = torch.empty(batch, heads, splits, dim, **float32)
    part_weight = torch.empty(batch, heads, splits, dim, **float32) if layout.gated_norm else part_z
    grad_state = torch.empty(batch, heads, dim, dim, dtype=dot, device=device)
    grad_z = torch.empty(batch, heads, dim, **float32)
    desc, grad_desc, out_desc, tma = _descriptors([packed, grad, grad_packed], config, dim)
    with on_device(packed):
        backward_queries_kernel[(batch * heads * splits,)](
            grad, grad_desc, packed, desc, lengths, state.values, state.log_z, norm_weight, grad_packed, out_desc,
            part_state, part_z, part_weight,
            length, heads, splits, chunk, grad.stride(0), grad.stride(1), packed.stride(0), packed.stride(1), width,
            layout.query, layout.residual_gate or 0, eps,
            **constants("queries", layout, packed.dtype, config), TMA=tma, num_warps=config.num_warps,
            **overlap(packed.device),
        )  # fmt: skip
        combine = combine_constants(dim) | {"DOT_PRECISION": dot_precision(packed.dtype)}
        backward_combine_kernel[(batch * heads * (dim // combine["COLUMNS"]),)](
            part_state,
            part_z,
            grad_state,
            grad_z,
            splits,
            **combine,
            num_warps=COMBINE_WARPS,
            **overlap(packed.device),
        )
        config = keys_config or backward_config("keys", dim, packed.dtype, capability(device))
        splits, chunk = _split(batch * heads, length, config, device, combines=False)
        desc, out_desc, tma = _descriptors([packed, grad_packed], config, dim)
        backward_keys_kernel[(batch * heads * splits,)](
            packed, desc, lengths, state.log_z, state.shift, grad_state, grad_z, grad_packed, out_desc,
            length, heads, splits, chunk, packed.stride(0), packed.stride(1), width, layout.used_width,
            layout.key, layout.value, layout.key_gate_logit or 0,
            **constants("keys", layout, packed.dtype, config), TMA=tma, num_warps=config.num_warps,
            **overlap(packed.device),
        )  # fmt: skip
    if not layout.gated_norm:
        return grad_packed, torch.zeros_like(norm_weight)
    return grad_packed, part_weight.sum((0, 2)).to(norm_weight.dtype)


def _split(pairs: int, length: int, config: TileConfig, device: torch.device, *, combines: bool) -> tuple[int, int]:
    """Return into how many chunks each row is split, and the positions of a chunk (whole tiles)."""
    return best_split(pairs, length, config, multiprocessors(device), combines)


def _columns_together(x: Tensor) -> Tensor:
    """Return ``x`` with neighbouring columns adjacent; other strides are free, within 32-bit offsets in a tile."""
    return x if x.stride(-1) == 1 and x.stride(1) < _LARGEST_INT32 // _LONGEST_TILE else x.contiguous()


def _descriptors(tensors: list[Tensor], config: TileConfig, dim: int) -> tuple[Any, ...]:
    """Return tensor-memory descriptors of [B, L, P] tensors as [B * L, P], and whether they could be had.

    Where one of them cannot be described, the tensors themselves take the descriptors' places.
    """
    if not (config.tma and all(_is_describable(x) for x in tensors)):
        return *tensors, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [config.block_l, dim]
    shapes = [([x.shape[0] * x.shape[1], x.shape[2]], [x.stride(1), 1]) for x in tensors]
    return *(TensorDescriptor(x, *shape, block) for x, shape in zip(tensors, shapes, strict=True)), True


def _is_describable(x: Tensor) -> bool:
    batch, length, _ = x.shape
    return (
        (batch == 1 or x.stride(0) == length * x.stride(1))
        and x.stride(1) >= x.shape[2]
        and x.data_ptr() % _TMA_ALIGNMENT == 0
        and x.stride(1) * x.element_size() % _TMA_ALIGNMENT == 0
        and 0 < batch * length <= _LARGEST_INT32
    )
