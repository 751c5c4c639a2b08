"""The Triton kernels of the gated delta rule in Triton's interpreter, against the float64 reference."""

import math
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.delta_rule import (
    EXTREMES,
    NAMES,
    VIEWS,
    as_lengths,
    assert_zero_at_padding,
    by_name,
    disturbed,
    draw_grads,
    draw_inputs,
    each,
    in_dtype,
    in_float64,
    judge,
    poison,
    poisoned,
    run_chunked,
    run_op,
)
from tests.kernels.interpreting import DTYPES, kernels_from_triton
from zoo.kernels import gated_delta_rule
from zoo.kernels.gated_delta_rule import launch, parameters, triton_walk, walks
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import assumed_capability

interpreted = pytest.fixture(scope="module", autouse=True)(kernels_from_triton)

EDGES = [0, 1, 2, 8, 9, 63, 64, 65, 100, 128, 130]
MOST_CHUNKS = 4
MAP_NORESERVE = 0x4000
"""Linux's, which mmap names from Python 3.13 on."""


def assert_inside(inputs, lengths, grads=None, *, normalize, run=run_op, narrow=False):
    """Judge outputs and gradients of the interpreted kernels, with poison in padding, and return them by name.

    The low-precision reference is the chunked form. It sums in float32 and rounds its results; if ``narrow`` also the
    operands of its products, as the kernels do, for inputs that magnify what is lost there.
    """
    dtype = inputs.q.dtype
    inputs = poisoned(inputs, lengths)
    grad_o, grad_state = grads or draw_grads(inputs)
    grads = None if grad_o is None else poison(grad_o, lengths), grad_state
    wide = [None if x is None else x.double() for x in grads]
    assert launch.choose(inputs).ok
    found = by_name(run(inputs, lengths, grads, normalize=normalize))
    exact = in_float64(inputs)
    ref64, *rounded = (
        by_name(run_chunked(x, lengths, wide, normalize=normalize)) for x in (exact, disturbed(exact), disturbed(exact))
    )
    low = by_name(run_chunked(inputs, lengths, grads, normalize=normalize, narrow=narrow))
    judge(found, ref64, low, dtype, rounded)
    assert_zero_at_padding(found, lengths)
    assert (found["o"].dtype, found["state"].dtype) == (dtype, torch.float32)
    return found


def launched(forward=None, backward=None):
    """Return a twin of ``run_op`` whose launches are not those of the table."""

    def run(inputs, lengths, grads, *, normalize):
        call = inputs, as_lengths(lengths), inputs.q.shape[3] ** -0.5, normalize
        gradients = launch.backward(*grads, *call, **(backward or {}))
        return launch.forward(*call, **(forward or {})), dict(zip(NAMES, gradients, strict=True))

    return run


def draw(batch, length, heads, key_dim, value_dim, dtype, *, with_state=True, decay=1.0):
    inputs = draw_inputs(batch, length, heads, key_dim, value_dim, with_state=with_state)
    return in_dtype(inputs._replace(log_decay=decay * inputs.log_decay), dtype)


@st.composite
def sizes(draw: st.DrawFn):
    """B, T, H, K, V and lengths, at most four chunks in all: each costs the interpreter a quarter of a second."""
    length = draw(st.sampled_from(EDGES))
    chunks = max(1, -(-length // parameters.CHUNK))
    batch = draw(st.integers(0, min(3, MOST_CHUNKS // chunks)))
    heads = draw(st.integers(1, max(1, min(3, MOST_CHUNKS // (chunks * max(1, batch))))))
    lengths = draw(st.lists(st.integers(-1, length + 1), min_size=batch, max_size=batch))
    widths = st.sampled_from([16, 32, 64, 128])
    return (batch, length, heads, draw(widths), draw(widths)), lengths


@settings(max_examples=12)
@given(sizes(), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.sampled_from([1.0, 0.02]))
def test_the_op_is_inside_the_tolerance_rule_with_poison_in_padding(shape, dtype, with_state, normalize, decay):
    inputs = draw(*shape[0], dtype, with_state=with_state, decay=decay)
    assert_inside(inputs, shape[1], normalize=normalize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 128), (128, 16), (64, 32)])
def test_a_full_batch_of_each_kind_of_widths(key_dim, value_dim, dtype):
    assert_inside(draw(2, 130, 1, key_dim, value_dim, dtype, decay=0.05), [130, 66], normalize=dtype == torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [parameters.Segments(3, 1), parameters.Segments(2, 2)], ids=str)
def test_segments_of_a_row_meet_without_a_seam(cut, dtype):
    inputs, run = draw(2, 130, 1, 16, 32, dtype, decay=0.05), launched({"cut": cut}, {"cut": cut})
    assert_inside(inputs, [130, 40], normalize=dtype == torch.float16, run=run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_inside_the_tolerance_rule_across_segments(extreme, dtype):
    cut = {"cut": parameters.Segments(2, 1)}
    inputs = in_dtype(EXTREMES[extreme](draw_inputs(1, 100, 1, 16, 16)), dtype)
    assert_inside(inputs, [100], normalize=False, run=launched(cut, cut), narrow=True)


LONG = 64 * 6 - 10
"""Positions of six chunks, the last one not full."""


def walk_of(inputs, lengths, cut, *, normalize=False):
    lengths = as_lengths(lengths)
    return walks.Walk(inputs, lengths, launch.solve(inputs, lengths, normalize), normalize, None, cut)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        (lambda inputs: inputs, True),
        (
            lambda inputs: inputs._replace(
                k=1.5 * inputs.k, log_decay=0.4 * inputs.log_decay, beta=inputs.beta / 10 + 0.9
            ),
            False,
        ),
        (lambda inputs: inputs._replace(v=inputs.v * torch.linspace(4, -4, LONG).exp()[None, :, None, None]), True),
    ],
    ids=["decay", "growth that decay does not outweigh", "values that fade"],
)
def test_what_does_not_last_is_left_out(change, left_out, dtype):
    inputs = in_dtype(change(draw_inputs(2, LONG, 1, 16, 16)), dtype)
    lengths, cut = [LONG, 200], parameters.Segments(2, 3)
    spans = walk_of(inputs, lengths, cut).spans
    assert bool((spans[0, :, :, 0] > 0).all()) == left_out
    assert_inside(inputs, lengths, normalize=False, run=launched({"cut": cut}, {"cut": cut}))


def exact_bounds(inputs, normalize):
    """log2 of the product over each chunk of the norms of a (I - b k k^T), [B, H, N] float64."""
    k = inputs.k.double()
    squares = k.square().sum(3)
    if normalize:
        squares = squares / (squares + 1e-6)
    steps = inputs.log_decay.double() / math.log(2) + (1 - inputs.beta.double() * squares).abs().clamp(min=1).log2()
    padded = torch.nn.functional.pad(steps.transpose(1, 2), (0, -steps.shape[1] % 64))
    return padded.unflatten(2, (-1, 64)).sum(3)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_those_of_the_products_of_norms(dtype, normalize):
    inputs = draw_inputs(1, 130, 2, 16, 16, key_size=1.3)
    inputs = in_dtype(inputs._replace(beta=3 * inputs.beta), dtype)
    found = launch.solve(inputs, as_lengths([130]), normalize).bounds
    torch.testing.assert_close(found.double(), exact_bounds(inputs, normalize), rtol=1e-4, atol=1e-2)


def spans_by_definition(bounds, chunks, cut, limit):
    found = []
    for segment in range(cut.number):
        mine = bounds[segment * cut.chunks : min((segment + 1) * cut.chunks, chunks)]
        lasts = [not sum(mine[i + 1 :]) < -limit for i in range(len(mine))]
        seen = [not sum(mine[:i]) < -limit for i in range(len(mine))]
        first = lasts.index(True) if mine else 0
        stop = len(mine) - seen[::-1].index(True) if mine else 0
        found.append([first, stop, int(not sum(mine) < -limit)])
    return found


@pytest.mark.parametrize("chunks", [0, 1, 63, 64, 65, 129, 200, 260])
@pytest.mark.parametrize("kind", ["decay", "growth", "infinite decay", "nan"])
def test_spans_are_those_of_their_definition(kind, chunks):
    cut = parameters.Segments(2, 130)
    bounds = -torch.rand(260)
    if kind == "growth":
        bounds[::5] += 3
    if kind == "infinite decay":
        bounds[[3, 64, 131, 199]] = -torch.inf
    if kind == "nan":
        bounds[[64, 198]] = torch.nan
    spans = torch.empty(1, 1, 2, 3, dtype=torch.int32)
    triton_walk.spans_kernel[(2,)](
        bounds, as_lengths([max(64 * chunks - 5, 0)]), spans, 64 * 260, 1, 260, *cut, LIMIT=20, num_warps=1
    )
    assert spans[0, 0].tolist() == spans_by_definition(bounds.tolist(), chunks, cut, 20)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_inside_the_tolerance_rule(extreme, dtype, normalize):
    inputs = EXTREMES[extreme](draw_inputs(1, 70, 1, 16, 16))
    assert_inside(in_dtype(inputs, dtype), [70], normalize=normalize, narrow=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_of_a_few_positions_are_inside_the_tolerance_rule(extreme, dtype):
    length = parameters.LONGEST_STEP
    inputs = in_dtype(EXTREMES[extreme](draw_inputs(1, length, 2, 16, 16)), dtype)
    exact = in_float64(inputs)
    found, low, ref64, *rounded = (
        dict(zip(("o", "state"), outputs, strict=True))
        for outputs in (
            run_op(inputs, [length], normalize=True),
            *(run_chunked(x, [length], normalize=True) for x in (inputs, exact, disturbed(exact))),
        )
    )
    judge(found, ref64, low, dtype, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ["o", "state"])
def test_either_output_may_be_the_only_one_with_a_gradient(of, dtype):
    inputs = draw(1, 70, 1, 16, 32, dtype, decay=0.05)
    grad_o, grad_state = draw_grads(inputs)
    assert_inside(inputs, [66], (grad_o, None) if of == "o" else (None, grad_state), normalize=True)


@pytest.mark.parametrize(("length", "lengths"), [(0, []), (5, []), (0, [0, 0]), (3, [0, 0]), (1, [1]), (3, [0, 1])])
@pytest.mark.parametrize("with_state", [False, True])
def test_empty_batches_sequences_and_rows(with_state, length, lengths):
    inputs = draw(len(lengths), length, 1, 16, 16, torch.float32, with_state=with_state)
    grads = draw_grads(inputs)
    found = assert_inside(inputs, lengths, grads, normalize=True)
    for row, valid in enumerate(lengths):
        if valid == 0:
            before = inputs.initial_state[row] if with_state else torch.zeros_like(found["state"][row])
            assert torch.equal(found["state"][row], before)
            assert not with_state or torch.equal(found["grad initial_state"][row], grads[1][row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_beyond_the_sequence_act_as_clamped(dtype):
    inputs = draw(2, 70, 1, 16, 16, dtype)
    grads = draw_grads(inputs)
    wild, tame = (by_name(run_op(inputs, lengths, grads)) for lengths in ([99, -5], [70, 0]))
    assert_equal(wild, tame)


def assert_equal(found, expected):
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_bits_each_time_and_of_each_row_and_head_alone(dtype):
    lengths = [70, 0]
    inputs = draw(2, 70, 2, 16, 32, dtype)
    grad_o, grad_state = draw_grads(inputs)
    whole = by_name(run_op(inputs, lengths, (grad_o, grad_state), normalize=True))
    assert_equal(by_name(run_op(inputs, lengths, (grad_o, grad_state), normalize=True)), whole)
    for row, head in ((0, 1), (1, 0)):

        def alone(x, name, row=row, head=head):
            heads_last = name not in ("state", "initial_state", "grad initial_state")
            return x[row : row + 1, :, head : head + 1] if heads_last else x[row : row + 1, head : head + 1]

        one = Inputs(*(alone(x, name) for name, x in zip(NAMES, inputs, strict=True)))
        grads = alone(grad_o, "o"), alone(grad_state, "state")
        found = by_name(run_op(one, lengths[row : row + 1], grads, normalize=True))
        assert_equal(found, {name: alone(x, name) for name, x in whole.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefill", [1, 40, 64])
def test_a_history_may_be_read_in_two_parts_and_the_rest_in_steps(prefill, dtype):
    inputs, length = draw(2, prefill + 3, 1, 16, 16, dtype), prefill + 3
    lengths = [length, prefill + 1]
    whole_o, whole_state = run_op(inputs, lengths, normalize=True)
    outputs, state = [], inputs.initial_state
    for start, end in ((0, prefill), *((t, t + 1) for t in range(prefill, length))):
        part = Inputs(*(x[:, start:end] for x in inputs[:5]), state)
        o, state = run_op(part, [n - start for n in lengths], normalize=True)
        outputs.append(o)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat(outputs, 1), whole_o, rtol=eps, atol=8 * eps)
    torch.testing.assert_close(state, whole_state, rtol=eps, atol=8 * eps)


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_give_the_same(view):
    inputs, lengths = draw(2, 20, 2, 16, 32, torch.float32), as_lengths([20, 3])
    inputs = inputs._replace(beta=inputs.beta.float())
    grads = draw_grads(inputs)

    def run(inputs, grads, lengths):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = gated_delta_rule(*leaves, lengths, normalize=True)
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    viewed = VIEWS[view](inputs)
    assert not all(x.is_contiguous() for x in viewed)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in grads]
    found = run(viewed, strided, torch.stack([lengths, lengths], 1)[:, 0])
    for x, wanted in zip(found, run(inputs, grads, lengths), strict=True):
        assert torch.equal(x, wanted)


def test_an_expanded_gradient_is_read():
    inputs, lengths = draw(2, 5, 1, 16, 16, torch.float32), as_lengths([5, 2])

    def gradient(inputs):
        k = inputs.k.detach().requires_grad_()
        o, state = gated_delta_rule(*inputs._replace(k=k), lengths)
        return torch.autograd.grad(o.sum() + state.sum(), k)[0].double()

    torch.testing.assert_close(gradient(inputs), gradient(in_float64(inputs)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_log_decay_and_beta_may_have_their_own_dtype_and_so_have_their_gradients(dtype):
    inputs = draw(1, 20, 1, 16, 16, torch.float32)
    inputs = inputs._replace(log_decay=inputs.log_decay.to(dtype), beta=inputs.beta.half())
    found = assert_inside(inputs, [17], normalize=True)
    assert (found["grad log_decay"].dtype, found["grad beta"].dtype) == (dtype, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES[:5])
def test_a_nan_stays_in_its_row_and_head_and_later_chunks(name, dtype):
    inputs, lengths = draw(2, 130, 2, 16, 16, dtype), as_lengths([130, 67])
    given = getattr(inputs, name).clone()
    given[0, 66, 1] = torch.nan
    o, state = launch.forward(inputs._replace(**{name: given}), lengths, 0.25, True)
    assert o[0, 66:128, 1].isnan().any()
    o[0, 64:, 1] = state[0, 1] = 0
    assert o.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_blocks_of_values_with_tensor_memory_access_are_inside_the_tolerance_rule(dtype):
    walk = parameters.WalkConfig(16, 4, 1, tma=True)
    run = launched({"walk_with": walk}, {"walk_with": walk, "walk_back_with": walk})
    assert_inside(draw(2, 70, 1, 16, 32, dtype), [70, 64], normalize=dtype == torch.float16, run=run)


def test_the_choice_says_why_not():
    cpu = torch.device("cpu")
    assert launch.choose_for(cpu, torch.float32, 64, 128).ok
    assert "key width 24" in launch.choose_for(cpu, torch.float32, 24, 64).reason
    assert "value width 24" in launch.choose_for(cpu, torch.float32, 64, 24).reason
    assert "float64" in launch.choose_for(cpu, torch.float64, 64, 64).reason
    with assumed_capability(75):
        assert "7.5 is older" in launch.choose_for(torch.device("cuda"), torch.float16, 64, 64).reason


def test_the_registrations_pass_opcheck():
    inputs = each(draw(2, 5, 1, 16, 16, torch.float32), torch.Tensor.requires_grad_)
    arguments = (*inputs, as_lengths([5, 2]), 0.25, True)
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule.default, arguments)
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule_training.default, arguments)
    kept = [x.detach() for x in torch.ops.zoo.gated_delta_rule_training(*arguments)[2:]]
    backward = (*draw_grads(inputs), *each(inputs, torch.Tensor.detach), as_lengths([5, 2]), *kept, 0.25, True)
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule_backward.default, backward)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("length", [0, 3, 70])
def test_what_the_forward_keeps_changes_no_bit(length, normalize):
    inputs = draw(2, length, 1, 16, 16, torch.float32)
    tensors = each(inputs._replace(k=inputs.k / 4), lambda x: x.clone().requires_grad_())
    lengths = as_lengths([length, length // 2])
    results = []
    for op in (torch.ops.zoo.gated_delta_rule_training, torch.ops.zoo.gated_delta_rule):
        o, state, *_ = op(*tensors, lengths, 0.25, normalize)
        results.append([o, state, *torch.autograd.grad((o.sin().sum(), state.cos().sum()), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["q", "v", "beta"])
@pytest.mark.parametrize("length", [3, 70])
def test_heads_farther_apart_than_32_bits_reach_are_read(name, length):
    """The third head begins 2^31 values on, in memory of which only what is written is there."""
    heads, apart = 3, 2**30 + 64
    inputs = in_dtype(draw_inputs(1, length, heads, 16, 16), torch.float32)
    grads = draw_grads(inputs)
    x = getattr(inputs, name)
    row = x[0, 0, 0].numel()
    number = (heads - 1) * apart + length * row
    reserved = mmap.mmap(-1, 4 * number, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    far = torch.frombuffer(reserved, dtype=torch.float32, count=number)
    far = far.as_strided(x.shape, (heads * apart, row, apart, 1)[: x.dim()]).copy_(x)

    def run(inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = gated_delta_rule(*leaves, as_lengths([length]))
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    for near, found in zip(run(inputs), run(inputs._replace(**{name: far})), strict=True):
        assert torch.equal(near, found)
