"""Ways to run a part: PyTorch, ONNX Runtime, the ONNX reference evaluator. All take and give named torch tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from zoo.models.parts import Part
from zoo.signature import Signature

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Executor(Protocol):
    """Anything that runs one part."""

    name: str

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name."""


class TorchExecutor:
    """The part's module in PyTorch, its weights and floating inputs converted to ``dtype``."""

    def __init__(self, part: Part, dtype: torch.dtype) -> None:
        self.name = f"torch {str(dtype).removeprefix('torch.')}"
        self.signature = part.signature
        self.dtype = dtype
        self.module = copy.deepcopy(part.module).to(dtype).eval()

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run; floating inputs are converted first."""
        values = [inputs[spec.name] for spec in self.signature.inputs]
        values = [value.to(self.dtype) if value.is_floating_point() else value for value in values]
        outputs = self.module(*values)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {spec.name: value for spec, value in zip(self.signature.outputs, outputs, strict=True)}


class OrtExecutor:
    """The exported file in ONNX Runtime on the CPU: custom ops run through their function bodies. No bfloat16."""

    def __init__(self, path: Path, signature: Signature) -> None:
        self.name = "onnxruntime"
        self.signature = signature
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run; inputs must have the dtypes of the file."""
        feeds = {spec.name: inputs[spec.name].numpy() for spec in self.signature.inputs}
        names = [spec.name for spec in self.signature.outputs]
        return {n: torch.from_numpy(v) for n, v in zip(names, self.session.run(names, feeds), strict=True)}


class ReferenceExecutor:
    """The exported file in ONNX's own reference evaluator: slow, but it knows bfloat16."""

    def __init__(self, path: Path, signature: Signature) -> None:
        self.name = "onnx reference"
        self.signature = signature
        self.evaluator = ReferenceEvaluator(onnx.load(path))

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run; inputs must have the dtypes of the file."""
        feeds = {spec.name: _to_numpy(inputs[spec.name]) for spec in self.signature.inputs}
        names = [spec.name for spec in self.signature.outputs]
        return {n: _from_numpy(v) for n, v in zip(names, self.evaluator.run(names, feeds), strict=True)}


def onnx_executor(path: Path, signature: Signature, dtype: str) -> Executor:
    """Return the fastest executor on this machine that runs a file of ``dtype``."""
    return ReferenceExecutor(path, signature) if dtype == "bf16" else OrtExecutor(path, signature)


def _to_numpy(value: Tensor) -> np.ndarray:
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _from_numpy(value: np.ndarray) -> Tensor:
    value = np.ascontiguousarray(value)
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())
