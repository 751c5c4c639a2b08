import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.naive import naive_gbla
from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.kernels import gated_bidirectional_linear_attention, packed_width

SWITCHES = list(itertools.product([False, True], [False, True]))


def pack(parts: dict[str, torch.Tensor], width: int) -> torch.Tensor:
    columns = [parts[name].flatten(2) for name in ("q", "k", "v", "r", "s") if name in parts]
    packed = torch.cat(columns, -1)
    padding = torch.full((*packed.shape[:2], width - packed.shape[2]), torch.nan, dtype=packed.dtype)
    return torch.cat([packed, padding], -1)


def draw_parts(batch, length, heads, dim, key_gate, gated_norm, scale=1.0):
    names = ["q", "k", "v"] + (["r"] if gated_norm else [])
    parts = {name: scale * torch.randn(batch, length, heads, dim, dtype=torch.float64) for name in names}
    if key_gate:
        parts["s"] = scale * torch.randn(batch, length, heads, dtype=torch.float64)
    return parts


def attend(packed, norm_weight, lengths, heads, dim, key_gate=True, gated_norm=True):
    return gated_bidirectional_linear_attention(
        packed,
        norm_weight,
        torch.tensor(lengths, dtype=torch.int32),
        num_heads=heads,
        head_dim=dim,
        key_gate=key_gate,
        gated_norm=gated_norm,
    )


@st.composite
def shapes(draw: st.DrawFn):
    batch, length = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    return batch, length, draw(st.integers(1, 3)), draw(st.integers(1, 4)), lengths


@given(shapes(), st.sampled_from(SWITCHES), st.sampled_from([0.1, 1.0, 8.0]))
def test_it_equals_the_papers_sums_and_poison_in_padding_and_spare_columns_changes_nothing(shape, switches, scale):
    batch, length, heads, dim, lengths = shape
    key_gate, gated_norm = switches
    parts = draw_parts(batch, length, heads, dim, key_gate, gated_norm, scale)
    norm_weight = torch.randn(heads, dim, dtype=torch.float64)
    expected = naive_gbla(parts["q"], parts["k"], parts["v"], parts.get("s"), parts.get("r"), norm_weight, lengths)
    packed = pack(parts, packed_width(heads, dim, key_gate=key_gate, gated_norm=gated_norm))
    for row, valid in enumerate(lengths):
        packed[row, valid:] = torch.nan
    y = attend(packed, norm_weight, lengths, heads, dim, key_gate, gated_norm)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("key_gate", "gated_norm"), SWITCHES)
def test_gradients_agree_with_finite_differences(key_gate, gated_norm):
    heads, dim = 2, 3
    width = packed_width(heads, dim, key_gate=key_gate, gated_norm=gated_norm)
    packed = torch.randn(3, 4, width, dtype=torch.float64, requires_grad=True)
    norm_weight = torch.randn(heads, dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda p, w: attend(p, w, [4, 0, 2], heads, dim, key_gate, gated_norm), (packed, norm_weight)
    )


@given(st.integers(0, 5))
def test_it_does_not_depend_on_the_order_of_the_history(seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(1, 7, packed_width(2, 4), dtype=torch.float64, generator=generator)
    norm_weight = torch.ones(2, 4, dtype=torch.float64)
    order = torch.randperm(7, generator=generator)
    torch.testing.assert_close(
        attend(packed[:, order], norm_weight, [7], 2, 4), attend(packed, norm_weight, [7], 2, 4)[:, order]
    )


def test_each_row_of_a_batch_is_on_its_own():
    packed = torch.randn(3, 6, packed_width(2, 4), dtype=torch.float64)
    norm_weight = torch.ones(2, 4, dtype=torch.float64)
    whole = attend(packed, norm_weight, [6, 3, 0], 2, 4)
    rows = [attend(packed[i : i + 1], norm_weight, [n], 2, 4) for i, n in enumerate([6, 3, 0])]
    torch.testing.assert_close(whole, torch.cat(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift", [-1e4, -200.0, 200.0, 1e4])
def test_a_common_shift_of_the_gate_logits_cancels_in_float32(shift):
    parts = draw_parts(2, 5, 2, 4, True, True)
    norm_weight = torch.ones(2, 4)
    parts["s"] = torch.round(parts["s"] * 4) / 4
    base = attend(pack(parts, packed_width(2, 4)).float(), norm_weight, [5, 3], 2, 4)
    parts["s"] = parts["s"] + shift
    shifted = attend(pack(parts, packed_width(2, 4)).float(), norm_weight, [5, 3], 2, 4)
    torch.testing.assert_close(shifted, base, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("depth", [-90.0, -300.0, -3000.0])
def test_queries_and_keys_far_below_zero_stay_finite_and_right(part, depth):
    parts = draw_parts(1, 6, 2, 4, True, True)
    parts[part] = parts[part] + depth
    exact = attend_in_log_space(parts, 6)
    y = attend(pack(parts, packed_width(2, 4)).float(), torch.ones(2, 4), [6], 2, 4)
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)


def attend_in_log_space(parts, length):
    """The same sums with every product as a sum of logarithms: nothing can vanish or overflow."""
    rounded = {name: value.float().double() for name, value in parts.items()}
    log_phi = {n: torch.where(rounded[n] > 0, torch.log1p(rounded[n].clamp(min=0)), rounded[n]) for n in ("q", "k")}
    log_weight = torch.logsumexp(log_phi["q"][:, :, None] + log_phi["k"][:, None], -1) + rounded["s"][:, None]
    y = torch.einsum("bijh,bjhd->bihd", torch.softmax(log_weight, 2), rounded["v"])
    y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-6) * torch.nn.functional.silu(rounded["r"])
    return y.flatten(2)


def test_a_key_far_below_its_gate_does_not_turn_into_nan():
    parts = draw_parts(1, 4, 1, 4, True, True)
    parts["k"][0, 0] = -200.0
    parts["s"][0, 1:] = -150.0
    y = attend(pack(parts, packed_width(1, 4)).float(), torch.ones(1, 4), [4], 1, 4)
    torch.testing.assert_close(y.double(), attend_in_log_space(parts, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_keeps_the_dtype_and_sums_in_float32(dtype):
    packed = torch.randn(2, 300, packed_width(2, 16)).to(dtype)
    norm_weight = torch.randn(2, 16).to(dtype)
    y = attend(packed, norm_weight, [300, 111], 2, 16)
    exact = attend(packed.double(), norm_weight.double(), [300, 111], 2, 16)
    assert y.dtype == dtype
    rounding = torch.finfo(dtype).eps * exact.abs()
    assert ((y.double() - exact).abs() <= rounding + 2e-5).all()


def test_the_registration_passes_opcheck():
    packed = torch.randn(2, 5, packed_width(2, 4), requires_grad=True)
    norm_weight = torch.randn(2, 4, requires_grad=True)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    arguments = (packed, norm_weight, lengths, 2, 4, 1e-6, True, True)
    torch.library.opcheck(torch.ops.zoo.gated_bidirectional_linear_attention.default, arguments)


def test_the_saved_state_has_the_kernels_shape_and_is_useless_where_the_reference_ran():
    packed = torch.randn(2, 5, packed_width(2, 4))
    arguments = (packed, torch.randn(2, 4), torch.tensor([5, 2], dtype=torch.int32), 2, 4, 1e-6, True, True)
    _, *state = torch.ops.zoo.gated_bidirectional_linear_attention_training(*arguments)
    assert [list(part.shape) for part in state] == [[2, 2, 4, 4], [2, 2, 4], [2, 2, 2]]
    assert all(part.isnan().all() for part in state)


@pytest.mark.parametrize("gated_norm", [True, False])
def test_the_backward_passes_opcheck_with_a_norm_weight_in_another_order(gated_norm):
    packed = torch.randn(2, 5, packed_width(2, 4, gated_norm=gated_norm))
    lengths, state = torch.tensor([5, 2], dtype=torch.int32), (torch.empty(0),) * 3
    arguments = (torch.randn(2, 5, 8), packed, torch.randn(4, 2).T, lengths, *state, 2, 4, 1e-6, True, gated_norm)
    torch.library.opcheck(torch.ops.zoo.gated_bidirectional_linear_attention_backward.default, arguments)


def test_forward_and_backward_compile_without_graph_breaks():
    packed = torch.randn(2, 5, packed_width(2, 4), requires_grad=True)
    norm_weight = torch.randn(2, 4)
    compiled = torch.compile(
        lambda p: attend(p, norm_weight, [5, 2], 2, 4).square(), fullgraph=True, backend="aot_eager"
    )
    compiled(packed).sum().backward()
    assert packed.grad is not None
    compiled_grad, packed.grad = packed.grad, None
    attend(packed, norm_weight, [5, 2], 2, 4).square().sum().backward()
    assert torch.equal(packed.grad, compiled_grad)


def test_forward_mode_is_refused_not_zero():
    packed, norm_weight = torch.randn(2, 5, packed_width(2, 4)), torch.randn(2, 4)
    with pytest.raises(ConfigError, match="forward-mode"):
        torch.func.jvp(lambda weight: attend(packed, weight, [5, 2], 2, 4), (norm_weight,), (norm_weight,))


def test_activation_checkpointing_gives_the_same_gradient():
    packed = torch.randn(2, 5, packed_width(2, 4), requires_grad=True)
    norm_weight = torch.randn(2, 4)
    run = lambda p: attend(p, norm_weight, [5, 2], 2, 4).square().sum()  # noqa: E731
    (plain,) = torch.autograd.grad(run(packed), packed)
    (checked,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, packed, use_reentrant=False), packed)
    assert torch.equal(plain, checked)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"packed": torch.randn(2, 5, 33)}, ShapeError, "need 40"),
        ({"packed": torch.randn(2, 40)}, ShapeError, "three dimensions"),
        ({"packed": torch.ones(2, 5, 40, dtype=torch.int32)}, DTypeError, "int32"),
        ({"norm_weight": torch.randn(4, 2)}, ShapeError, "norm_weight"),
        ({"norm_weight": torch.ones(2, 4, dtype=torch.int64)}, DTypeError, "norm_weight"),
        ({"lengths": torch.tensor([5, 2])}, DTypeError, "torch.int32"),
        ({"lengths": torch.tensor([5, 2, 1], dtype=torch.int32)}, ShapeError, "3"),
        ({"norm_weight": torch.randn(2, 4, device="meta")}, ShapeError, "on meta"),
        ({"eps": -1.0}, ConfigError, "eps"),
        ({"eps": float("nan")}, ConfigError, "eps"),
        ({"num_heads": 0}, ConfigError, "num_heads"),
    ],
)
def test_a_misfit_is_named(change, error, words):
    arguments = {
        "packed": torch.randn(2, 5, 40),
        "norm_weight": torch.randn(2, 4),
        "lengths": torch.tensor([5, 2], dtype=torch.int32),
        "num_heads": 2,
        "head_dim": 4,
        **change,
    }
    with pytest.raises(error, match=words):
        gated_bidirectional_linear_attention(**arguments)


def test_rows_of_the_packed_projection_start_on_sixteen_bytes():
    for heads, dim in itertools.product([1, 2, 3, 6, 16], [16, 32, 64, 128]):
        used, width = 4 * heads * dim + heads, packed_width(heads, dim)
        assert width % 8 == 0
        assert 0 <= width - used < (128 if used >= 2048 else 8)
