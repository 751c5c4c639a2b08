import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.naive import naive_causal_short_conv
from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels import causal_short_conv


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    batch, length, channels = draw(st.integers(0, 4)), draw(st.integers(0, 9)), draw(st.integers(1, 5))
    return batch, length, channels, draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))


@given(ragged_batches(), st.integers(1, 5), st.sampled_from(["none", "silu"]))
def test_it_equals_the_sum_over_taps_and_poisoned_padding_changes_nothing(shape, width, activation):
    batch, length, channels, lengths = shape
    x = torch.randn(batch, length, channels, dtype=torch.float64)
    weight = torch.randn(channels, width, dtype=torch.float64)
    expected = naive_causal_short_conv(x, weight, lengths, activation)
    for row, valid in enumerate(lengths):
        x[row, valid:] = torch.nan
    y = causal_short_conv(x, weight, torch.tensor(lengths, dtype=torch.int32), activation=activation)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_gradients_agree_with_finite_differences(activation):
    x = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([6, 0, 2], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x, w: causal_short_conv(x, w, lengths, activation=activation), (x, weight))


def test_no_gradient_reaches_or_leaves_the_padding():
    x = torch.randn(2, 5, 3, requires_grad=True)
    weight = torch.randn(3, 4, requires_grad=True)
    y = causal_short_conv(x, weight, torch.tensor([5, 2], dtype=torch.int32))
    y.backward(
        torch.full_like(y, torch.nan).masked_fill(
            torch.arange(5)[None, :, None] < torch.tensor([5, 2])[:, None, None], 1
        )
    )
    assert x.grad is not None and weight.grad is not None
    assert weight.grad.isfinite().all()
    assert (x.grad[1, 2:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_keeps_the_dtype_and_sums_in_float32(dtype):
    x, weight = torch.randn(2, 50, 8).to(dtype), torch.randn(8, 4).to(dtype)
    lengths = torch.tensor([50, 17], dtype=torch.int32)
    y = causal_short_conv(x, weight, lengths)
    exact = causal_short_conv(x.double(), weight.double(), lengths)
    assert y.dtype == dtype
    magnitude = causal_short_conv(x.double().abs(), weight.double().abs(), lengths)
    sum_error = 4 * torch.finfo(torch.float32).eps * magnitude  # four products, four additions
    assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + sum_error).all()


def test_lengths_beyond_the_tensor_act_as_clamped():
    x, weight = torch.randn(2, 4, 3), torch.randn(3, 4)
    wild = causal_short_conv(x, weight, torch.tensor([99, -5], dtype=torch.int32))
    tame = causal_short_conv(x, weight, torch.tensor([4, 0], dtype=torch.int32))
    assert torch.equal(wild, tame)


def test_non_contiguous_input_gives_the_same():
    x, weight = torch.randn(5, 2, 3).transpose(0, 1), torch.randn(4, 3).T
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    assert torch.equal(
        causal_short_conv(x, weight, lengths), causal_short_conv(x.contiguous(), weight.contiguous(), lengths)
    )


def test_the_registration_passes_opcheck():
    x, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    torch.library.opcheck(torch.ops.zoo.causal_short_conv.default, (x, weight, lengths, "silu"))


def test_it_compiles_without_graph_breaks():
    x, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(3, 4)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    compiled = torch.compile(lambda x: causal_short_conv(x, weight, lengths) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), causal_short_conv(x, weight, lengths) * 2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.randn(2, 5)}, ShapeError, "three dimensions"),
        ({"x": torch.ones(2, 5, 3, dtype=torch.int64)}, DTypeError, "int64"),
        ({"weight": torch.randn(4, 4)}, ShapeError, "3 channels"),
        ({"weight": torch.randn(3, 0)}, ShapeError, "W of 1 or more"),
        ({"weight": torch.ones(3, 4, dtype=torch.int32)}, DTypeError, "weight"),
        ({"lengths": torch.tensor([5, 2])}, DTypeError, "torch.int32"),
        ({"lengths": torch.tensor([5], dtype=torch.int32)}, ShapeError, "2 rows"),
        ({"lengths": torch.tensor([[5, 2]], dtype=torch.int32)}, ShapeError, "one length a row"),
        ({"weight": torch.randn(3, 4, device="meta")}, ShapeError, "on meta"),
        ({"activation": "gelu"}, ConfigError, "gelu"),
    ],
)
def test_a_misfit_is_named(change, error, words):
    arguments = {
        "x": torch.randn(2, 5, 3),
        "weight": torch.randn(3, 4),
        "lengths": torch.tensor([5, 2], dtype=torch.int32),
        **change,
    }
    with pytest.raises(error, match=words):
        causal_short_conv(**arguments)


def test_forward_mode_is_refused_not_zero():
    x, weight, lengths = torch.randn(2, 5, 3), torch.randn(3, 2), torch.tensor([5, 2], dtype=torch.int32)
    with pytest.raises(ConfigError, match="forward-mode"):
        torch.func.jvp(lambda x: causal_short_conv(x, weight, lengths), (x,), (x,))
