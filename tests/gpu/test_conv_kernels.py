"""The short convolution kernels, alone and behind RMSNorm, on a CUDA device against the float64 references there."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from validate.tolerance import deviation
from zoo.kernels import causal_short_conv, rms_norm_short_conv
from zoo.kernels.causal_short_conv import launch as conv
from zoo.kernels.causal_short_conv.reference import causal_short_conv_backward_reference, causal_short_conv_reference
from zoo.kernels.rms_norm_short_conv import launch as norm_conv
from zoo.kernels.rms_norm_short_conv.reference import (
    rms_norm_short_conv_backward_reference,
    rms_norm_short_conv_reference,
)

pytestmark = pytest.mark.gpu
EPS = 1e-6
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASES = [(BRAIN, 1024, 4), (SINGLE, 1024, 4), (BRAIN, 256, 4), (HALF, 256, 4), (SINGLE, 256, 4),
         (HALF, 40, 8), (SINGLE, 40, 1), (BRAIN, 40, 3)]  # fmt: skip
LENGTHS = [301, 0, 1, 257]


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """Under deterministic algorithms ``torch.empty`` is filled with NaN, so what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def ragged(channels, dtype, lengths=LENGTHS):
    """Return x and grad [B, L, C] with NaN at padding, and the lengths."""
    tensors = [draw(len(lengths), max(lengths), channels, dtype=dtype) for _ in range(2)]
    for tensor in tensors:
        for row, length in enumerate(lengths):
            tensor[row, length:] = torch.nan
    return *tensors, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def assert_inside(found, ref64, low, dtypes):
    for index, (out, exact, reference, dtype) in enumerate(zip(found, ref64, low, dtypes, strict=True)):
        judged = deviation(out, exact, reference, dtype)
        assert judged.ok, (index, judged)


@pytest.mark.parametrize(("dtype", "channels", "width"), CASES, ids=str)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("full_runs", [False, True], ids=["short runs", "full runs"])
def test_convolution_configs_are_inside_the_tolerance_rule(monkeypatch, dtype, channels, width, activation, full_runs):
    if full_runs:
        monkeypatch.setattr(conv, "WARPS_A_PROCESSOR", 0)
    x, grad, lengths = ragged(channels, dtype)
    weight = draw(channels, width, dtype=dtype)

    def reference(to):
        tensors = [t.to(to) for t in (grad, x, weight)]
        y = causal_short_conv_reference(*tensors[1:], lengths, activation)
        return y, *causal_short_conv_backward_reference(*tensors, lengths, activation)

    found = [
        conv.forward(x, weight, lengths, activation, conv.FORWARD[dtype.itemsize]),
        *conv.backward(grad, x, weight, lengths, activation, conv.BACKWARD[dtype.itemsize]),
    ]
    assert_inside(found, reference(torch.float64), reference(dtype), [dtype] * 3)
    for row, length in enumerate(LENGTHS):
        assert (found[0][row, length:] == 0).all()
        assert (found[1][row, length:] == 0).all()


NORM_CASES = [*[(dtype, dtype, *rest) for dtype, *rest in CASES], (SINGLE, BRAIN, 1024, 4), (SINGLE, HALF, 256, 4)]


@pytest.mark.parametrize(("dtype", "out_dtype", "channels", "width"), NORM_CASES, ids=str)
@pytest.mark.parametrize("full_runs", [False, True], ids=["short runs", "full runs"])
def test_norm_configs_are_inside_the_tolerance_rule(monkeypatch, dtype, out_dtype, channels, width, full_runs):
    if full_runs:
        monkeypatch.setattr(conv, "WARPS_A_PROCESSOR", 0)
    x, grad, lengths = ragged(channels, dtype)
    grad = grad.to(out_dtype)
    norm_weight, weight = torch.rand(channels, device="cuda") + 0.5, draw(channels, width, dtype=SINGLE)

    def reference(x, grad, norm_weight, weight, out_dtype):
        y, rstd = rms_norm_short_conv_reference(x, norm_weight, weight, lengths, EPS, out_dtype)
        return y, *rms_norm_short_conv_backward_reference(grad, x, norm_weight, weight, lengths, rstd)

    y, rstd = norm_conv.forward(x, norm_weight, weight, lengths, EPS, out_dtype, norm_conv.FORWARD[dtype.itemsize])
    config = norm_conv.BACKWARD[dtype.itemsize]
    found = [y, *norm_conv.backward(grad, x, norm_weight, weight, lengths, rstd, config)]
    ref64 = reference(*(t.double() for t in (x, grad, norm_weight, weight)), torch.float64)
    low = reference(x, grad, norm_weight, weight, out_dtype)
    assert_inside(found, ref64, low, [out_dtype, dtype, SINGLE, SINGLE])
    for row, length in enumerate(LENGTHS):
        assert (y[row, length:] == 0).all()
        assert (found[1][row, length:] == 0).all()


def operators(channels, lengths):
    weight, norm_weight = draw(channels, 4, dtype=SINGLE), torch.rand(channels, device="cuda")
    return {
        "convolution": functools.partial(causal_short_conv, weight=weight, lengths=lengths, activation="silu"),
        "norm": functools.partial(
            rms_norm_short_conv, norm_weight=norm_weight, weight=weight, lengths=lengths, out_dtype=BRAIN
        ),
    }


@pytest.mark.parametrize("name", ["convolution", "norm"])
def test_gradients_are_the_same_bits_each_time_and_under_checkpointing(name):
    x, grad, lengths = ragged(256, BRAIN)
    op = operators(256, lengths)[name]
    x.requires_grad_()
    expected = torch.autograd.grad(op(x), x, grad)[0]
    assert torch.equal(torch.autograd.grad(op(x), x, grad)[0], expected)
    assert torch.equal(torch.autograd.grad(checkpoint(op, x, use_reentrant=False), x, grad)[0], expected)


@pytest.mark.parametrize("name", ["convolution", "norm"])
def test_it_is_captured_in_a_cuda_graph_and_compiled_whole(name):
    x, grad, lengths = ragged(256, BRAIN)
    op = operators(256, lengths)[name]
    x.requires_grad_()

    def step():
        y = op(x)
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True)
    assert torch.equal(compiled(x), expected[0] * 2)


def test_offsets_pass_two_to_the_31_in_the_convolution():
    length, channels = 262144, 8200
    x, grad = (torch.randn(1, length, channels, device="cuda", dtype=BRAIN) for _ in range(2))
    weight, lengths = draw(channels, 4, dtype=SINGLE), torch.tensor([length - 3], dtype=torch.int32, device="cuda")
    y = conv.forward(x, weight, lengths, "silu")
    grad_x, grad_weight = conv.backward(grad, x, weight, lengths, "silu")
    for part in (slice(0, 4), slice(channels - 4, channels)):  # channels do not touch each other
        tensors = [grad[..., part], x[..., part], weight[part]]
        found = [y[..., part], grad_x[..., part], grad_weight[part]]
        results = []
        for to in (torch.float64, BRAIN):
            values = [tensors[0].to(to), tensors[1].to(to), tensors[2].to(torch.promote_types(to, SINGLE))]
            out = causal_short_conv_reference(*values[1:], lengths, "silu")
            results.append([out, *causal_short_conv_backward_reference(*values, lengths, "silu")])
        assert_inside(found, *results, [BRAIN, BRAIN, SINGLE])


def test_offsets_pass_two_to_the_31_in_the_norm():
    length, channels, tail = 1_050_000, 2048, 64
    x, grad = (torch.randn(1, length, channels, device="cuda", dtype=BRAIN) for _ in range(2))
    norm_weight, weight = torch.rand(channels, device="cuda"), draw(channels, 4, dtype=SINGLE)
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    y, rstd = norm_conv.forward(x, norm_weight, weight, lengths, EPS, BRAIN)
    grad_x, *_ = norm_conv.backward(grad, x, norm_weight, weight, lengths, rstd)
    end = torch.tensor([tail], dtype=torch.int32, device="cuda")
    results = []
    for to in (torch.float64, BRAIN):
        values = [t[:, -tail:].to(to) for t in (x, grad)]
        scales = [t.to(torch.promote_types(to, SINGLE)) for t in (norm_weight, weight)]
        out, factors = rms_norm_short_conv_reference(values[0], *scales, end, EPS, to)
        results.append(
            [out[:, 3:], rms_norm_short_conv_backward_reference(values[1], values[0], *scales, end, factors)[0]]
        )
    assert_inside([y[:, 3 - tail :], grad_x[:, -tail:]], *results, [BRAIN, BRAIN])
