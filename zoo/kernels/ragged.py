"""Ragged batches: right-padded tensors [B, L, ...] with ``lengths`` int32 [B]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zoo.errors import ConfigError, DTypeError, ShapeError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def valid_positions(lengths: Tensor, length: int) -> Tensor:
    """Return a bool mask [B, L], true where position < lengths[b]. Lengths outside [0, L] act as if clamped to it."""
    return torch.arange(length, device=lengths.device) < lengths.unsqueeze(-1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and states: float64 for float64 input, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_sequence(op: str, name: str, x: Tensor, lengths: Tensor) -> None:
    """Raise unless ``x`` is a floating [B, L, ...] tensor and ``lengths`` an int32 [B] tensor on the same device."""
    if x.dim() != 3:
        raise ShapeError(f"{op}: {name} has shape {list(x.shape)}, but three dimensions [B, L, channels] are needed")
    if x.dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{op}: {name} has dtype {x.dtype}; give it float16, bfloat16, float32 or float64")
    if lengths.dtype != torch.int32:
        raise DTypeError(f"{op}: lengths has dtype {lengths.dtype}; convert it with lengths.to(torch.int32)")
    if lengths.dim() != 1:
        raise ShapeError(
            f"{op}: lengths has shape {list(lengths.shape)}, but one length a row of {name} is needed: [B]"
        )
    if lengths.device != x.device:
        raise ShapeError(f"{op}: {name} is on {x.device} and lengths on {lengths.device}; move both to one device")


def check_tensors(op: str, **tensors: Tensor) -> None:
    """Raise unless all are tensors, and in forward-mode differentiation.

    A custom op has no derivative of that mode, and torch would take it for zero. Under ``torch.compile`` no tensor can
    be asked for its tangent, so there it is refused wherever forward-mode differentiation is on.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise DTypeError(f"{op}: {name} is of type {type(value).__name__}, but a tensor is needed")
    if torch.compiler.is_compiling():
        differentiates = forward_ad._current_level >= 0
    else:
        differentiates = any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors.values())
    if differentiates:
        raise ConfigError(f"{op}: it has no forward-mode derivative (jvp, jacfwd); use torch.autograd")


def check_device(op: str, name: str, value: Tensor, x: Tensor) -> None:
    """Raise unless ``value`` lies where the sequence ``x`` does."""
    if value.device != x.device:
        raise ShapeError(f"{op}: {name} is on {value.device} and the sequence on {x.device}; move both to one device")


def check_batch(op: str, name: str, x: Tensor, lengths: Tensor) -> None:
    """Raise unless ``x`` and ``lengths`` have the same batch size (real tensors only: it would guard a dynamic one)."""
    if lengths.shape[0] != x.shape[0]:
        raise ShapeError(f"{op}: {name} has {x.shape[0]} rows, but lengths has {lengths.shape[0]}; they must be equal")
