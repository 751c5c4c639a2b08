"""The Triton kernels of gated bidirectional linear attention in Triton's interpreter, against the float64 reference."""

import itertools

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
)
from zoo.kernels.gated_bidirectional_linear_attention import (
    PackedLayout,
    gated_bidirectional_linear_attention,
    launch,
)
from zoo.kernels.gated_bidirectional_linear_attention.reference import gated_bidirectional_linear_attention_reference

interpreted = pytest.fixture(scope="module", autouse=True)(kernels_from_triton)

EPS = 1e-6
SWITCHES = list(itertools.product([True, False], repeat=2))
EDGES = [0, 1, 31, 32, 33, 65]


def attention(layout):
    return lambda packed, norm_weight, lengths: gated_bidirectional_linear_attention(
        packed,
        norm_weight,
        lengths,
        num_heads=layout.num_heads,
        head_dim=layout.head_dim,
        eps=EPS,
        key_gate=layout.key_gate,
        gated_norm=layout.gated_norm,
    )


class Launched(torch.autograd.Function):
    """The three launches with one configuration for all, where the op takes those of its table."""

    @staticmethod
    def forward(ctx, packed, norm_weight, lengths, layout, config):
        state = launch.reduce_state(packed, lengths, layout, config)
        ctx.save_for_backward(packed, norm_weight, lengths)
        ctx.rest = state, layout, config
        return launch.apply_state(packed, norm_weight, lengths, state, layout, EPS, config)

    @staticmethod
    def backward(ctx, grad):
        state, layout, config = ctx.rest
        return *launch.backward(grad, *ctx.saved_tensors, state, layout, EPS, config, config), None, None, None


def launched(layout, *, splits, block=16):
    """Return the op with its kernels launched for ``splits`` chunks a row; the reference where that is asked for."""
    config = launch.TileConfig(block, 4, 1, resident=1, splits=splits)

    def op(packed, norm_weight, lengths):
        if launch.choose(packed, layout).ok:
            return Launched.apply(packed, norm_weight, lengths, layout, config)
        return attention(layout)(packed, norm_weight, lengths)

    return op


def draw(layout, lengths, length=None):
    """Return a packed projection with NaN in padding and spare columns, and norm weights."""
    packed = torch.randn(len(lengths), max(lengths, default=0) if length is None else length, layout.width)
    packed[..., layout.used_width :] = torch.nan
    return [poison(packed, lengths), torch.rand(layout.num_heads, layout.head_dim) + 0.5]


@st.composite
def ragged(draw: st.DrawFn):
    length = draw(st.sampled_from(EDGES))
    lengths = draw(st.lists(st.sampled_from([n for n in EDGES if n <= length]), max_size=2))
    return length, lengths, draw(st.integers(1, 2)), draw(st.sampled_from([16, 32]))


@settings(max_examples=12)
@given(ragged(), st.sampled_from(SWITCHES), st.sampled_from(DTYPES))
def test_the_op_is_inside_the_tolerance_rule_with_poison_in_padding_and_spare_columns(shape, switches, dtype):
    length, lengths, heads, dim = shape
    layout = PackedLayout(heads, dim, *switches)
    assert_inside_the_tolerance(attention(layout), draw(layout, lengths, length), lengths, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("splits", [1, 3])
def test_chunks_meet_without_a_seam(splits, switches, dtype):
    layout, lengths = PackedLayout(1, 16, *switches), [35, 17, 0]
    assert_inside_the_tolerance(launched(layout, splits=splits), draw(layout, lengths), lengths, dtype)


def late_gates(by):
    def change(packed, layout):
        packed[:, 256:, layout.key_gate_logit : layout.used_width] += by

    return change


def columns(part, by, width=None):
    """Add to one part of the projection, to all its columns or to the first ``width`` alone."""

    def change(packed, layout):
        start = getattr(layout, part)
        packed[..., start : start + (width or layout.inner)] += by

    return change


EXTREMES = {
    "late gates +200": late_gates(200.0),
    "late gates +1e4": late_gates(1e4),
    "a key column -30": columns("key", -30.0, 1),
    "keys -30": columns("key", -30.0),
    "keys -90": columns("key", -90.0),
    "keys -300": columns("key", -300.0),
    "keys -3000": columns("key", -3000.0),
    "queries -90": columns("query", -90.0),
    "queries -3000": columns("query", -3000.0),
    "keys and queries +100": lambda packed, layout: packed[..., : 2 * layout.inner].add_(100.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_inside_the_tolerance_rule(name, splits, dtype):
    layout, lengths = PackedLayout(1, 16), [300]
    packed, norm_weight = draw(layout, lengths)
    EXTREMES[name](packed, layout)
    assert_inside_the_tolerance(launched(layout, splits=splits, block=128), [packed, norm_weight], lengths, dtype)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("part", ["query", "key", "value", "residual_gate", "key_gate_logit"])
@pytest.mark.parametrize("position", [5, 32], ids=["among others", "alone in its chunk"])
def test_a_nan_reaches_what_depends_on_it_and_nothing_else(part, position, splits):
    layout, lengths = PackedLayout(2, 16), torch.tensor([33, 48], dtype=torch.int32)
    packed, norm_weight = draw(layout, lengths.tolist())
    packed[0, position, getattr(layout, part)] = torch.nan
    config = launch.TileConfig(16, 4, 1, resident=1, splits=splits)
    state = launch.reduce_state(packed, lengths, layout, config)
    y = launch.apply_state(packed, norm_weight, lengths, state, layout, EPS, config)
    expected = gated_bidirectional_linear_attention_reference(packed, norm_weight, lengths, layout, EPS)
    assert torch.equal(y.isnan(), expected.isnan())
    assert expected.isnan().any()
    assert not y[0, :, 16:].isnan().any()
    assert not y[1].isnan().any()


@pytest.mark.parametrize("splits", [1, 3])
def test_positions_with_gates_of_minus_infinity_do_not_count(splits):
    layout, lengths = PackedLayout(1, 16), [48, 48]
    packed, norm_weight = draw(layout, lengths)
    packed[:, 16:33, layout.key_gate_logit] = -torch.inf
    packed[1, :, layout.key_gate_logit] = -torch.inf
    found = launched(layout, splits=splits)(packed, norm_weight, torch.tensor(lengths, dtype=torch.int32))
    expected = attention(layout)(packed.double(), norm_weight.double(), torch.tensor(lengths, dtype=torch.int32))
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


@settings(max_examples=5)
@given(st.integers(0, 99), st.sampled_from(SWITCHES))
def test_the_order_of_the_history_does_not_matter(seed, switches):
    generator = torch.Generator().manual_seed(seed)
    layout, lengths = PackedLayout(1, 16, *switches), torch.tensor([37], dtype=torch.int32)
    packed, norm_weight = torch.randn(1, 37, layout.width, generator=generator), torch.ones(1, 16)
    order = torch.randperm(37, generator=generator)
    op = attention(layout)
    torch.testing.assert_close(
        op(packed[:, order], norm_weight, lengths), op(packed, norm_weight, lengths)[:, order], rtol=1e-4, atol=1e-5
    )


def test_a_row_does_not_depend_on_its_batch():
    layout, lengths = PackedLayout(2, 16), [40, 0, 17]
    packed, norm_weight = draw(layout, lengths)
    for op, compare in ((launched(layout, splits=2), torch.equal), (attention(layout), torch.allclose)):
        whole = outputs_and_gradients(op, [packed, norm_weight], lengths)[0]
        for row, length in enumerate(lengths):
            alone = op(packed[row : row + 1], norm_weight, torch.tensor([length], dtype=torch.int32))
            assert compare(alone[0], whole[row])


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize(("length", "lengths"), [(0, []), (5, []), (0, [0, 0]), (3, [0, 0]), (1, [1]), (3, [0, 1])])
def test_empty_batches_sequences_and_rows(length, lengths, switches):
    layout = PackedLayout(1, 16, *switches)
    tensors = draw(layout, lengths, length)
    assert_inside_the_tolerance(attention(layout), tensors, lengths, torch.float32)
    grad_packed = outputs_and_gradients(attention(layout), tensors, lengths)[1]
    assert (grad_packed[..., layout.used_width :] == 0).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], 2)[..., : x.shape[2]],
        lambda x: torch.cat([x[..., :1], x], 2)[..., 1:],
    ],
    ids=["L before B", "P before L", "a slice of columns", "an odd offset"],
)
def test_any_strides_give_the_same(view):
    layout, lengths = PackedLayout(2, 16), [35, 7]
    packed, norm_weight = draw(layout, lengths)
    dense = outputs_and_gradients(attention(layout), [packed, norm_weight], lengths)
    inputs = [view(packed).detach().requires_grad_(), norm_weight.T.contiguous().T.requires_grad_()]
    y = attention(layout)(*inputs, torch.tensor([[n, 0] for n in lengths], dtype=torch.int32)[:, 0])
    generator = torch.Generator().manual_seed(1)
    grad = poison(torch.randn(y.shape, generator=generator, dtype=torch.float32).half().float(), lengths)
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    for found, expected in zip((y, *torch.autograd.grad(y, inputs, strided)), dense, strict=True):
        assert torch.equal(found, expected)


def test_an_expanded_gradient_is_read():
    layout, lengths = PackedLayout(1, 16), torch.tensor([5, 2], dtype=torch.int32)
    packed, norm_weight = draw(layout, lengths.tolist())
    packed.requires_grad_()
    (found,) = torch.autograd.grad(attention(layout)(packed, norm_weight, lengths).sum(), packed)
    exact = packed.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(attention(layout)(exact, norm_weight.double(), lengths).sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_wild_lengths_act_as_clamped():
    layout = PackedLayout(1, 16)
    packed, norm_weight = draw(layout, [4, 4])
    wild = attention(layout)(packed, norm_weight, torch.tensor([99, -5], dtype=torch.int32))
    assert torch.equal(wild, attention(layout)(packed, norm_weight, torch.tensor([4, 0], dtype=torch.int32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_saved_state_gives_the_gradients_of_a_state_computed_again(dtype):
    layout, lengths = PackedLayout(2, 16), torch.tensor([40, 9], dtype=torch.int32)
    packed, norm_weight = (t.to(dtype).requires_grad_() for t in draw(layout, lengths.tolist()))
    results = []
    for name in ("gated_bidirectional_linear_attention", "gated_bidirectional_linear_attention_training"):
        y = getattr(torch.ops.zoo, name)(packed, norm_weight, lengths, 2, 16, EPS, True, True)
        y = y[0] if isinstance(y, tuple) else y
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [packed, norm_weight])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_float16_gradients_of_wide_heads_run_in_float32_where_shared_memory_is_small(monkeypatch):
    monkeypatch.setattr(launch, "capability", lambda device: 89)
    assert launch.gradient_dtype(torch.float16, 128, 89) == torch.float32
    assert launch.gradient_dtype(torch.float16, 128, 90) == torch.float16
    layout = PackedLayout(1, 128)
    assert_inside_the_tolerance(attention(layout), draw(layout, [3, 18]), [3, 18], torch.float16)


def test_the_choice_says_why_not():
    cpu = torch.device("cpu")
    assert launch.choose_for(cpu, torch.float32, 64).ok
    assert "head width 24" in launch.choose_for(cpu, torch.float32, 24).reason
    assert "float64" in launch.choose_for(cpu, torch.float64, 64).reason


@pytest.mark.parametrize("name", ["", "_training"])
def test_the_registrations_pass_opcheck(name):
    packed = torch.randn(2, 5, PackedLayout(1, 16).width, requires_grad=True)
    arguments = (packed, torch.randn(1, 16, requires_grad=True), torch.tensor([5, 2], dtype=torch.int32))
    op = getattr(torch.ops.zoo, f"gated_bidirectional_linear_attention{name}").default
    torch.library.opcheck(op, (*arguments, 1, 16, EPS, True, True))


@pytest.mark.parametrize("gated_norm", [True, False])
def test_the_backward_passes_opcheck_with_a_norm_weight_in_another_order(gated_norm):
    layout, lengths = PackedLayout(2, 16, gated_norm=gated_norm), torch.tensor([5, 2], dtype=torch.int32)
    packed, norm_weight = torch.randn(2, 5, layout.width), torch.randn(16, 2).T
    settings = (2, 16, EPS, True, gated_norm)
    ops = torch.ops.zoo
    _, *state = ops.gated_bidirectional_linear_attention_training(packed, norm_weight, lengths, *settings)
    arguments = (torch.randn(2, 5, 32), packed, norm_weight, lengths, *state, *settings)
    torch.library.opcheck(ops.gated_bidirectional_linear_attention_backward.default, arguments)
