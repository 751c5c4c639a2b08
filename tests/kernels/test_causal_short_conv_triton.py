"""The Triton kernels of ``causal_short_conv`` in Triton's interpreter, against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreting import (
    DTYPES,
    assert_inside_the_tolerance,
    kernels_from_triton,
    outputs_and_gradients,
    poison,
    ragged_batches,
)
from zoo.kernels import causal_short_conv
from zoo.kernels.causal_short_conv import launch

interpreted = pytest.fixture(scope="module", autouse=True)(kernels_from_triton)


def conv(activation):
    return lambda x, weight, lengths: causal_short_conv(x, weight, lengths, activation=activation)


@given(ragged_batches(), st.integers(1, 8), st.sampled_from(["none", "silu"]), st.sampled_from(DTYPES))
def test_kernels_are_inside_the_tolerance_rule_with_poisoned_padding(shape, width, activation, dtype):
    batch, length, channels, lengths = shape
    x = poison(torch.randn(batch, length, channels), lengths)
    assert_inside_the_tolerance(conv(activation), [x, torch.randn(channels, width)], lengths, dtype)


@pytest.mark.parametrize("config", [launch.Config(2, 16, 4, 8), launch.Config(1, 32, 8, 8), launch.Config(4, 64, 4, 4)])
def test_runs_and_channel_blocks_meet_without_a_seam(config):
    x, weight, grad = torch.randn(2, 21, 40), torch.randn(40, 6), torch.randn(2, 21, 40)
    lengths = torch.tensor([21, 13], dtype=torch.int32)
    grad_x, grad_weight = launch.backward(grad, x, weight, lengths, "silu", config)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    y64 = causal_short_conv(x64, weight64, lengths, activation="silu")
    expected = torch.autograd.grad(y64, [x64, weight64], grad.double())
    y = launch.forward(x, weight, lengths, "silu", config)
    for found, exact in zip((y, grad_x, grad_weight), (y64, *expected), strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=2e-5, atol=2e-5)


@settings(max_examples=10)
@given(ragged_batches())
def test_a_row_does_not_depend_on_its_batch(shape):
    batch, length, channels, lengths = shape
    x, weight = torch.randn(batch, length, channels), torch.randn(channels, 4)
    y, grad_x, _ = outputs_and_gradients(conv("silu"), [x, weight], lengths)
    op = torch.ops.zoo.causal_short_conv_backward
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float32).half().float()
    for row in range(batch):
        one, alone = torch.tensor(lengths[row : row + 1], dtype=torch.int32), slice(row, row + 1)
        assert torch.equal(causal_short_conv(x[alone], weight, one, activation="silu"), y[alone])
        assert torch.equal(op(grad[alone], x[alone], weight, one, "silu")[0], grad_x[alone])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], dim=2)[:, :, : x.shape[2]],
    ],
    ids=["L before B", "C before L", "a slice of channels"],
)
def test_any_strides_give_the_same(view):
    x, weight = torch.randn(2, 7, 6), torch.randn(4, 6).T
    dense = outputs_and_gradients(conv("silu"), [x, weight.contiguous()], [7, 3])
    for found, expected in zip(outputs_and_gradients(conv("silu"), [view(x), weight], [7, 3]), dense, strict=True):
        assert torch.equal(found, expected)


def test_an_expanded_gradient_is_read_in_place():
    x, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(3, 4)
    causal_short_conv(x, weight, torch.tensor([5, 2], dtype=torch.int32)).sum().backward()
    taps = weight.flip(1).cumsum(1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, -4:], taps.flip(1).T)
    assert (x.grad[1, 2:] == 0).all()


def test_wild_lengths_act_as_clamped():
    x, weight = torch.randn(2, 4, 3), torch.randn(3, 4)
    wild = causal_short_conv(x, weight, torch.tensor([99, -5], dtype=torch.int32))
    assert torch.equal(wild, causal_short_conv(x, weight, torch.tensor([4, 0], dtype=torch.int32)))


def test_the_choice_says_why_not():
    cpu = torch.device("cpu")
    assert launch.choose(cpu, torch.float32, 4).ok
    assert "9 taps" in launch.choose(cpu, torch.float32, 9).reason
    assert "float64" in launch.choose(cpu, torch.float64, 4).reason


def test_the_registration_passes_opcheck():
    x, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(4, 3).T.requires_grad_()
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    torch.library.opcheck(torch.ops.zoo.causal_short_conv.default, (x, weight, lengths, "silu"))
