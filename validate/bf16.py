"""A bfloat16 graph as a float32 graph that rounds to bfloat16 after every node.

ONNX Runtime has no bfloat16 MatMul on the CPU, and ONNX's reference evaluator sums products in bfloat16, which no GPU
does. In the rewritten graph every bfloat16 tensor is held in float32 and rounded where the original would have stored
it, so products are summed in float32 as on a tensor core. Weights are exact: each bfloat16 is a float32.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from zoo.errors import ParityError

_BF16, _FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def hold_bf16_in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 graph that computes what the bfloat16 graph ``model`` does; its inputs and outputs are float32.

    Raises:
        ParityError: the graph does not say the dtype of some tensor, so it cannot be rewritten.
    """
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    dtypes = _tensor_dtypes(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        node = _in_fp32(node)
        rounded: list[NodeProto] = []
        for index, name in enumerate(node.output):
            if name and name not in dtypes:
                raise ParityError(f"the graph does not say the dtype of {name}; export it again")
            if name and dtypes[name] == _BF16:
                node.output[index] = f"{name}.unrounded"
                rounded += _round(node.output[index], name)
        nodes += [node, *rounded]
    del graph.node[:]
    graph.node.extend(nodes)
    for initializer in graph.initializer:
        if initializer.data_type == _BF16:
            values = numpy_helper.to_array(initializer).astype("float32")
            initializer.CopyFrom(numpy_helper.from_array(values, initializer.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = _FP32
    del graph.value_info[:]
    return rewritten


def _tensor_dtypes(graph: onnx.GraphProto) -> dict[str, int]:
    values: list[ValueInfoProto] = [*graph.input, *graph.output, *graph.value_info]
    dtypes = {value.name: value.type.tensor_type.elem_type for value in values}
    return dtypes | {initializer.name: initializer.data_type for initializer in graph.initializer}


def _in_fp32(node: NodeProto) -> NodeProto:
    """Return a copy whose attributes say float32 where they said bfloat16: casts and constants."""
    copy = NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _BF16:
            attribute.i = _FP32
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == _BF16:
            values = numpy_helper.to_array(attribute.t).astype("float32")
            attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))
    return copy


def _round(source: str, name: str) -> list[NodeProto]:
    narrow = f"{name}.bf16"
    return [
        helper.make_node("Cast", [source], [narrow], to=_BF16),
        helper.make_node("Cast", [narrow], [name], to=_FP32),
    ]
