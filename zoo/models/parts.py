"""A part: a module that becomes one ONNX graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.signature import Signature


@dataclass(frozen=True)
class Part:
    """A named module taking and returning positional tensors as its signature says."""

    name: str
    module: nn.Module
    signature: Signature
