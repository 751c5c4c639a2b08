"""One flipped bit in a weight is found, whatever the exporter did to the weight."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from export import compare_weights, export_part
from tests.export.running import small_part


class Mixed(nn.Module):
    """A transposed weight, a bias, two equal norms that become one initializer, a table read by row, a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norms = nn.ModuleList([nn.RMSNorm(8), nn.RMSNorm(8)])
        self.table = nn.Embedding(100, 8)
        self.register_buffer("hashes", torch.tensor([3, 5, 7, 11, 13]), persistent=False)

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        rows = (x.sum(-1) > 0).long().unsqueeze(-1) * self.hashes
        return self.linear(x) + self.table(rows).sum(-2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    module = Mixed()
    path = export_part(small_part(module, width=8), tmp_path_factory.mktemp("weights") / "a.onnx", dtype="fp32").path
    return path, module.state_dict()


def flipped(path, out, name):
    model = onnx.load(path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array.view(f"u{array.dtype.itemsize}").reshape(-1)[-1] ^= 1
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(model, out)
    return out


def test_an_export_agrees_with_its_checkpoint(exported):
    assert compare_weights(*exported, "fp32") == []


@pytest.mark.parametrize(
    ("initializer", "sentence"),
    [
        ("table.weight", "table.weight differs from the checkpoint in 1 of 800 values, first at [99, 7]"),
        ("linear.weight.T", "linear.weight differs from the checkpoint in 1 of 64 values, first at [7, 7]"),
        ("hashes", "constant hashes is not what was exported"),
    ],
)
def test_one_flipped_bit_is_found_and_named(exported, tmp_path, initializer, sentence):
    path, state = exported
    names = {tensor.name for tensor in onnx.load(path).graph.initializer}
    initializer = initializer if initializer in names else initializer.removesuffix(".T")
    assert compare_weights(flipped(path, tmp_path / "b.onnx", initializer), state, "fp32") == [sentence]


def test_a_shared_initializer_answers_for_every_tensor_that_it_stands_for(exported):
    path, state = exported
    changed = {**state, "norms.1.weight": state["norms.1.weight"] * 2}
    (problem,) = compare_weights(path, changed, "fp32")
    assert problem.startswith("norms.1.weight differs from the checkpoint in 8 of 8 values")


def test_another_dtype_another_shape_and_a_missing_tensor_are_named(exported):
    path, state = exported
    assert any("is float32" in problem and "float16" in problem for problem in compare_weights(path, state, "fp16"))
    smaller = {**state, "table.weight": state["table.weight"][:50]}
    assert compare_weights(path, smaller, "fp32") == [
        "table.weight is float32 [100, 8] in the file, but float32 [50, 8] in the checkpoint"
    ]
    without = {name: tensor for name, tensor in state.items() if name != "table.weight"}
    (problem,) = compare_weights(path, without, "fp32")
    assert problem == "table.weight stands for table.weight, which the checkpoint does not have"


def test_initializers_that_are_gone_or_unknown_are_named(exported, tmp_path):
    path, state = exported
    model = onnx.load(path)
    next(tensor for tensor in model.graph.initializer if tensor.name == "table.weight").name = "stranger"
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "unused"))
    onnx.save(model, tmp_path / "c.onnx")
    assert sorted(compare_weights(tmp_path / "c.onnx", state, "fp32")) == [
        "stranger stands for no tensor of the checkpoint",
        "table.weight is missing from the file",
        "unused stands for no tensor of the checkpoint",
    ]
