"""The named, symbolically shaped inputs and outputs of a part.

One description serves the exporter's dynamic shapes, the engine profiles, the validator's inputs and the C++ server.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BATCH, LENGTH, BEAMS = "batch", "length", "beams"
"""The symbols that a dynamic dimension may have."""

BEFORE = "_before"
"""An input that ends so is a state: the output of its name without this, of an earlier part or an earlier run."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a part.

    Attributes:
        name: as in the ONNX graph and the engine.
        dtype: ``"float"`` (whatever dtype the part is exported in), ``"fp32"`` (float32 whatever that is, as states
            are), ``"int64"`` or ``"int32"``.
        shape: a number for a fixed dimension, a symbol for a dynamic one.
        meaning: one phrase for docs and error messages.
        limit: for integer inputs, valid values lie in [0, limit); a symbol means [0, that dimension], ends included.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    meaning: str = ""
    limit: int | str | None = None

    def resolved_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with each symbol replaced by its size."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form; ``from_json`` reads it back."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorSpec:
        """Read what ``to_json`` wrote."""
        return cls(value["name"], value["dtype"], tuple(value["shape"]), value["meaning"], value["limit"])


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one part, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that dimensions of the part have."""
        return frozenset(dim for spec in (*self.inputs, *self.outputs) for dim in spec.shape if isinstance(dim, str))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form; ``from_json`` reads it back."""
        return {
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Read what ``to_json`` wrote."""
        return cls(
            tuple(TensorSpec.from_json(spec) for spec in value["inputs"]),
            tuple(TensorSpec.from_json(spec) for spec in value["outputs"]),
        )
