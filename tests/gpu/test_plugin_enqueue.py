"""The Python plugins run by TensorRT's own plugin interfaces on the GPU, against float64 on the CPU.

The lean runtime has the plugin registry of the full TensorRT and runs on Hopper; it is 45 MB where TensorRT is 2 GB.
"""

import pytest
import torch

from validate.tolerance import deviation
from zoo.errors import DTypeError, ShapeError
from zoo.kernels import causal_short_conv, gated_bidirectional_linear_attention, gated_delta_rule, packed_width
from zoo.plugins import DOMAIN, OPS
from zoo.plugins.tensorrt import plugin_fields, register_creators

pytestmark = pytest.mark.gpu
DTYPES = {torch.float16: "HALF", torch.bfloat16: "BF16", torch.float32: "FLOAT", torch.int32: "INT32"}
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [[0], [1], [63, 64, 65], [300, 0, 1, 257]]


@pytest.fixture(scope="module")
def trt():
    return pytest.importorskip(
        "tensorrt_lean_bindings",
        reason="needs the lean runtime: pip install tensorrt-lean-cu13-libs tensorrt-lean-cu13-bindings",
    )


def runtime_plugin(trt, op, attributes):
    """Take a plugin the way a runtime does: from the registry, by name, with fields, then attached to a context."""
    spec = OPS[op]
    register_creators(trt)
    creator = trt.get_plugin_registry().get_creator(spec.name, str(spec.version), DOMAIN)
    fields = plugin_fields(trt, spec, attributes)
    plugin = creator.create_plugin("node", fields, trt.TensorRTPhase.RUNTIME)
    return plugin.get_capability_interface(trt.PluginCapabilityType.RUNTIME).attach_to_context(None)


def describe(trt, tensor):
    descriptor = trt.PluginTensorDesc()
    descriptor.dims = trt.Dims(list(tensor.shape))
    descriptor.type = getattr(trt.DataType, DTYPES[tensor.dtype])
    return descriptor


def enqueue(trt, plugin, inputs, *outputs):
    """Run the plugin on a stream of its own, reading and writing nothing but the device pointers."""
    described = tuple([describe(trt, tensor) for tensor in tensors] for tensors in (inputs, outputs))
    plugin.on_shape_change(*described)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    pointers = tuple([tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs))
    plugin.enqueue(*described, *pointers, 0, stream.cuda_stream)
    stream.synchronize()


def check(trt, op, function, attributes, tensors, lengths, dtype, channels):
    """Compare the plugin's output with the op in float64, and with it in ``dtype`` for the tolerance."""
    rounded = [tensor.to(dtype) for tensor in tensors]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    ref64 = function(*(tensor.double() for tensor in rounded), lengths, **attributes)
    ref_lo = function(*rounded, lengths, **attributes)
    inputs = [tensor.cuda().contiguous() for tensor in (*rounded, lengths)]
    output = torch.full((*rounded[0].shape[:2], channels), torch.nan, dtype=dtype, device="cuda")
    enqueue(trt, runtime_plugin(trt, op, attributes), inputs, output)
    found = deviation(output.cpu(), ref64, ref_lo, dtype)
    assert found.ok, found


def ragged(lengths, *shape):
    """Random numbers, with NaN wherever a row is padding."""
    x = torch.randn(len(lengths), max(*lengths, 1), *shape)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_convolution_plugin_is_inside_the_tolerance_rule(trt, dtype, lengths, activation):
    tensors = [ragged(lengths, 40), torch.randn(40, 4)]
    check(trt, "CausalShortConv", causal_short_conv, {"activation": activation}, tensors, lengths, dtype, 40)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("switches", [(True, True), (True, False), (False, True), (False, False)])
def test_the_attention_plugin_is_inside_the_tolerance_rule(trt, dtype, lengths, switches):
    heads, dim = 3, 32
    attributes = dict(zip(("key_gate", "gated_norm"), switches, strict=True))
    tensors = [ragged(lengths, packed_width(heads, dim, **attributes)), torch.rand(heads, dim) + 0.5]
    attributes = {"num_heads": heads, "head_dim": dim, "eps": 1e-6, **attributes}
    op = "GatedBidirectionalLinearAttention"
    check(trt, op, gated_bidirectional_linear_attention, attributes, tensors, lengths, dtype, heads * dim)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_delta_rule_plugin_is_inside_the_tolerance_rule_and_its_state_is_float32(trt, dtype, lengths, normalize):
    heads, key_dim, value_dim = 3, 32, 64
    attributes = {"scale": 0.25, "normalize": normalize}
    q, k, v = (ragged(lengths, heads, width).to(dtype) for width in (key_dim, key_dim, value_dim))
    k = (k.float() / key_dim**0.5).to(dtype)
    log_decay, beta = -ragged(lengths, heads).square(), ragged(lengths, heads).sigmoid().to(dtype)
    state, rows = torch.randn(len(lengths), heads, key_dim, value_dim), torch.tensor(lengths, dtype=torch.int32)
    tensors = q, k, v, log_decay, beta, state
    exact = gated_delta_rule(*(x.double() for x in tensors), rows, **attributes)
    low = gated_delta_rule(*tensors, rows, **attributes)
    outputs = [torch.full(x.shape, torch.nan, dtype=x.dtype, device="cuda") for x in low]
    inputs = [x.cuda().contiguous() for x in (*tensors, rows)]
    enqueue(trt, runtime_plugin(trt, "GatedDeltaRule", attributes), inputs, *outputs)
    for out, ref64, ref_lo in zip(outputs, exact, low, strict=True):
        found = deviation(out.cpu(), ref64, ref_lo, dtype)
        assert found.ok, found


def test_shapes_and_dtypes_that_do_not_fit_are_refused_before_anything_runs(trt):
    plugin = runtime_plugin(trt, "CausalShortConv", {"activation": "silu"})
    x, taps = torch.zeros(2, 8, 16).half().cuda(), torch.zeros(16, 4).half().cuda()
    lengths = torch.zeros(2, dtype=torch.int32).cuda()

    def on_shape_change(*tensors):
        plugin.on_shape_change([describe(trt, tensor) for tensor in tensors], [describe(trt, x)])

    with pytest.raises(ShapeError, match="input weight"):
        on_shape_change(x, taps[:8], lengths)
    with pytest.raises(DTypeError, match="input weight"):
        on_shape_change(x, taps.float(), lengths)
