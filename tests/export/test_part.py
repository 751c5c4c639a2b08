"""One small part to one file: what is written, what is refused, what a crash leaves."""

import subprocess
import sys

import onnx
import pytest
import torch
from torch import nn

from export import compare_weights, export_part, onnx_export
from tests.export.running import WIDTH, Nested, OnnxRuntime, small_part
from zoo.errors import ConfigError, ExportError
from zoo.kernels import causal_short_conv
from zoo.models.parts import Part
from zoo.signature import BATCH, LENGTH, Signature, TensorSpec


class DataDependent(nn.Module):
    def forward(self, x, *, scale):
        if x.sum() > 0:
            return x * scale
        return x


class FixesTheBatch(nn.Module):
    def forward(self, x, *, scale):
        return x.reshape(int(x.shape[0]), -1, WIDTH) * scale


class NotInOnnx(nn.Module):
    def forward(self, x, *, scale):
        return torch.cummax(x, 1).values * scale


class DoesNotRun(nn.Module):
    def forward(self, x):
        return x @ x


class Convolutions(nn.Module):
    def __init__(self, *activations):
        super().__init__()
        self.activations = activations
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x, lengths):
        for activation in self.activations:
            x = causal_short_conv(x, self.weight, lengths, activation=activation)
        return x


def convolutions(*activations):
    shape = (BATCH, LENGTH, WIDTH)
    inputs = TensorSpec("x", "float", shape), TensorSpec("lengths", "int32", (BATCH,), limit=LENGTH)
    return Part("convolutions", Convolutions(*activations), Signature(inputs, (TensorSpec("y", "float", shape),)))


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (DataDependent(), r"layers\.1\.gate \(DataDependent\).*data-dependent.*if x\.sum\(\) > 0"),
        (FixesTheBatch(), r"layers\.1\.gate \(FixesTheBatch\).*dimension 0 .* to 11"),
        (NotInOnnx(), r"layers\.1\.gate \(NotInOnnx\).*cummax"),
    ],
    ids=["data-dependent", "fixed batch", "no translation"],
)
def test_a_model_that_cannot_be_exported_says_which_submodule_and_why(gate, words, tmp_path, capfd):
    with pytest.raises(ExportError, match=words) as caught:
        export_part(small_part(Nested(gate)), tmp_path / "small.onnx", dtype="fp32")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert "def forward" not in capfd.readouterr().err


def test_a_module_that_does_not_even_run_is_told_apart(tmp_path):
    with pytest.raises(ExportError, match=r"small does not run in PyTorch on inputs of shapes \[11, 13, 4\]"):
        export_part(small_part(DoesNotRun()), tmp_path / "small.onnx", dtype="fp32")


def test_an_unknown_dtype_is_named(tmp_path):
    with pytest.raises(ConfigError, match="fp8"):
        export_part(small_part(nn.Identity()), tmp_path / "small.onnx", dtype="fp8")


def test_a_signature_that_the_graph_does_not_have_is_refused(tmp_path):
    narrow = small_part(nn.Linear(WIDTH, 2))
    with pytest.raises(ExportError, match=r"output y has shape \['batch', 'length', 2\].*the signature is wrong"):
        export_part(narrow, tmp_path / "small.onnx", dtype="fp32")
    assert list(tmp_path.iterdir()) == []


def test_a_dimension_that_the_saved_file_fixes_is_refused(tmp_path):
    path = export_part(small_part(nn.Linear(WIDTH, WIDTH)), tmp_path / "small.onnx", dtype="fp32").path
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 13
    onnx.save(model, path)
    with pytest.raises(ExportError, match="'length' was specialised"):
        onnx_export._check_file(small_part(nn.Linear(WIDTH, WIDTH)), path, "fp32")
    with pytest.raises(ExportError, match="input x is FLOAT in the graph, but fp16 is wanted"):
        onnx_export._check_file(small_part(nn.Linear(WIDTH, WIDTH)), path, "fp16")


def test_a_lost_op_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_op_calls", lambda *args: {"CausalShortConv": 3})
    with pytest.raises(ExportError, match=r"\{'CausalShortConv': 2\}.*\{'CausalShortConv': 3\}"):
        export_part(convolutions("silu", "silu"), tmp_path / "convolutions.onnx", dtype="fp32")


def test_one_op_with_two_structures_in_one_graph_is_refused(tmp_path):
    with pytest.raises(ExportError, match=r"'activation': 'silu'.*'activation': 'none'.*two parts"):
        export_part(convolutions("silu", "none"), tmp_path / "convolutions.onnx", dtype="fp32")


def test_weights_over_the_limit_lie_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "LIMIT", 1000)
    part = small_part(nn.Linear(32, 32), width=32)
    path = tmp_path / "folder" / "small.onnx"
    exported = export_part(part, path, dtype="fp32")
    assert exported.external_data
    assert sorted(file.name for file in path.parent.iterdir()) == ["small.onnx", "small.onnx.data"]
    assert exported.size == sum(file.stat().st_size for file in path.parent.iterdir())
    (location,) = {
        entry.value
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert location == "small.onnx.data"
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(OnnxRuntime(path)(x)[0], part.module(x).detach())
    assert compare_weights(path, part.module.state_dict(), "fp32") == []

    monkeypatch.setattr(onnx_export, "LIMIT", 10**9)
    assert not export_part(part, path, dtype="fp32").external_data
    assert [file.name for file in path.parent.iterdir()] == ["small.onnx"]


def test_a_failed_check_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "small.onnx"
    path.write_bytes(b"old")

    def refuse(*args, **kwargs):
        raise onnx.checker.ValidationError("broken")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(ExportError, match=r"onnx\.checker rejects.*broken"):
        export_part(small_part(nn.Linear(WIDTH, WIDTH)), path, dtype="fp32")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", [10**9, 1], ids=["one file", "external data"])
def test_a_killed_export_leaves_no_graph_and_the_next_one_clears_its_scraps(limit, tmp_path, monkeypatch):
    script = f"""
import os
from torch import nn
from export import export_part, onnx_export
from tests.export.running import small_part
onnx_export.LIMIT = {limit}
onnx_export._check_file = lambda *args: os._exit(9)
export_part(small_part(nn.Linear(32, 32), width=32), {str(tmp_path / "small.onnx")!r}, dtype="fp32")
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert all(left.name.startswith(".") for left in tmp_path.iterdir())
    monkeypatch.setattr(onnx_export, "LIMIT", limit)
    export_part(small_part(nn.Linear(32, 32), width=32), tmp_path / "small.onnx", dtype="fp32")
    assert {left.name for left in tmp_path.iterdir()} <= {"small.onnx", "small.onnx.data"}


def test_the_callers_module_keeps_its_dtype_mode_and_weights(tmp_path):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    path = export_part(small_part(module), tmp_path / "small.onnx", dtype="fp16").path
    assert module.training and all(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert "Dropout" not in {node.op_type for node in onnx.load(path).graph.node}


def test_the_file_holds_no_path_of_the_machine_that_made_it(tmp_path):
    path = export_part(convolutions("silu"), tmp_path / "convolutions.onnx", dtype="fp32").path
    assert b".py" not in path.read_bytes()


def test_the_same_module_gives_the_same_bytes(tmp_path):
    part = convolutions("silu")
    first, second = (export_part(part, tmp_path / name / "a.onnx", dtype="fp32").path for name in ("1", "2"))
    assert first.read_bytes() == second.read_bytes()
