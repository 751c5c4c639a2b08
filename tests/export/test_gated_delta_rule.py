"""Modules that hold the gated delta rule: the exported graphs say what PyTorch says, and TensorRT-RTX builds them."""

import importlib.util

import onnx
import pytest
import torch
from torch import nn

from engines.build import build
from engines.manifest import plugins_in_engine
from export import export_part
from export.onnx_export import DTYPES
from tests.export.running import WIDTH, Memory, OnnxRuntime, assert_parity
from zoo.bundle import Bundle
from zoo.kernels import gated_delta_rule
from zoo.models.parts import Part
from zoo.signature import BATCH, LENGTH, Signature, TensorSpec

# Traced at batch 11, length 13.
SIZES = [(1, 1), (3, 7), (4, 40), (2, 0)]


def inputs_of(part, batch, length, dtype):
    """A ragged batch whose padding is NaN, and a state where the part takes one."""
    lengths = torch.tensor([length, 0, 1, length // 2][:batch], dtype=torch.int32).clamp(max=length)
    x = torch.randn(batch, length, WIDTH).to(DTYPES[dtype])
    x = x.masked_fill((torch.arange(length) >= lengths[:, None])[..., None], torch.nan)
    states = [torch.randn(batch, *spec.shape[1:]) for spec in part.signature.inputs if spec.dtype == "fp32"]
    return x, lengths, *states


def node_inputs(path):
    """What comes in front of the one ``zoo`` node: the op type of each input's producer."""
    graph = onnx.load(path).graph
    producers = {name: node.op_type for node in graph.node for name in node.output}
    (node,) = (node for node in graph.node if node.domain == "zoo")
    assert len(node.input) == 7 and all(node.input)
    return [producers.get(name, "input") for name in node.input]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("takes_state", [True, False], ids=["with a state", "without"])
def test_the_exported_graph_equals_pytorch_at_every_size(takes_state, dtype, tmp_path):
    part = Memory((2, 4, 6), takes_state=takes_state).part()
    exported = export_part(part, tmp_path / "memory.onnx", dtype=dtype)
    assert exported.ops == {"GatedDeltaRule": 1}
    run = OnnxRuntime(exported.path)
    for batch, length in SIZES:
        inputs = inputs_of(part, batch, length, dtype)
        assert_parity(run, part, dtype, inputs)
        y, state = run(*inputs)
        assert (y.dtype, state.dtype) == (DTYPES[dtype], torch.float32)


def test_a_state_of_none_becomes_zeros_and_a_half_precision_log_decay_is_cast(tmp_path):
    stateless, stateful = (Memory((2, 4, 6), takes_state=takes_state).part() for takes_state in (False, True))
    without = node_inputs(export_part(stateless, tmp_path / "without.onnx", dtype="fp16").path)
    assert (without[3], without[5]) == ("Cast", "ConstantOfShape")
    single = node_inputs(export_part(stateful, tmp_path / "with.onnx", dtype="fp32").path)
    assert (single[3], single[5]) == ("Neg", "input")


def test_two_layers_of_different_widths_share_one_body(tmp_path):
    part = Memory((2, 4, 6), (3, 5, 2)).part()
    path = export_part(part, tmp_path / "memory.onnx", dtype="fp32").path
    assert [function.name for function in onnx.load(path).functions] == ["GatedDeltaRule"]
    for batch, length in SIZES:
        assert_parity(OnnxRuntime(path), part, "fp32", inputs_of(part, batch, length, "fp32"))


class SinglePrecisionGates(nn.Module):
    """Gates in float32 whatever the dtype of the part, as mixed-precision models compute them."""

    def forward(self, x, lengths):
        x = x.unsqueeze(2)
        gate = x.float().mean(-1)
        return gated_delta_rule(x, x, x, -gate.square(), gate.sigmoid(), None, lengths, normalize=True)[0].flatten(2)


def test_float32_gates_of_a_half_precision_part_fit_the_node(tmp_path):
    shape = (BATCH, LENGTH, WIDTH)
    inputs = TensorSpec("x", "float", shape), TensorSpec("lengths", "int32", (BATCH,), limit=LENGTH)
    part = Part("gates", SinglePrecisionGates(), Signature(inputs, (TensorSpec("y", "float", shape),)))
    path = export_part(part, tmp_path / "gates.onnx", dtype="fp16").path
    assert (node_inputs(path)[3], node_inputs(path)[4]) == ("Neg", "Cast")
    for batch, length in SIZES:
        assert_parity(OnnxRuntime(path), part, "fp16", inputs_of(part, batch, length, "fp16"))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="tensorrt_rtx_bindings is not installed: pip install 'trt-zoo[rtx]'",
)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("takes_state", [True, False], ids=["with a state", "without"])
def test_tensorrt_builds_the_exported_graph_with_our_plugin(takes_state, dtype, tmp_path):
    part = Memory((2, 16, 24), takes_state=takes_state).part()
    bundle = Bundle.create(tmp_path, config={"model": "test"}, signatures={part.name: part.signature})
    name = f"onnx/{part.name}-{dtype}.onnx"
    export_part(part, tmp_path / name, dtype=dtype)
    bundle.update([name])
    (record,) = build(bundle, dtype=dtype, lengths=(16,), batch=(1, 2, 4), targets=("sm89",))
    assert plugins_in_engine(record.path) == {"GatedDeltaRule": 1}
