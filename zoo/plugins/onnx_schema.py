"""The ops of domain ``zoo`` as ONNX operator schemas, made from their specs."""

from __future__ import annotations

from onnx import defs

from zoo.plugins.spec import DOMAIN, FLOATS, OPS, AttributeSpec, OpSpec

PLUGIN_ATTRIBUTES = ("plugin_namespace", "plugin_version")
"""String attributes that every ``zoo`` node carries; only TensorRT's parser reads them, to find the plugin."""

_Schema = defs.OpSchema
_ONNX_TYPES = {
    "T": "T",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "float32": "tensor(float)",
    "int32": "tensor(int32)",
}
_ATTRIBUTE_TYPES = {
    "int": _Schema.AttrType.INT,
    "bool": _Schema.AttrType.INT,
    "float": _Schema.AttrType.FLOAT,
    "string": _Schema.AttrType.STRING,
}


def onnx_schema(spec: OpSpec) -> defs.OpSchema:
    """Return the ONNX schema of an op: inputs, outputs and attributes as its spec states them."""
    attributes = [
        _Schema.Attribute(attribute.name, _ATTRIBUTE_TYPES[attribute.kind], _describe(attribute), required=True)
        for attribute in spec.attributes
    ]
    attributes += [
        _Schema.Attribute(name, _Schema.AttrType.STRING, "read by TensorRT's parser only", required=False)
        for name in PLUGIN_ATTRIBUTES
    ]
    return _Schema(
        spec.name,
        DOMAIN,
        spec.version,
        doc=spec.summary,
        inputs=[_parameter(rule.name, rule.dtype, rule.shape) for rule in spec.inputs],
        outputs=[_parameter(rule.name, rule.dtype, rule.shape) for rule in spec.outputs],
        type_constraints=[("T", [_ONNX_TYPES[name] for name in FLOATS], "the node's one floating dtype")],
        attributes=attributes,
    )


def register_schemas() -> None:
    """Make the schemas of all ops known to ``onnx`` in this process; calling it again does nothing."""
    for spec in OPS.values():
        if not defs.has(spec.name, spec.version, DOMAIN):
            defs.register_schema(onnx_schema(spec))


def plugin_attributes(spec: OpSpec) -> dict[str, str]:
    """Return the values of ``PLUGIN_ATTRIBUTES`` for an op."""
    return dict(zip(PLUGIN_ATTRIBUTES, (DOMAIN, str(spec.version)), strict=True))


def _parameter(name: str, dtype: str, shape: tuple[str, ...]) -> defs.OpSchema.FormalParameter:
    return _Schema.FormalParameter(name, _ONNX_TYPES[dtype], f"[{', '.join(shape)}]")


def _describe(attribute: AttributeSpec) -> str:
    if attribute.choices:
        return f"one of {', '.join(attribute.choices)}"
    return "0 or 1" if attribute.kind == "bool" else ""
