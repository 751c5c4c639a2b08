"""A custom op run on raw device pointers, as a plugin's enqueue gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import zoo.kernels  # noqa: F401  registers torch.ops.zoo
from zoo.plugins.spec import DOMAIN, OpSpec

_TYPESTR = {"float16": "<f2", "bfloat16": "<i2", "float32": "<f4", "int32": "<i4", "int64": "<i8"}
"""How the CUDA array interface names each dtype; it knows no bfloat16, so that travels as int16 and is viewed."""


class _DeviceArray:
    """A device pointer as the CUDA array interface describes it."""

    def __init__(self, pointer: int, shape: Sequence[int], dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (int(pointer), False),
            "shape": tuple(shape),
            "typestr": _TYPESTR[dtype],
            "strides": None,
            "version": 3,
        }


def device_tensor(pointer: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Return the contiguous device memory at ``pointer`` as a tensor, without a copy; the caller keeps it alive."""
    torch_dtype = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=torch_dtype, device="cuda")
    return torch.as_tensor(_DeviceArray(pointer, shape, dtype), device="cuda").view(torch_dtype)


def run_on_stream(
    spec: OpSpec, arguments: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], stream: int
) -> None:
    """Run ``torch.ops.zoo.<op>`` on ``inputs`` and the attribute values, into ``outputs``, all on ``stream``."""
    operator = getattr(getattr(torch.ops, DOMAIN), spec.torch_name)
    lane = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
    with torch.no_grad(), torch.cuda.stream(lane):
        results = operator(*inputs, *arguments)
        for output, result in zip(outputs, (results,) if isinstance(results, Tensor) else results, strict=True):
            output.copy_(result)
