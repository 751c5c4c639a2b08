"""The function body of the gated delta rule against the recurrence in float64, which shares no code with it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.running import (
    assert_as_good_as_pytorch,
    in_onnx_runtime,
    in_reference_evaluator,
    one_node,
    poisoned,
    ragged,
)
from zoo.kernels.gated_delta_rule.reference import Inputs, gated_delta_rule_reference
from zoo.plugins import op_spec

DELTA = op_spec("GatedDeltaRule")
RUNS = {"ONNX Runtime": in_onnx_runtime, "reference evaluator": in_reference_evaluator}
RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def case(batch, heads=2, key_dim=4, value_dim=3, *, log_decay=None, beta=None, same_keys=False, dtype=torch.float32):
    """Return the inputs of the node, padding poisoned; ``log_decay`` and ``beta`` are drawn where they are None."""
    length, lengths, seed = batch
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(len(lengths), *shape, generator=generator)

    q, k, v = normal(length, heads, key_dim), normal(length, heads, key_dim), normal(length, heads, value_dim)
    k = k / key_dim**0.5
    if same_keys:
        k = k[:, :1].expand_as(k)
    log_decays = -normal(length, heads).abs() if log_decay is None else torch.full(q.shape[:3], log_decay)
    betas = normal(length, heads).sigmoid() if beta is None else torch.full(q.shape[:3], beta)
    q, k, v, betas = (x.to(dtype) for x in (q, k, v, betas))
    return [poisoned(x, lengths) for x in (q, k, v, log_decays, betas)], normal(heads, key_dim, value_dim), lengths


def assert_as_good_as_the_recurrence(run, tensors, state, lengths, *, scale=0.5, normalize=False, opset=23):
    dtype = tensors[0].dtype
    model = one_node(DELTA, {"scale": scale, "normalize": int(normalize)}, dtype, opset)
    exact = gated_delta_rule_reference(
        Inputs(*(x.double() for x in tensors), state.double()), lengths, scale, normalize
    )
    low = gated_delta_rule_reference(Inputs(*tensors, state), lengths, scale, normalize)
    outputs = run(model, *tensors, state, lengths)
    for out, ref64, ref_lo in zip(outputs, exact, low, strict=True):
        assert_as_good_as_pytorch(out, ref64, ref_lo)
    for row, length in enumerate(lengths.tolist()):
        assert (outputs[0][row, max(length, 0) :] == 0).all()
        if length <= 0:
            assert torch.equal(outputs[1][row], state[row])
    return outputs


@RUN
@given(
    batch=ragged((0, 1, 2, 3, 7, 33)),
    heads=st.sampled_from([1, 3]),
    key_dim=st.sampled_from([1, 4, 8]),
    value_dim=st.sampled_from([1, 4, 6]),
    scale=st.sampled_from([1.0, 0.125]),
    normalize=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_the_body_equals_the_recurrence(run, batch, heads, key_dim, value_dim, scale, normalize, dtype):
    tensors, state, lengths = case(batch, heads, key_dim, value_dim, dtype=dtype)
    assert_as_good_as_the_recurrence(run, tensors, state, lengths, scale=scale, normalize=normalize)


@RUN
@given(
    batch=ragged((1, 5, 40)),
    log_decay=st.sampled_from([0.0, -1e-4, -20.0, -1000.0, -torch.inf]),
    beta=st.sampled_from([0.0, 1.0, None]),
    same_keys=st.booleans(),
)
def test_no_decay_or_all_of_it_writes_that_replace_or_do_nothing_and_one_key_for_all(
    run, batch, log_decay, beta, same_keys
):
    tensors, state, lengths = case(batch, log_decay=log_decay, beta=beta, same_keys=same_keys)
    assert_as_good_as_the_recurrence(run, tensors, state, lengths, normalize=True)


@RUN
def test_keys_queries_and_values_of_zero_are_no_division_by_zero(run):
    tensors, state, lengths = case((5, torch.tensor([5, 3], dtype=torch.int32), 0))
    tensors[:3] = (torch.where(x.isnan(), x, 0.0) for x in tensors[:3])
    assert_as_good_as_the_recurrence(run, tensors, state, lengths, normalize=True)


@RUN
def test_padded_outputs_are_zero_even_where_the_state_has_overflowed(run):
    tensors, state, lengths = case((3, torch.tensor([1, 0], dtype=torch.int32), 0))
    model = one_node(DELTA, {"scale": 1.0, "normalize": 1}, torch.float32)
    with np.errstate(invalid="ignore"):
        o, _ = run(model, *tensors, state * torch.inf, lengths)
    assert (o[0, 1:] == 0).all() and (o[1] == 0).all()


@pytest.mark.parametrize("length", [0, 1, 7])
def test_the_reference_evaluator_runs_the_body_in_bfloat16_too(length):
    batch = length, torch.tensor([length, 0, length // 2], dtype=torch.int32), 0
    tensors, state, lengths = case(batch, dtype=torch.bfloat16)
    assert_as_good_as_the_recurrence(in_reference_evaluator, tensors, state, lengths, normalize=True)


@pytest.mark.parametrize("opset", [18, 20, 21, 25])
def test_the_body_can_be_written_in_other_operator_sets(opset):
    tensors, state, lengths = case((5, torch.tensor([5, 2], dtype=torch.int32), 0))
    assert_as_good_as_the_recurrence(in_onnx_runtime, tensors, state, lengths, opset=opset)


def test_errors_do_not_grow_over_a_thousand_positions_of_one_key():
    """Each write replaces what the last one wrote: the memory holds one value, however long the history."""
    tensors, state, lengths = case((1000, torch.tensor([1000], dtype=torch.int32), 0), log_decay=0.0, beta=1.0)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1]).contiguous()
    tensors[0] = tensors[1]
    o, _ = assert_as_good_as_the_recurrence(in_onnx_runtime, tensors, state, lengths, scale=1.0, normalize=True)
    torch.testing.assert_close(o, tensors[2], rtol=0, atol=1e-4)


def test_the_state_goes_on_where_it_stopped():
    tensors, state, _ = case((9, torch.tensor([9, 9], dtype=torch.int32), 0))
    model = one_node(DELTA, {"scale": 0.5, "normalize": 1}, torch.float32)

    def run(first, last, state):
        part = [x[:, first:last].contiguous() for x in tensors]
        return in_onnx_runtime(model, *part, state, torch.full((2,), last - first, dtype=torch.int32))

    whole, final = run(0, 9, state)
    head, middle = run(0, 4, state)
    tail, end = run(4, 9, middle)
    assert torch.equal(torch.cat([head, tail], 1), whole) and torch.equal(end, final)
