"""Small graphs with zoo nodes, and bundles that hold them, made by hand: these tests need no model and no exporter."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from zoo.bundle import Bundle
from zoo.kernels import packed_width
from zoo.signature import BATCH, LENGTH, Signature, TensorSpec

HEADS, HEAD_DIM = 2, 32
WIDTH = packed_width(HEADS, HEAD_DIM)
DTYPES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
PLUGIN = {"plugin_namespace": "zoo", "plugin_version": "1"}


def model(dtype="fp16", *, width=WIDTH, bodies=False, seed=0, plugin=PLUGIN, softmax_attention=False, taps_dtype=None):
    """A convolution, then gated bidirectional linear attention; with ``bodies``, the ops have stand-in functions."""
    rng = np.random.default_rng(seed)
    element = DTYPES[dtype]

    def constant(name, shape, kind=element):
        return helper.make_tensor(name, kind, shape, rng.standard_normal(shape).astype(np.float32).ravel())

    nodes = [
        helper.make_node(
            "CausalShortConv", ["x", "taps", "lengths"], ["mixed"], "conv", domain="zoo", activation="silu", **plugin
        ),
        helper.make_node(
            "GatedBidirectionalLinearAttention",
            ["mixed", "norm_weight", "lengths"],
            ["attended"],
            "attention",
            domain="zoo",
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            eps=1e-6,
            key_gate=1,
            gated_norm=1,
            **plugin,
        ),
    ]
    if softmax_attention:
        nodes += _softmax_attention("attended", "y")
    else:
        nodes.append(helper.make_node("Identity", ["attended"], ["y"], "last"))
    graph = helper.make_graph(
        nodes,
        "small",
        [
            helper.make_tensor_value_info("x", element, [BATCH, LENGTH, width]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, [BATCH]),
        ],
        [helper.make_tensor_value_info("y", element, [BATCH, LENGTH, HEADS * HEAD_DIM])],
        [constant("taps", [width, 4], DTYPES[taps_dtype or dtype]), constant("norm_weight", [HEADS, HEAD_DIM])],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("zoo", 1)]
    functions = _bodies(opsets[:1]) if bodies else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def _softmax_attention(x, y):
    """Self-attention over [B, L, H * D] as the exporter writes it: heads in a dimension of their own."""
    shapes = [
        helper.make_node("Constant", [], ["split_heads"], value_ints=[0, 0, HEADS, HEAD_DIM]),
        helper.make_node("Constant", [], ["joined_heads"], value_ints=[0, 0, HEADS * HEAD_DIM]),
    ]
    nodes = []
    for name, function in (("q", "Sigmoid"), ("k", "Tanh"), ("v", "Relu")):
        nodes += [
            helper.make_node(function, [x], [f"{name}_flat"]),
            helper.make_node("Reshape", [f"{name}_flat", "split_heads"], [f"{name}_split"]),
            helper.make_node("Transpose", [f"{name}_split"], [name], perm=[0, 2, 1, 3]),
        ]
    return [
        *shapes,
        *nodes,
        helper.make_node("Attention", ["q", "k", "v"], ["o"], "softmax"),
        helper.make_node("Transpose", ["o"], ["o_split"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["o_split", "joined_heads"], [y]),
    ]


def _bodies(opsets):
    """Functions of the right types and shapes; what they compute does not matter here."""
    conv = helper.make_function(
        "zoo",
        "CausalShortConv",
        ["x", "weight", "lengths"],
        ["y"],
        [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])],
        opsets,
        ["activation", "plugin_namespace", "plugin_version"],
    )
    inner = HEADS * HEAD_DIM
    take = helper.make_node("Constant", [], ["sizes"], value_ints=[inner, WIDTH - inner])
    split = helper.make_node("Split", ["packed", "sizes"], ["y", "rest"], axis=2)
    names = ["num_heads", "head_dim", "eps", "key_gate", "gated_norm", "plugin_namespace", "plugin_version"]
    attention = helper.make_function(
        "zoo",
        "GatedBidirectionalLinearAttention",
        ["packed", "norm_weight", "lengths"],
        ["y"],
        [take, split],
        opsets,
        names,
    )
    return [conv, attention]


def signature(width=WIDTH):
    lengths = TensorSpec("lengths", "int32", (BATCH,), "valid positions", LENGTH)
    return Signature(
        (TensorSpec("x", "float", (BATCH, LENGTH, width)), lengths),
        (TensorSpec("y", "float", (BATCH, LENGTH, HEADS * HEAD_DIM)),),
    )


def bundle(folder: Path, dtype="fp16", **options) -> Bundle:
    made = Bundle.create(folder, config={"model": "test"}, signatures={"mixer": signature(options.get("width", WIDTH))})
    put(made, dtype, **options)
    return made


def put(made: Bundle, dtype="fp16", **options) -> None:
    """Write the graph into the bundle, over what is there."""
    name = f"onnx/mixer-{dtype}.onnx"
    (made.path / "onnx").mkdir(exist_ok=True)
    onnx.save(model(dtype, **options), made.path / name)
    made.update([name])
