"""The convolution on a CUDA device against float64 on the CPU, under the tolerance rule."""

import pytest
import torch

from validate.tolerance import deviation
from zoo.kernels import causal_short_conv

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
