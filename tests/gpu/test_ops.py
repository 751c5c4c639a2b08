"""The ops on a CUDA device against float64 on the CPU, under the tolerance rule."""

import itertools

import pytest
import torch

from validate.tolerance import deviation
from zoo.kernels import causal_short_conv, gated_bidirectional_linear_attention, packed_width

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [[0], [1], [63, 64, 65], [300, 0, 1, 257]]


def run_twice(op, tensors, lengths, dtype):
    """Return output and gradients on the GPU in ``dtype`` and, of the same rounded inputs, on the CPU in float64."""
    results = []
    for device, to in (("cuda", dtype), ("cpu", torch.float64), ("cpu", dtype)):
        inputs = [t.to(dtype).to(device, to).requires_grad_() for t in tensors]
        y = op(*inputs, torch.tensor(lengths, dtype=torch.int32, device=device))
        torch.manual_seed(1)
        grad = torch.randn(y.shape, dtype=torch.float64).to(dtype).to(device, to)
        grads = torch.autograd.grad(y, inputs, grad)
        results.append([t.detach().cpu() for t in (y, *grads)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("key_gate", "gated_norm"), list(itertools.product([True, False], repeat=2)))
def test_gbla_is_inside_the_tolerance_rule_forward_and_backward(dtype, lengths, key_gate, gated_norm):
    heads, dim, longest = 3, 32, max(*lengths, 1)
    width = packed_width(heads, dim, key_gate=key_gate, gated_norm=gated_norm)
    packed = torch.randn(len(lengths), longest, width)
    for row, length in enumerate(lengths):
        packed[row, length:] = torch.nan

    def op(packed, norm_weight, lengths):
        return gated_bidirectional_linear_attention(
            packed, norm_weight, lengths, num_heads=heads, head_dim=dim, key_gate=key_gate, gated_norm=gated_norm
        )

    for out, ref64, low in run_twice(op, [packed, torch.rand(heads, dim) + 0.5], lengths, dtype):
        found = deviation(out, ref64, low, dtype)
        assert found.ok, found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_convolution_is_inside_the_tolerance_rule_forward_and_backward(dtype, lengths, activation):
    x = torch.randn(len(lengths), max(*lengths, 1), 40)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan

    def op(x, weight, lengths):
        return causal_short_conv(x, weight, lengths, activation=activation)

    for out, ref64, low in run_twice(op, [x, torch.randn(40, 4)], lengths, dtype):
        found = deviation(out, ref64, low, dtype)
        assert found.ok, found


def test_forward_and_backward_compile_and_replay_in_a_cuda_graph():
    packed = torch.randn(2, 64, packed_width(2, 32), device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.ones(2, 32, device="cuda")
    lengths = torch.tensor([64, 17], dtype=torch.int32, device="cuda")

    def run():
        return gated_bidirectional_linear_attention(packed, norm_weight, lengths, num_heads=2, head_dim=32)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(torch.compile(run, fullgraph=True)(), expected)
