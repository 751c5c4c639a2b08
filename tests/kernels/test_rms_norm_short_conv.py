"""``rms_norm_short_conv``: the reference against its two halves, then the Triton kernels in the interpreter."""

import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.interpreting import (
    DTYPES,
    assert_inside_the_tolerance,
    kernels_from_triton,
    outputs_and_gradients,
    poison,
    ragged_batches,
)
from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels import causal_short_conv, rms_norm_short_conv
from zoo.kernels.launch import MODE_VARIABLE
from zoo.kernels.rms_norm_short_conv import launch

interpreted = pytest.fixture(scope="module")(kernels_from_triton)
LENGTHS = torch.tensor([5, 2], dtype=torch.int32)


@given(ragged_batches(), st.integers(1, 8))
def test_the_reference_is_a_norm_and_a_convolution(shape, width):
    batch, length, channels, lengths = shape
    x = torch.randn(batch, length, channels, dtype=torch.float64)
    tensors = [x, torch.rand(channels, dtype=torch.float64), torch.randn(channels, width, dtype=torch.float64)]

    def two_steps(x, norm_weight, weight, lengths):
        return causal_short_conv(F.rms_norm(x, (channels,), norm_weight, 1e-3), weight, lengths)

    def one_step(x, norm_weight, weight, lengths):
        return rms_norm_short_conv(x, norm_weight, weight, lengths, eps=1e-3)

    expected = outputs_and_gradients(two_steps, tensors, lengths)
    for found, exact in zip(outputs_and_gradients(one_step, tensors, lengths), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)


def test_gradients_agree_with_finite_differences():
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    norm_weight = torch.rand(4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *tensors: rms_norm_short_conv(*tensors, LENGTHS), (x, norm_weight, weight))


@given(ragged_batches(), st.integers(1, 8), st.sampled_from(DTYPES))
def test_kernels_are_inside_the_tolerance_rule_with_poisoned_padding(interpreted, shape, width, dtype):
    batch, length, channels, lengths = shape
    x = poison(torch.randn(batch, length, channels), lengths)
    tensors = [x, torch.rand(channels) + 0.5, torch.randn(channels, width)]
    assert_inside_the_tolerance(rms_norm_short_conv, tensors, lengths, dtype)


@pytest.mark.parametrize("config", [launch.Config(2, 64, 4, 8), launch.Config(1, 64, 8, 8)])
def test_runs_meet_without_a_seam(interpreted, config):
    x, norm_weight, weight, grad = torch.randn(2, 19, 10), torch.rand(10), torch.randn(10, 6), torch.randn(2, 19, 10)
    lengths = torch.tensor([19, 13], dtype=torch.int32)
    y, rstd = launch.forward(x, norm_weight, weight, lengths, 1e-6, torch.float32, config)
    found = launch.backward(grad, x, norm_weight, weight, lengths, rstd, config)
    exact = [t.double().requires_grad_() for t in (x, norm_weight, weight)]
    y64 = rms_norm_short_conv(*exact, lengths)
    for value, expected in zip((y, *found), (y64, *torch.autograd.grad(y64, exact, grad.double())), strict=True):
        torch.testing.assert_close(value, expected.float(), rtol=2e-5, atol=2e-5)


def test_without_eps_nothing_comes_in_from_before_the_first_position(interpreted):
    tensors = [torch.randn(2, 19, 5), torch.rand(5), torch.randn(5, 4)]
    assert_inside_the_tolerance(
        lambda *arguments: rms_norm_short_conv(*arguments, eps=0.0), tensors, [19, 4], torch.float32
    )


@pytest.mark.parametrize("eps", [-1.0, float("nan")])
def test_an_eps_that_makes_no_sense_is_named(eps):
    with pytest.raises(ConfigError, match="eps is"):
        rms_norm_short_conv(torch.randn(2, 5, 3), torch.rand(3), torch.randn(3, 2), LENGTHS, eps=eps)


def test_forward_mode_is_refused_not_zero():
    x, weights = torch.randn(2, 5, 3), (torch.rand(3), torch.randn(3, 2))
    with pytest.raises(ConfigError, match="forward-mode"):
        torch.func.jvp(lambda x: rms_norm_short_conv(x, *weights, LENGTHS), (x,), (x,))


def test_a_row_does_not_depend_on_its_batch(interpreted):
    x, norm_weight, weight = torch.randn(3, 9, 6), torch.rand(6), torch.randn(6, 4)
    lengths = torch.tensor([9, 0, 4], dtype=torch.int32)
    whole = rms_norm_short_conv(x, norm_weight, weight, lengths)
    for row in range(3):
        alone = rms_norm_short_conv(x[row : row + 1], norm_weight, weight, lengths[row : row + 1])
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_the_output_has_a_dtype_of_its_own(interpreted, monkeypatch, mode):
    monkeypatch.setitem(os.environ, MODE_VARIABLE, mode)
    x = torch.randn(2, 5, 6).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    norm_weight, weight = torch.rand(6, requires_grad=True), torch.randn(4, 6).T.requires_grad_()
    y = rms_norm_short_conv(x, norm_weight, weight, LENGTHS, out_dtype=torch.float16)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, rms_norm_short_conv(x, norm_weight, weight, LENGTHS).half())
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, norm_weight, weight))


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_the_registration_passes_opcheck(interpreted, monkeypatch, mode):
    monkeypatch.setitem(os.environ, MODE_VARIABLE, mode)
    x, norm_weight = torch.randn(2, 5, 3, requires_grad=True), torch.rand(3, requires_grad=True)
    weight = torch.randn(4, 3).T.requires_grad_()
    arguments = (x, norm_weight, weight, LENGTHS, 1e-6, torch.float16)
    torch.library.opcheck(torch.ops.zoo.rms_norm_short_conv.default, arguments)


def test_the_choice_says_why_not(interpreted):
    cpu, single = torch.device("cpu"), torch.float32
    assert launch.choose(cpu, single, torch.float16, 64, 4).ok
    assert "9 taps" in launch.choose(cpu, single, single, 64, 9).reason
    assert "4096 channels" in launch.choose(cpu, single, single, 4096, 4).reason
    assert "out_dtype" in launch.choose(cpu, single, torch.float64, 64, 4).reason


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.randn(2, 5)}, ShapeError, "three dimensions"),
        ({"norm_weight": torch.ones(4)}, ShapeError, "norm_weight"),
        ({"norm_weight": torch.ones(3, dtype=torch.int32)}, DTypeError, "norm_weight"),
        ({"weight": torch.randn(4, 4)}, ShapeError, "3 channels"),
        ({"weight": torch.randn(3, 4, device="meta")}, ShapeError, "on meta"),
        ({"lengths": torch.tensor([5], dtype=torch.int32)}, ShapeError, "2 rows"),
        ({"out_dtype": torch.int32}, DTypeError, "out_dtype"),
    ],
)
def test_a_misfit_is_named(change, error, words):
    arguments = {
        "x": torch.randn(2, 5, 3),
        "norm_weight": torch.ones(3),
        "weight": torch.randn(3, 4),
        "lengths": LENGTHS,
        **change,
    }
    with pytest.raises(error, match=words):
        rms_norm_short_conv(**arguments)
