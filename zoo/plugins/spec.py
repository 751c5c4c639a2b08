"""What each custom op is, stated once.

From an OpSpec come the ONNX schema, the exporter's translation, the TensorRT plugin fields and the docs table.
Imports neither ONNX nor TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import ConfigError
from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout

DOMAIN = "zoo"
"""ONNX domain, torch.library namespace and TensorRT plugin namespace of every custom op."""

FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes that the ``"T"`` tensors of a node may have in a graph; they share one."""


@dataclass(frozen=True)
class TensorRule:
    """One input or output of an op.

    Attributes:
        name: as in the PyTorch schema and the ONNX schema.
        dtype: ``"T"`` for the node's floating dtype, ``"float32"`` or ``"int32"`` for one that never changes.
        shape: one letter a dimension; equal letters are equal sizes within a node.
        optional: PyTorch takes None for it, which is zeros; nodes always have it.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute: an ONNX attribute, a TensorRT plugin field and a PyTorch argument of the same name.

    Attributes:
        name: the name in all three.
        kind: ``"int"``, ``"float"``, ``"bool"`` (an ONNX int, 0 or 1) or ``"string"``.
        choices: the allowed values of a string.
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpSpec:
    """One custom op.

    Attributes:
        name: ONNX op type and TensorRT plugin name.
        torch_name: name under ``torch.ops.zoo``; its arguments are the inputs and then the attributes, in order.
        version: ONNX operator-set version of the domain and TensorRT plugin version. It rises whenever a field, a
            shape, the meaning or the workspace formula changes.
        inputs: in order.
        outputs: in order.
        attributes: in order.
        summary: one sentence for the schema and the docs.
        fixed_sizes: from the attributes, the sizes of the letters that they determine.
    """

    name: str
    torch_name: str
    version: int
    inputs: tuple[TensorRule, ...]
    outputs: tuple[TensorRule, ...]
    attributes: tuple[AttributeSpec, ...]
    summary: str
    fixed_sizes: Callable[[Mapping[str, Any]], dict[str, int]] = lambda attributes: {}

    @property
    def size_sources(self) -> dict[str, tuple[int, int]]:
        """The first (input, axis) that has each letter, looked for in inputs that are always given."""
        places: dict[str, tuple[int, int]] = {}
        for index, rule in enumerate(self.inputs):
            for axis, letter in enumerate(() if rule.optional else rule.shape):
                places.setdefault(letter, (index, axis))
        return places


def _attention_sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    heads, head_dim = int(attributes["num_heads"]), int(attributes["head_dim"])
    layout = PackedLayout(heads, head_dim, bool(attributes["key_gate"]), bool(attributes["gated_norm"]))
    return {"H": heads, "D": head_dim, "P": layout.width, "E": layout.inner}


CAUSAL_SHORT_CONV = OpSpec(
    name="CausalShortConv",
    torch_name="causal_short_conv",
    version=1,
    inputs=(
        TensorRule("x", "T", ("B", "L", "C")),
        TensorRule("weight", "T", ("C", "W")),
        TensorRule("lengths", "int32", ("B",)),
    ),
    outputs=(TensorRule("y", "T", ("B", "L", "C")),),
    attributes=(AttributeSpec("activation", "string", ("none", "silu")),),
    summary="Depthwise causal convolution over a ragged batch, left-padded, without bias, with optional SiLU.",
)

GATED_BIDIRECTIONAL_LINEAR_ATTENTION = OpSpec(
    name="GatedBidirectionalLinearAttention",
    torch_name="gated_bidirectional_linear_attention",
    version=1,
    inputs=(
        TensorRule("packed", "T", ("B", "L", "P")),
        TensorRule("norm_weight", "T", ("H", "D")),
        TensorRule("lengths", "int32", ("B",)),
    ),
    outputs=(TensorRule("y", "T", ("B", "L", "E")),),
    attributes=(
        AttributeSpec("num_heads", "int"),
        AttributeSpec("head_dim", "int"),
        AttributeSpec("eps", "float"),
        AttributeSpec("key_gate", "bool"),
        AttributeSpec("gated_norm", "bool"),
    ),
    summary="Gated bidirectional linear attention over a packed projection, with a gated RMSNorm epilogue.",
    fixed_sizes=_attention_sizes,
)

GATED_DELTA_RULE = OpSpec(
    name="GatedDeltaRule",
    torch_name="gated_delta_rule",
    version=1,
    inputs=(
        TensorRule("q", "T", ("B", "T", "H", "K")),
        TensorRule("k", "T", ("B", "T", "H", "K")),
        TensorRule("v", "T", ("B", "T", "H", "V")),
        # Logarithms add up over a history, so their rounding would too.
        TensorRule("log_decay", "float32", ("B", "T", "H")),
        TensorRule("beta", "T", ("B", "T", "H")),
        TensorRule("initial_state", "float32", ("B", "H", "K", "V"), optional=True),
        TensorRule("lengths", "int32", ("B",)),
    ),
    outputs=(
        TensorRule("o", "T", ("B", "T", "H", "V")),
        TensorRule("final_state", "float32", ("B", "H", "K", "V")),
    ),
    attributes=(AttributeSpec("scale", "float"), AttributeSpec("normalize", "bool")),
    summary="Gated delta rule over a ragged batch: a decaying memory that keys overwrite and queries read.",
)

OPS = {spec.name: spec for spec in (CAUSAL_SHORT_CONV, GATED_BIDIRECTIONAL_LINEAR_ATTENTION, GATED_DELTA_RULE)}


def op_spec(name: str) -> OpSpec:
    """Return the spec of an op by its ONNX name.

    Raises:
        ConfigError: no such op.
    """
    if name not in OPS:
        raise ConfigError(f"there is no op {name!r} in domain {DOMAIN!r}; it has {', '.join(OPS)}")
    return OPS[name]
