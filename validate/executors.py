"""Ways to run a part: PyTorch and ONNX Runtime. Both take and give named torch tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from export.onnx_export import floating_dtype
from validate.bf16 import hold_bf16_in_fp32
from zoo.layers import ResidualQuantizer
from zoo.models.parts import Part
from zoo.signature import Signature, TensorSpec


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
    def __call__(self, inputs: Mapping[str, Tensor], codes: Tensor | None = None) -> dict[str, Tensor]:
        """Run; floating inputs are converted first.

        Args:
            inputs: by name.
            codes: int64 [B, L, R], which the quantiser of a part that has one takes instead of the nearest.
        """
        values = [(spec, inputs[spec.name]) for spec in self.signature.inputs]
        with _choosing(self.module, codes):
            outputs = self.module(
                *(x.to(floating_dtype(spec, self.dtype)) if x.is_floating_point() else x for spec, x in values)
            )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {spec.name: value for spec, value in zip(self.signature.outputs, outputs, strict=True)}


@contextmanager
def _choosing(module: nn.Module, codes: Tensor | None) -> Iterator[None]:
    """Within, the quantiser in ``module`` chooses ``codes``, moved into its range, if they are given."""
    quantizers = [found for found in module.modules() if isinstance(found, ResidualQuantizer) and codes is not None]

    try:
        for quantizer in quantizers:
            assert codes is not None
            quantizer.chosen = codes.clamp(0, quantizer.codebooks.shape[1] - 1)
        yield
    finally:
        for quantizer in quantizers:
            quantizer.chosen = None


class OrtExecutor:
    """The exported file in ONNX Runtime on the CPU: custom ops run through their function bodies.

    A bfloat16 file is rewritten first (``validate.bf16``); it then takes and gives bfloat16 tensors like the original.
    """

    def __init__(self, path: Path, signature: Signature, dtype: str) -> None:
        self.name = "onnxruntime"
        self.signature = signature
        self.holds_bf16 = dtype == "bf16"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        source: str | bytes = str(path)
        if self.holds_bf16:
            # Constant folding would fold the roundings of weights away.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            source = hold_bf16_in_fp32(onnx.load(path)).SerializeToString()
        self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run; inputs must have the dtypes of the file."""
        feeds = {spec.name: self._feed(inputs[spec.name]) for spec in self.signature.inputs}
        specs = self.signature.outputs
        outputs = zip(specs, self.session.run([spec.name for spec in specs], feeds), strict=True)
        return {spec.name: self._output(spec, torch.from_numpy(value)) for spec, value in outputs}

    def _feed(self, value: Tensor) -> np.ndarray:
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    def _output(self, spec: TensorSpec, value: Tensor) -> Tensor:
        return value.to(torch.bfloat16) if self.holds_bf16 and spec.dtype == "float" else value
