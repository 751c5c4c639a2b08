import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels.delta_rule import (
    EXTREMES,
    NAMES,
    as_lengths,
    by_name,
    disturbed,
    draw_grads,
    draw_inputs,
    in_dtype,
    in_float64,
    one_repeated_key,
    poisoned,
    run_op,
)
from tests.kernels.naive import naive_gated_delta_rule
from validate.tolerance import deviation
from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels import gated_delta_rule
from zoo.kernels.gated_delta_rule.reference import (
    Inputs,
    gated_delta_rule_backward_reference,
    gated_delta_rule_reference,
)


def run_recurrence(inputs, lengths, grads, *, normalize=False):
    scale, row_lengths = inputs.q.shape[3] ** -0.5, as_lengths(lengths)
    outputs = gated_delta_rule_reference(inputs, row_lengths, scale, normalize)
    grad_o = torch.zeros_like(inputs.v) if grads[0] is None else grads[0]
    found = gated_delta_rule_backward_reference(grad_o, grads[1], inputs, row_lengths, scale, normalize)
    return outputs, {n: g for n, g, x in zip(NAMES, found, inputs, strict=True) if x is not None}


def close(found, expected):
    for name in expected:
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=message)


@st.composite
def shapes(draw: st.DrawFn):
    batch, length = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(-1, length + 2), min_size=batch, max_size=batch))
    return batch, length, draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), lengths


@given(shapes(), st.booleans(), st.booleans(), st.sampled_from([None, 0.0, 0.3]))
def test_it_equals_the_papers_recurrence_and_poison_in_padding_changes_nothing(shape, with_state, normalize, scale):
    *sizes, lengths = shape
    inputs = draw_inputs(*sizes, with_state=with_state)
    used = sizes[3] ** -0.5 if scale is None else scale
    expected = naive_gated_delta_rule(*inputs, lengths, used, normalize)
    found = gated_delta_rule(*poisoned(inputs, lengths), as_lengths(lengths), scale=scale, normalize=normalize)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(shapes(), st.booleans(), st.booleans(), st.sampled_from(["o", "state", "both"]))
def test_gradients_are_those_of_the_papers_recurrence_and_zero_at_padding(shape, with_state, normalize, of):
    *sizes, lengths = shape
    inputs = draw_inputs(*sizes, with_state=with_state)
    grad_o, grad_state = draw_grads(inputs)
    grads = None if of == "state" else grad_o, None if of == "o" else grad_state
    leaves = [x.detach().clone().requires_grad_() for x in inputs if x is not None]
    scale = sizes[3] ** -0.5
    outputs = naive_gated_delta_rule(*leaves, *([] if with_state else [None]), lengths, scale, normalize)
    total = sum(((y * g).sum() for y, g in zip(outputs, grads, strict=True) if g is not None), torch.zeros(()))
    total = total + sum(0 * leaf.sum() for leaf in leaves)
    expected = dict(zip(NAMES, torch.autograd.grad(total, leaves), strict=False))
    if grads[0] is not None:
        for row, valid in enumerate(lengths):
            grads[0][row, max(valid, 0) :] = torch.nan
    _, found = run_op(poisoned(inputs, lengths), lengths, grads, normalize=normalize)
    close(found, expected)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_gradients_agree_with_finite_differences(normalize, with_state):
    inputs = draw_inputs(3, 4, 2, 3, 2, with_state=with_state)
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    lengths = as_lengths([4, 0, 2])

    def run(*tensors):
        state = tensors[5] if with_state else None
        return gated_delta_rule(*tensors[:5], state, lengths, normalize=normalize)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_chunks_and_recurrence_agree_around_the_borders_of_chunks(length, normalize):
    lengths = [length, length - 1, min(length, 64), 0]
    inputs = draw_inputs(4, length, 2, 5, 3)
    grads = draw_grads(inputs)
    outputs, gradients = run_op(poisoned(inputs, lengths), lengths, grads, normalize=normalize)
    expected, expected_gradients = run_recurrence(poisoned(inputs, lengths), lengths, grads, normalize=normalize)
    torch.testing.assert_close(tuple(outputs), expected, rtol=1e-9, atol=1e-9)
    close(gradients, expected_gradients)


@given(st.integers(0, 70), st.integers(0, 70), st.booleans(), st.data())
def test_a_history_may_be_read_in_two_parts(first, second, normalize, data):
    length = first + second
    lengths = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))
    inputs = draw_inputs(2, length, 2, 4, 3)
    whole_o, whole_state = run_op(inputs, lengths, normalize=normalize)
    start, rest = (Inputs(*(x[:, part] for x in inputs[:5]), None) for part in (slice(first), slice(first, None)))
    start_o, state = run_op(start._replace(initial_state=inputs.initial_state), lengths, normalize=normalize)
    rest_lengths = [n - first for n in lengths]
    rest_o, state = run_op(rest._replace(initial_state=state), rest_lengths, normalize=normalize)
    torch.testing.assert_close(torch.cat([start_o, rest_o], 1), whole_o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, whole_state, rtol=1e-9, atol=1e-9)


def test_steps_of_one_position_are_the_whole():
    inputs = draw_inputs(2, 9, 2, 4, 3)
    o, last = run_op(inputs, [9, 5], normalize=True)
    state = inputs.initial_state
    for t in range(9):
        step = Inputs(*(x[:, t : t + 1] for x in inputs[:5]), state)
        step_o, state = run_op(step, [1, int(t < 5)], normalize=True)
        torch.testing.assert_close(step_o[:, 0], o[:, t])
    torch.testing.assert_close(state, last)


def test_each_row_and_head_of_a_batch_is_on_its_own():
    inputs = draw_inputs(3, 70, 2, 4, 3)
    whole_o, whole_state = run_op(inputs, [70, 66, 0])
    for row, valid in enumerate([70, 66, 0]):
        for head in range(2):
            one = Inputs(*(x[row : row + 1, :, head : head + 1] for x in inputs[:5]), None)
            one = one._replace(initial_state=inputs.initial_state[row : row + 1, head : head + 1])
            o, state = run_op(one, [valid])
            torch.testing.assert_close(o[0, :, 0], whole_o[row, :, head])
            torch.testing.assert_close(state[0, 0], whole_state[row, head])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extremes_are_finite_and_agree_with_the_recurrence(extreme, normalize, dtype):
    inputs = EXTREMES[extreme](draw_inputs(2, 130, 2, 16, 4))
    assert_inside_the_tolerance(in_dtype(inputs, dtype), [130, 101], normalize=normalize)


def assert_inside_the_tolerance(inputs, lengths, *, normalize):
    """Judge both outputs and all gradients against the recurrence in float64, and return them.

    The recurrence has some of these cases exact by luck, so what float32 roundings of the inputs would do to the result
    is granted on top.
    """
    grads = draw_grads(inputs)
    found = by_name(run_op(inputs, lengths, grads, normalize=normalize))
    low = by_name(run_recurrence(inputs, lengths, grads, normalize=normalize))
    exact, grads = in_float64(inputs), [x.double() for x in grads]
    ref64 = by_name(run_recurrence(exact, lengths, grads, normalize=normalize))
    rounded = [by_name(run_recurrence(disturbed(exact), lengths, grads, normalize=normalize)) for _ in range(2)]
    for name, wanted in ref64.items():
        x = found[name]
        assert x.isfinite().all(), f"{name} is not finite"
        if inputs.q.dtype == torch.float64:
            torch.testing.assert_close(x, wanted, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
            continue
        judged = deviation(x, wanted, low[name], x.dtype)
        floor = [deviation(other[name], wanted, wanted, x.dtype) for other in rounded]
        assert judged.rms <= judged.rms_allowed + 4 * max(d.rms for d in floor), f"{name}: {judged}"
        assert judged.max <= judged.max_allowed + 4 * max(d.max for d in floor), f"{name}: {judged}"
    return found


@pytest.mark.parametrize("normalize", [False, True])
def test_an_infinite_decay_forgets_wholly_what_was_before(normalize):
    inputs = draw_inputs(1, 80, 2, 4, 3)
    inputs.log_decay[:, 70] = -torch.inf
    o, state = run_op(inputs, [80], normalize=normalize)
    later = Inputs(*(x[:, 70:] for x in inputs[:5]), None)
    later_o, later_state = run_op(later, [10], normalize=normalize)
    torch.testing.assert_close(o[:, 70:], later_o)
    torch.testing.assert_close(state, later_state)


def test_with_one_repeated_key_and_whole_writes_the_last_value_is_read():
    inputs = one_repeated_key(draw_inputs(1, 200, 1, 8, 3, with_state=False))
    inputs = in_dtype(inputs._replace(q=inputs.k), torch.float32)
    o, _ = gated_delta_rule(*inputs, as_lengths([200]), scale=1.0)
    torch.testing.assert_close(o, inputs.v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
def test_narrow_inputs_stay_inside_the_tolerance(dtype, normalize):
    inputs = in_dtype(draw_inputs(2, 200, 2, 16, 8), dtype)
    inputs = inputs._replace(log_decay=inputs.log_decay / 10)
    found = assert_inside_the_tolerance(inputs, [200, 111], normalize=normalize)
    assert (found["o"].dtype, found["state"].dtype) == (dtype, torch.float32)
    assert [found[f"grad {name}"].dtype for name in NAMES] == [x.dtype for x in inputs]


@given(shapes(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_log_decay_and_beta_may_be_of_any_floating_dtype(shape, dtype):
    *sizes, lengths = shape
    inputs = in_dtype(draw_inputs(*sizes), torch.float32)
    inputs = inputs._replace(log_decay=inputs.log_decay.to(dtype), beta=inputs.beta.to(dtype))
    (o, state), gradients = run_op(inputs, lengths, draw_grads(inputs))
    assert o.dtype == state.dtype == torch.float32
    assert gradients["log_decay"].dtype == gradients["beta"].dtype == dtype


def test_autocast_does_not_narrow_the_sums():
    inputs = in_dtype(draw_inputs(2, 70, 2, 8, 4), torch.float32)
    grads = draw_grads(inputs)
    plain = run_op(inputs, [70, 33], grads)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run_op(inputs, [70, 33], grads)
    torch.testing.assert_close(plain, cast, rtol=0, atol=0)


def op_arguments(batch=2, length=5, *, with_state=True, transposed=False, requires_grad=False):
    inputs = in_dtype(draw_inputs(batch, length, 2, 4, 3, with_state=with_state), torch.float32)
    if transposed:
        inputs = Inputs(*(None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    inputs = Inputs(*(None if x is None else x.requires_grad_(requires_grad) for x in inputs))
    return (*inputs, as_lengths([length, length // 2, 0][:batch]), 0.5, True)


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"with_state": False}, {"transposed": True}, {"batch": 0}])
def test_the_registration_passes_opcheck(length, options):
    arguments = op_arguments(length=length, requires_grad=True, **options)
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule.default, arguments)
    # What the reference keeps is NaN, which test_aot_dispatch_dynamic would call different: see the kernels' test.
    utils = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule_training.default, arguments, test_utils=utils)


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("options", [{}, {"with_state": False}, {"transposed": True}, {"batch": 0}])
@pytest.mark.parametrize("of_state", [False, True])
def test_the_backward_passes_opcheck(length, options, of_state):
    arguments = op_arguments(length=length, **options)
    grad_o, grad_state = draw_grads(Inputs(*arguments[:6]))
    kept = (torch.empty(0) for _ in range(4))
    arguments = (grad_o, grad_state if of_state else None, *arguments[:7], *kept, *arguments[7:])
    torch.library.opcheck(torch.ops.zoo.gated_delta_rule_backward.default, arguments)


@pytest.mark.parametrize("length", [0, 3])
def test_the_final_state_is_not_the_initial_one_in_memory(length):
    inputs = draw_inputs(1, length, 2, 4, 3)
    before = inputs.initial_state.clone()
    _, state = run_op(inputs, [0])
    assert torch.equal(state, before)
    state.zero_()
    assert torch.equal(inputs.initial_state, before)


def test_forward_and_backward_compile_without_graph_breaks():
    *inputs, lengths, _, _ = op_arguments(requires_grad=True)
    run = lambda *x: sum(y.square().sum() for y in gated_delta_rule(*x, lengths, normalize=True))  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    expected = torch.autograd.grad(run(*inputs), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


class Mixer(torch.nn.Module):
    def forward(self, q, k, v, log_decay, beta, state, lengths):
        return gated_delta_rule(q, k, v, log_decay, beta, state, lengths, normalize=True)


def test_a_length_of_another_number_of_chunks_compiles_nothing_anew():
    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(gated_delta_rule, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 64, 65, 200):
        q, k, v = (torch.randn(2, length, 2, 16, requires_grad=True) for _ in range(3))
        gates = -torch.rand(2, length, 2), torch.rand(2, length, 2)
        op(q, k, v, *gates, None, torch.tensor([length, 3], dtype=torch.int32), normalize=True)
    assert counter.frame_count == 1


@pytest.mark.parametrize("with_state", [False, True])
def test_it_exports_with_a_batch_and_a_length_of_any_size(with_state):
    *arguments, _, _ = op_arguments(with_state=with_state)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=4096)
    dims = [{0: batch, 1: length}] * 5 + [{0: batch} if with_state else None, {0: batch}]
    program = torch.export.export(Mixer(), tuple(arguments), dynamic_shapes=dims)
    assert "zoo.gated_delta_rule" in str(program.graph)
    *others, _, _ = op_arguments(batch=3, length=70, with_state=with_state)
    torch.testing.assert_close(program.module()(*others), Mixer()(*others), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused_not_zero(name):
    *inputs, lengths, _, _ = op_arguments()
    index = NAMES.index(name)

    def run(x):
        return gated_delta_rule(*inputs[:index], x, *inputs[index + 1 :], lengths)[0]

    def slope(x):
        return torch.func.jvp(run, (x,), (x,))[1]

    for differentiate in (slope, torch.compile(slope, backend="aot_eager")):
        with pytest.raises(ConfigError, match="forward-mode"):
            differentiate(inputs[index])


def test_forward_mode_is_refused_around_what_was_compiled_before():
    *inputs, lengths, _, _ = op_arguments()
    compiled = torch.compile(gated_delta_rule, backend="aot_eager")
    compiled(*inputs, lengths)
    with forward_ad.dual_level(), pytest.raises(ConfigError, match="forward-mode"):
        compiled(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:], lengths)


def test_activation_checkpointing_gives_the_same_gradient():
    *inputs, lengths, _, _ = op_arguments(requires_grad=True)
    run = lambda *x: gated_delta_rule(*x, lengths)[0].square().sum()  # noqa: E731
    plain = torch.autograd.grad(run(*inputs), inputs)
    checked = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False), inputs)
    assert all(torch.equal(x, y) for x, y in zip(plain, checked, strict=True))


ONES = torch.ones
MISFITS = [
    ("q", ONES(2, 5, 4), ShapeError, "q has shape .*four dimensions"),
    ("q", ONES(2, 5, 2, 4, dtype=torch.int32), DTypeError, "q has dtype torch.int32"),
    ("q", ONES(2, 5, 0, 4), ShapeError, "at least one head"),
    ("q", ONES(2, 5, 2, 0), ShapeError, "at least one head"),
    ("k", ONES(2, 5, 2, 3), ShapeError, r"k has shape \[2, 5, 2, 3\].*needs \[2, 5, 2, 4\]"),
    ("k", ONES(2, 5, 4), ShapeError, "k has shape"),
    ("k", ONES(2, 5, 2, 4, dtype=torch.bfloat16), DTypeError, "k has dtype torch.bfloat16 and q torch.float32"),
    ("k", ONES(2, 5, 2, 4, device="meta"), ShapeError, "k is on meta"),
    ("v", ONES(2, 4, 2, 3), ShapeError, r"v has shape \[2, 4, 2, 3\].*needs \[2, 5, 2, 3\]"),
    ("v", ONES(2, 5, 6), ShapeError, r"v has shape .*needs \[2, 5, 2, V\]"),
    ("v", ONES(2, 5, 2, 0), ShapeError, "at least one head"),
    ("v", ONES(2, 5, 2, 3, dtype=torch.float64), DTypeError, "v has dtype torch.float64"),
    ("v", ONES(2, 5, 2, 3, device="meta"), ShapeError, "v is on meta"),
    ("log_decay", ONES(2, 5, 3), ShapeError, "log_decay has shape"),
    ("log_decay", ONES(2, 5, 2, 4), ShapeError, "log_decay has shape"),
    ("log_decay", ONES(2, 5, 2, dtype=torch.int64), DTypeError, "log_decay has dtype torch.int64"),
    ("log_decay", ONES(2, 5, 2, device="meta"), ShapeError, "log_decay is on meta"),
    ("beta", ONES(2, 5, 1), ShapeError, "beta has shape"),
    ("beta", ONES(2, 5, 2, dtype=torch.bool), DTypeError, "beta has dtype torch.bool"),
    ("beta", ONES(2, 5, 2, device="meta"), ShapeError, "beta is on meta"),
    ("initial_state", ONES(2, 2, 3, 4), ShapeError, r"initial_state has shape .*needs \[2, 2, 4, 3\]"),
    ("initial_state", ONES(1, 2, 4, 3), ShapeError, "initial_state has shape"),
    ("initial_state", ONES(2, 2, 4, 3, dtype=torch.bfloat16), DTypeError, "initial_state .*must be torch.float32"),
    ("initial_state", ONES(2, 2, 4, 3, dtype=torch.float64), DTypeError, "initial_state .*must be torch.float32"),
    ("initial_state", ONES(2, 2, 4, 3, device="meta"), ShapeError, "initial_state is on meta"),
    ("lengths", torch.tensor([5, 2]), DTypeError, "torch.int32"),
    ("lengths", ONES(2, 1, dtype=torch.int32), ShapeError, "one length a row"),
    ("lengths", ONES(3, dtype=torch.int32), ShapeError, "lengths has 3"),
    ("lengths", ONES(2, dtype=torch.int32, device="meta"), ShapeError, "lengths is on meta"),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), MISFITS)
def test_a_misfit_is_named(name, value, error, words):
    *inputs, lengths, _, _ = op_arguments()
    arguments = {**dict(zip(NAMES, inputs, strict=True)), "lengths": lengths, name: value}
    with pytest.raises(error, match=rf"^gated_delta_rule: .*{words}"):
        gated_delta_rule(**arguments)


@pytest.mark.parametrize("name", [*NAMES, "lengths"])
def test_what_is_no_tensor_is_named(name):
    inputs = draw_inputs(1, 3, 1, 16, 16)
    arguments = dict(zip([*NAMES, "lengths"], [*inputs, as_lengths([3])], strict=True)) | {name: [1]}
    with pytest.raises(DTypeError, match=f"{name} is of type list, but a tensor is needed"):
        gated_delta_rule(**arguments)


def test_a_scale_whose_gradient_would_be_lost_is_refused():
    with pytest.raises(DTypeError, match="scale is a tensor"):
        gated_delta_rule(*draw_inputs(1, 3, 1, 16, 16), as_lengths([3]), scale=torch.tensor(0.5))
