"""The ONNX function bodies against the PyTorch references, which share no code with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.running import (
    assert_as_good_as_pytorch,
    in_onnx_runtime,
    in_reference_evaluator,
    one_node,
    poisoned,
    ragged,
)
from zoo.errors import ConfigError
from zoo.kernels import causal_short_conv, gated_bidirectional_linear_attention, packed_width
from zoo.plugins import op_spec
from zoo.plugins.bodies import function_body
from zoo.plugins.spec import OpSpec

CONV, ATTENTION = op_spec("CausalShortConv"), op_spec("GatedBidirectionalLinearAttention")


@given(
    batch=ragged(),
    channels=st.sampled_from([1, 3, 8]),
    width=st.integers(1, 5),
    activation=st.sampled_from(["none", "silu"]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_the_convolution_body_equals_the_reference(batch, channels, width, activation, dtype):
    length, lengths, seed = batch
    generator = torch.Generator().manual_seed(seed)
    x = poisoned(torch.randn(len(lengths), length, channels, generator=generator).to(dtype), lengths)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    out = in_onnx_runtime(one_node(CONV, {"activation": activation}, dtype), x, weight, lengths)
    ref64 = causal_short_conv(x.double(), weight.double(), lengths, activation=activation)
    assert_as_good_as_pytorch(out, ref64, causal_short_conv(x, weight, lengths, activation=activation))


def attention_case(batch, heads, head_dim, switches, dtype, *, gate_scale=1.0, shift=0.0):
    length, lengths, seed = batch
    generator = torch.Generator().manual_seed(seed)
    inner = heads * head_dim
    packed = torch.randn(len(lengths), length, packed_width(heads, head_dim, **switches), generator=generator)
    packed[..., : 2 * inner] += shift
    if switches["key_gate"]:
        start = (4 if switches["gated_norm"] else 3) * inner
        packed[..., start : start + heads] *= gate_scale
    norm_weight = torch.randn(heads, head_dim, generator=generator)
    attributes = {"num_heads": heads, "head_dim": head_dim, "eps": 1e-6} | {k: int(v) for k, v in switches.items()}
    tensors = poisoned(packed.to(dtype), lengths), norm_weight.to(dtype), lengths
    settings = {"num_heads": heads, "head_dim": head_dim, **switches}
    ref64 = gated_bidirectional_linear_attention(tensors[0].double(), tensors[1].double(), lengths, **settings)
    ref_lo = gated_bidirectional_linear_attention(*tensors, **settings)
    return one_node(ATTENTION, attributes, dtype), tensors, ref64, ref_lo


SWITCHES = st.fixed_dictionaries({"key_gate": st.booleans(), "gated_norm": st.booleans()})


@given(
    batch=ragged(),
    heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([2, 4, 8]),
    switches=SWITCHES,
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_the_attention_body_equals_the_reference(batch, heads, head_dim, switches, dtype):
    model, tensors, ref64, ref_lo = attention_case(batch, heads, head_dim, switches, dtype)
    assert_as_good_as_pytorch(in_onnx_runtime(model, *tensors), ref64, ref_lo)


@given(
    batch=ragged((1, 5, 9)),
    switches=SWITCHES,
    gate_scale=st.sampled_from([1.0, 1e4]),
    shift=st.sampled_from([-1e4, -200.0, 0.0, 200.0]),
)
def test_gates_of_any_size_and_inputs_far_below_zero_neither_overflow_nor_vanish(batch, switches, gate_scale, shift):
    model, tensors, ref64, ref_lo = attention_case(
        batch, 2, 4, switches, torch.float32, gate_scale=gate_scale, shift=shift
    )
    out = in_onnx_runtime(model, *tensors)
    assert_as_good_as_pytorch(out, ref64, ref_lo)
    for row, length in enumerate(tensors[2].tolist()):
        assert (out[row, : max(length, 0)] != 0).any() or length <= 0
        assert (out[row, max(length, 0) :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_the_reference_evaluator_runs_the_bodies_in_bfloat16_too(dtype, length):
    batch = length, torch.tensor([length, 0, length // 2], dtype=torch.int32), 0
    switches = {"key_gate": True, "gated_norm": True}
    model, tensors, ref64, ref_lo = attention_case(batch, 2, 4, switches, dtype)
    assert_as_good_as_pytorch(in_reference_evaluator(model, *tensors), ref64, ref_lo)
    x, weight = poisoned(torch.randn(3, length, 5).to(dtype), batch[1]), torch.randn(5, 4).to(dtype)
    out = in_reference_evaluator(one_node(CONV, {"activation": "silu"}, dtype), x, weight, batch[1])
    ref64 = causal_short_conv(x.double(), weight.double(), batch[1], activation="silu")
    assert_as_good_as_pytorch(out, ref64, causal_short_conv(x, weight, batch[1], activation="silu"))


@pytest.mark.parametrize("opset", [20, 21, 23])
def test_the_bodies_can_be_written_in_earlier_operator_sets(opset):
    x, weight, lengths = torch.randn(2, 5, 3), torch.randn(3, 4), torch.tensor([5, 2], dtype=torch.int32)
    out = in_onnx_runtime(one_node(CONV, {"activation": "none"}, torch.float32, opset), x, weight, lengths)
    torch.testing.assert_close(out, causal_short_conv(x, weight, lengths))


def test_an_op_without_a_body_is_named():
    unknown = OpSpec("Wavelet", "wavelet", 1, (), (), (), "An op of the future.")
    with pytest.raises(ConfigError, match="Wavelet"):
        function_body(unknown, {}, 23)
