"""What the tests of Triton kernels without a GPU share: the interpreter, ragged cases, the tolerance rule."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from validate.tolerance import deviation
from zoo.kernels.launch import MODE_VARIABLE, choose_triton

DTYPES = (torch.float32, torch.float16)
"""``tl.dot`` on bfloat16 is wrong in the interpreter; bfloat16 is tested on the GPU."""


def kernels_from_triton() -> Iterator[None]:
    """Make every op use its Triton kernels, interpreted; the body of a module's autouse fixture."""
    before = os.environ.get(MODE_VARIABLE)
    os.environ[MODE_VARIABLE] = "triton"
    try:
        choice = choose_triton(torch.device("cpu"), torch.float32)
        if not choice.ok:
            pytest.skip(f"no interpreter: {choice.reason}")
        yield
    finally:
        if before is None:
            del os.environ[MODE_VARIABLE]
        else:
            os.environ[MODE_VARIABLE] = before


@st.composite
def ragged_batches(draw: st.DrawFn, longest: int = 11, most_channels: int = 9) -> tuple[int, int, int, list[int]]:
    """Draw B, L, C and B lengths, empty batches, empty sequences and empty rows included."""
    batch, length = draw(st.integers(0, 3)), draw(st.integers(0, longest))
    lengths = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    return batch, length, draw(st.integers(1, most_channels)), lengths


def poison(x: Tensor, lengths: list[int]) -> Tensor:
    """Return ``x`` [B, L, ...] with NaN at padded positions."""
    x = x.clone()
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    return x


def outputs_and_gradients(
    op: Callable[..., Tensor], tensors: list[Tensor], lengths: list[int], *, disturbed: bool = False
) -> list[Tensor]:
    """Return ``op(*tensors, lengths)`` and the gradients of all tensors for a poisoned output gradient."""
    change = _disturbed if disturbed else torch.clone
    inputs = [change(t.detach()).requires_grad_() for t in tensors]
    y = op(*inputs, torch.tensor(lengths, dtype=torch.int32))
    generator = torch.Generator().manual_seed(1)
    grad = poison(torch.randn(y.shape, generator=generator, dtype=torch.float32).half(), lengths).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, change(grad))]


def assert_inside_the_tolerance(
    op: Callable[..., Tensor], tensors: list[Tensor], lengths: list[int], dtype: torch.dtype
) -> None:
    """Judge output and gradients of the interpreted kernels by the tolerance rule and demand zeros at padding.

    A case may be one sum that cancels and that the reference has exact by luck. So what float32 roundings of the inputs
    would do to the result is granted on top, as the floor of any float32 sum.
    """
    tensors = [t.to(dtype) for t in tensors]
    found = outputs_and_gradients(op, tensors, lengths)
    exact = [t.double() for t in tensors]
    ref64 = outputs_and_gradients(op, exact, lengths)  # float64 always takes the reference
    rounded = [outputs_and_gradients(op, exact, lengths, disturbed=True) for _ in range(4)]
    os.environ[MODE_VARIABLE] = "reference"
    try:
        low = outputs_and_gradients(op, tensors, lengths)
    finally:
        os.environ[MODE_VARIABLE] = "triton"
    for i, out in enumerate(found):
        judged = deviation(out, ref64[i], low[i], dtype)
        floor = [deviation(other[i], ref64[i], ref64[i], dtype) for other in rounded]
        assert judged.rms <= judged.rms_allowed + 4 * max(d.rms for d in floor), judged
        assert judged.max <= judged.max_allowed + 4 * max(d.max for d in floor), judged
    for output in found[:2]:  # y and the gradient of x
        for row, length in enumerate(lengths):
            assert (output[row, length:] == 0).all()


def _disturbed(x: Tensor) -> Tensor:
    return x * (1 + torch.finfo(torch.float32).eps * torch.empty_like(x).uniform_(-1, 1))
