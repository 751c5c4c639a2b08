"""The exported graphs of GBLA say what PyTorch says."""

import onnx
import pytest

from export import compare_weights, export_part
from export.onnx_export import DTYPES
from tests.export.running import (
    OnnxRuntime,
    Reference,
    assert_parity,
    decoder_inputs,
    encoder_inputs,
    part_of,
    tiny,
)
from zoo.models import presets

# With two layers, one S and one L. Causal is the twin furthest from the model itself; the others are slow together.
OFTEN = [None, "causal"]
SELDOM = [twin for twin in presets.TWINS["gbla"] if twin not in OFTEN]
TWINS = [*OFTEN, *(pytest.param(twin, marks=pytest.mark.slow) for twin in SELDOM)]

# Traced at batch 11, length 13, beams 15: each of these would show a dimension that was fixed.
ENCODER_SIZES = [(1, 1), (1, 37), (3, 7), (4, 2)]
DECODER_SIZES = [(1, 1, 1), (3, 7, 2), (2, 33, 5)]


@pytest.mark.parametrize("twin", TWINS)
def test_the_encoder_of_every_twin_equals_pytorch(twin, tmp_path):
    part = part_of(tiny(twin, num_layers=2), "encoder")
    exported = export_part(part, tmp_path / "encoder.onnx", dtype="fp32")
    run = OnnxRuntime(exported.path)
    for sizes in ENCODER_SIZES:
        assert_parity(run, part, "fp32", encoder_inputs(*sizes))
    assert compare_weights(exported.path, part.module.state_dict(), "fp32") == []


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_decoder_equals_pytorch_for_every_digit(dtype, tmp_path):
    model = tiny()
    part = part_of(model, "decoder_step")
    run = OnnxRuntime(export_part(part, tmp_path / "decoder_step.onnx", dtype=dtype).path)
    for sizes in DECODER_SIZES:
        for digit in range(4):
            assert_parity(run, part, dtype, decoder_inputs(model, *sizes, digit, DTYPES[dtype]))


def test_the_encoder_equals_pytorch_in_float16(tmp_path):
    part = part_of(tiny(num_layers=2), "encoder")
    exported = export_part(part, tmp_path / "encoder.onnx", dtype="fp16")
    run = OnnxRuntime(exported.path)
    for sizes in ENCODER_SIZES:
        assert_parity(run, part, "fp16", encoder_inputs(*sizes))
    assert exported.ops == {"CausalShortConv": 1, "GatedBidirectionalLinearAttention": 1}
    assert compare_weights(exported.path, part.module.state_dict(), "fp16") == []


def test_the_encoder_equals_pytorch_in_bfloat16(tmp_path):
    part = part_of(tiny(num_layers=2), "encoder")
    exported = export_part(part, tmp_path / "encoder.onnx", dtype="bf16")
    assert_parity(Reference(exported.path), part, "bf16", encoder_inputs(3, 7))
    assert compare_weights(exported.path, part.module.state_dict(), "bf16") == []
    for node in onnx.load(exported.path).graph.node:
        if node.domain == "zoo":
            fields = {attribute.name: attribute.s for attribute in node.attribute if attribute.s}
            assert (fields["plugin_namespace"], fields["plugin_version"]) == (b"zoo", b"1")
