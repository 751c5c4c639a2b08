"""Launch parameters of the Triton kernels, and the functions that launch them.

The parameters are a table, not a search: they depend on head width, element size and compute capability, and how far a
row is split depends on the number of rows, heads, positions and multiprocessors. No length is ever tuned while serving,
and the tests run every entry that the table can give.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.launch import Choice, capability, choose_triton, multiprocessors

HEAD_DIMS = (16, 32, 64, 128)
_WITH_TMA = range(90, 120)
"""Data-centre Hopper and Blackwell; 12.x has less shared memory and takes the older table."""
_FIRST_WITH_OVERLAP = 90
_LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""99 KB a program."""
_TMA_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1
_LONGEST_TILE = 128


@dataclass(frozen=True)
class TileConfig:
    """How one kernel walks its tiles.

    Attributes:
        block_l: positions a tile.
        num_warps: warps a program.
        num_stages: tiles in flight.
        resident: programs that run on one multiprocessor at a time, as measured or as registers allow.
        tma: move tiles with the tensor memory accelerator (compute capability 9.0 and up).
        splits: chunks of a row; 0 for what ``_split`` finds best.
    """

    block_l: int
    num_warps: int
    num_stages: int
    resident: int
    tma: bool = False
    splits: int = 0


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


def forward_config(kernel: str, head_dim: int, dtype: torch.dtype, capability: int) -> TileConfig:
    """Return the parameters of ``reduce`` or ``apply``."""
    return (_FORWARD if capability in _WITH_TMA else _FORWARD_OLDER)[kernel, head_dim, dtype.itemsize]


def backward_config(kernel: str, head_dim: int, dtype: torch.dtype, capability: int) -> TileConfig:
    """Return the parameters of ``queries`` or ``keys``, the two passes of the backward."""
    operand = gradient_dot_dtype(dtype).itemsize
    return (_BACKWARD if capability in _WITH_TMA else _BACKWARD_OLDER)[kernel, head_dim, operand]


_FORWARD = {
    ("reduce", 16, 2): TileConfig(128, 4, 3, resident=3, tma=True),
    ("reduce", 32, 2): TileConfig(128, 4, 3, resident=3, tma=True),
    ("reduce", 64, 2): TileConfig(64, 4, 3, resident=3, tma=True),
    ("reduce", 128, 2): TileConfig(64, 8, 3, resident=1, tma=True),
    ("reduce", 16, 4): TileConfig(64, 4, 2, resident=6),
    ("reduce", 32, 4): TileConfig(64, 4, 2, resident=3),
    ("reduce", 64, 4): TileConfig(32, 4, 1, resident=2),
    ("reduce", 128, 4): TileConfig(32, 8, 1, resident=1),
    ("apply", 16, 2): TileConfig(128, 4, 3, resident=6, tma=True),
    ("apply", 32, 2): TileConfig(128, 4, 3, resident=4, tma=True),
    ("apply", 64, 2): TileConfig(64, 4, 3, resident=4, tma=True),
    ("apply", 128, 2): TileConfig(64, 8, 3, resident=1, tma=True),
    ("apply", 16, 4): TileConfig(64, 4, 2, resident=4),
    ("apply", 32, 4): TileConfig(64, 4, 2, resident=2),
    ("apply", 64, 4): TileConfig(32, 4, 1, resident=2),
    ("apply", 128, 4): TileConfig(16, 8, 1, resident=2),
}
_BACKWARD = {
    ("queries", 16, 2): TileConfig(128, 4, 3, resident=2, tma=True),
    ("queries", 32, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("queries", 64, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("queries", 128, 2): TileConfig(64, 8, 2, resident=1, tma=True),
    ("queries", 16, 4): TileConfig(64, 4, 2, resident=2),
    ("queries", 32, 4): TileConfig(32, 4, 2, resident=2),
    ("queries", 64, 4): TileConfig(16, 4, 1, resident=2),
    ("queries", 128, 4): TileConfig(16, 8, 1, resident=1),
    ("keys", 16, 2): TileConfig(128, 4, 3, resident=4, tma=True),
    ("keys", 32, 2): TileConfig(128, 4, 3, resident=2, tma=True),
    ("keys", 64, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("keys", 128, 2): TileConfig(64, 8, 2, resident=1, tma=True),
    ("keys", 16, 4): TileConfig(64, 4, 2, resident=3),
    ("keys", 32, 4): TileConfig(32, 4, 2, resident=2),
    ("keys", 64, 4): TileConfig(16, 4, 1, resident=2),
    ("keys", 128, 4): TileConfig(16, 8, 1, resident=1),
}
"""By kernel, head width and bytes of an operand. Head width 64 in bfloat16 was tuned on an H200 (docs/kernels.md); the
others follow it as far as registers and shared memory allow, and are checked but not tuned."""


def _without_tma(table: dict[tuple[str, int, int], TileConfig]) -> dict[tuple[str, int, int], TileConfig]:
    """Return a table for GPUs with no tensor memory accelerator and less shared memory."""
    return {
        key: TileConfig(min(c.block_l, 32), c.num_warps, min(c.num_stages, 2), c.resident) for key, c in table.items()
    }


_FORWARD_OLDER = _without_tma(_FORWARD)
_BACKWARD_OLDER = _without_tma(_BACKWARD)
_MOST_WAVES = 4
_TILES_TO_START = 3
_TILES_TO_COMBINE = 6
_TILES_A_PROGRAM = 16
COMBINE_WARPS = 4


def gradient_dot_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what the operands of gradient products are: float16 gradients need float32's range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def gradient_dtype(dtype: torch.dtype, head_dim: int, capability: int) -> torch.dtype:
    """Return the dtype that the backward runs in: another where the kernels for ``dtype`` need too much shared memory.

    Those for float16 at head width 128 hold two states at once as widened operands; those for float32 hold one.
    """
    too_large = dtype == torch.float16 and head_dim == 128 and capability in _LITTLE_SHARED_MEMORY
    return torch.float32 if too_large else dtype


def constants(kernel: str, layout: PackedLayout, dtype: torch.dtype, config: TileConfig) -> dict[str, Any]:
    """Return a kernel's compile-time arguments; TMA and FINAL are the launch's to say."""
    import triton.language as tl

    found: dict[str, Any] = {"D": layout.head_dim, "BLOCK_L": config.block_l, "STAGES": config.num_stages}
    if kernel in ("reduce", "keys"):
        found["KEY_GATE"] = layout.key_gate
    if kernel in ("apply", "queries"):
        found["GATED_NORM"] = layout.gated_norm
    if kernel != "keys":
        found["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
    if kernel in ("queries", "keys"):
        found["DOT"] = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
        found["DOT_PRECISION"] = _dot_precision(dtype)
    return found


def _dot_precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float16 else "ieee"


def overlap(device: torch.device) -> dict[str, bool]:
    """Return the launch options that let a kernel be launched while the one before it still runs (9.0 and up)."""
    able = device.type == "cuda" and capability(device) >= _FIRST_WITH_OVERLAP
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


def combine_constants(head_dim: int) -> dict[str, Any]:
    """Return the compile-time arguments of both combine kernels."""
    return {"D": head_dim, "COLUMNS": min(32, head_dim), "STAGES": 3}


def configs(capability: int) -> dict[str, dict[tuple[int, int], TileConfig]]:
    """Return every entry of the table that a capability can pick: kernel -> (head width, bytes of an operand) -> it."""
    tables = (_FORWARD, _BACKWARD) if capability in _WITH_TMA else (_FORWARD_OLDER, _BACKWARD_OLDER)
    found: dict[str, dict[tuple[int, int], TileConfig]] = {}
    for table in tables:
        for (kernel, head_dim, operand), config in table.items():
            found.setdefault(kernel, {})[head_dim, operand] = config
    return found


def reduce_state(packed: Tensor, lengths: Tensor, layout: PackedLayout, config: TileConfig | None = None) -> State:
    """Return the state of every row and head of ``packed`` [B, L, P]; zeros for empty rows."""
    from zoo.kernels.gated_bidirectional_linear_attention.triton_forward import combine_kernel, reduce_kernel

    packed = _columns_together(packed)
    batch, length, _ = packed.shape
    heads, dim = layout.num_heads, layout.head_dim
    config = config or forward_config("reduce", dim, packed.dtype, capability(packed.device))
    float32: dict[str, Any] = {"dtype": torch.float32, "device": packed.device}
    state = State(
        torch.empty(batch, heads, dim, dim, dtype=packed.dtype, device=packed.device),
        torch.empty(batch, heads, dim, **float32),
        torch.empty(batch, heads, 2, **float32),
    )
    if batch == 0:
        return state
    splits, chunk = _split(batch * heads, length, config, packed.device, combines=True)
    parts: tuple[Tensor, ...] = (state.log_z,) * 4
    if splits > 1:
        sizes = ((dim, dim), (dim,), (dim,), ())
        parts = tuple(torch.empty(batch, heads, splits, *size, **float32) for size in sizes)
    desc, tma = _descriptors([packed], config, dim)
    with _on_device(packed):
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
    with _on_device(packed):
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
    with _on_device(packed):
        backward_queries_kernel[(batch * heads * splits,)](
            grad, grad_desc, packed, desc, lengths, state.values, state.log_z, norm_weight, grad_packed, out_desc,
            part_state, part_z, part_weight,
            length, heads, splits, chunk, grad.stride(0), grad.stride(1), packed.stride(0), packed.stride(1), width,
            layout.query, layout.residual_gate or 0, eps,
            **constants("queries", layout, packed.dtype, config), TMA=tma, num_warps=config.num_warps,
            **overlap(packed.device),
        )  # fmt: skip
        combine = combine_constants(dim) | {"DOT_PRECISION": _dot_precision(packed.dtype)}
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
    return _best_split(pairs, length, config, multiprocessors(device), combines)


@functools.lru_cache(maxsize=4096)
def _best_split(pairs: int, length: int, config: TileConfig, processors: int, combines: bool) -> tuple[int, int]:
    """Return the split with the lowest cost, the smallest of equals.

    Programs run in waves of as many as fit. A program costs its tiles and a fixed part, and a second kernel that
    combines chunks costs another. Where chunks need no combining and rows are long, programs of sixteen tiles do better
    than one wave: they even out the multiprocessors.
    """
    tiles = max(1, -(-length // config.block_l))
    slots = config.resident * processors

    def cost(splits: int) -> int:
        waves = -(-pairs * splits // slots)
        return waves * (-(-tiles // splits) + _TILES_TO_START) + (_TILES_TO_COMBINE if combines and splits > 1 else 0)

    most = min(tiles, _MOST_WAVES * slots // pairs + 1)
    best = min(range(1, most + 1), key=cost)
    if not combines:
        best = max(best, tiles // _TILES_A_PROGRAM)
    splits = min(config.splits or best, tiles)
    tiles_each = -(-tiles // splits)
    return -(-tiles // tiles_each), tiles_each * config.block_l


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


def _on_device(x: Tensor) -> Any:
    """Launch on the device of ``x``, whichever is current."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
