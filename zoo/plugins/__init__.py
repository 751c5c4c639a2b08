"""The custom ops as ONNX and TensorRT see them. One OpSpec an op; everything else is made from it."""

from zoo.plugins.spec import DOMAIN, OPS, AttributeSpec, OpSpec, TensorRule, op_spec

__all__ = ["DOMAIN", "OPS", "AttributeSpec", "OpSpec", "TensorRule", "op_spec"]
