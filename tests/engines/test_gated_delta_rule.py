"""Engines of one gated delta rule, whose state is float32 in every dtype."""

import onnx
import pytest

from engines import compile as compile_module
from engines.build import build
from engines.manifest import check_manifest, plugins_in_engine
from export.onnx_export import DTYPES
from tests.plugins.running import one_node
from zoo.bundle import Bundle
from zoo.errors import EngineBuildError
from zoo.plugins import op_spec
from zoo.signature import BATCH, LENGTH, Signature, TensorSpec

pytestmark = pytest.mark.usefixtures("rtx")
DELTA = op_spec("GatedDeltaRule")
SIZES = {"B": BATCH, "T": LENGTH, "H": 2, "K": 16, "V": 24}
ONE = {"lengths": (16,), "batch": (1, 2, 4), "targets": ("sm89",)}


def bundle(folder, dtype, state="fp32", change=lambda model: None):
    """A bundle whose one part is the node itself; ``state`` is what the signature calls the states."""

    def tensors(rules):
        names = {"T": "float", "float32": state, "int32": "int32"}
        return tuple(
            TensorSpec(rule.name, names[rule.dtype], tuple(SIZES[letter] for letter in rule.shape)) for rule in rules
        )

    made = Bundle.create(
        folder,
        config={"model": "test"},
        signatures={"memory": Signature(tensors(DELTA.inputs), tensors(DELTA.outputs))},
    )
    model = one_node(DELTA, {"scale": 0.25, "normalize": 1}, DTYPES[dtype], sizes=SIZES)
    change(model)
    name = f"onnx/memory-{dtype}.onnx"
    (made.path / "onnx").mkdir()
    onnx.save(model, made.path / name)
    made.update([name])
    return made


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_node_becomes_our_plugin_and_its_state_is_float32(tmp_path, dtype):
    made = bundle(tmp_path, dtype)
    (record,) = build(made, dtype=dtype, **ONE)
    assert plugins_in_engine(record.path) == {"GatedDeltaRule": 1}
    assert check_manifest(made, record.path.with_suffix(".json")) == []
    tensors = {tensor.name: tensor for tensor in (*record.manifest.inputs, *record.manifest.outputs)}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        **dict.fromkeys(("q", "k", "v", "beta", "o"), dtype),
        **dict.fromkeys(("log_decay", "initial_state", "final_state"), "fp32"),
        "lengths": "int32",
    }
    assert tensors["o"].max == (4, 16, 2, 24) and tensors["final_state"].max == (4, 2, 16, 24)


def test_a_state_in_half_precision_is_not_what_the_graph_has(tmp_path):
    with pytest.raises(EngineBuildError, match=r"log_decay is DataType.FLOAT in the graph.*says DataType.HALF"):
        build(bundle(tmp_path, "fp16", state="float"), dtype="fp16", **ONE)


def test_a_state_that_does_not_fit_is_named(tmp_path):
    def transpose(model):
        dims = model.graph.input[5].type.tensor_type.shape.dim
        dims[2].dim_value, dims[3].dim_value = 24, 16

    with pytest.raises(EngineBuildError, match=r"input initial_state has shape .* 24 in dimension 2, but K must be 16"):
        build(bundle(tmp_path, "fp16", change=transpose), dtype="fp16", **ONE)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_without_the_plugin_tensorrt_builds_the_function_body(tmp_path, monkeypatch, dtype):
    def ask_for_another_version(model):
        (version,) = (a for a in model.graph.node[0].attribute if a.name == "plugin_version")
        version.s = b"7"

    made = bundle(tmp_path, dtype, change=ask_for_another_version)
    with pytest.raises(EngineBuildError, match="1 GatedDeltaRule as zoo nodes, but TensorRT made none into plugin"):
        build(made, dtype=dtype, **ONE)
    monkeypatch.setattr(compile_module, "_check_plugins", lambda *_: {})
    (record,) = build(made, dtype=dtype, **ONE)
    assert plugins_in_engine(record.path) == {}
