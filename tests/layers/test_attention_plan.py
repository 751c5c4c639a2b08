"""Attention plans on the CPU; the variable-length kernel is played by a loop over rows that leaves NaN behind them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from zoo.kernels.launch import Choice
from zoo.kernels.ragged import valid_positions
from zoo.layers import MultiHeadAttention, attention_plan, matmul_dtype, plan_attention
from zoo.layers.attention_plan import AttentionPlan, packing_of
from zoo.models import presets

RAGGED = [[4, 2, 0, 5], [0], [0, 0], [1], [5, 5], [0, 3], [3, 0]]


class RowByRow(torch.autograd.Function):
    """Attention within rows, forward and backward, with NaN in every slot that belongs to no row."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, causal):
        ctx.save_for_backward(q, k, v, offsets)
        ctx.causal = causal
        out = torch.full_like(q, torch.nan)
        for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
            out[begin:end] = one_row(q[begin:end], k[begin:end], v[begin:end], causal)
        return out

    @staticmethod
    def backward(ctx, grad):
        *qkv, offsets = ctx.saved_tensors
        grads = [torch.full_like(t, torch.nan) for t in qkv]
        for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
            row = [t[begin:end].detach().requires_grad_() for t in qkv]
            with torch.enable_grad():
                y = one_row(*row, ctx.causal)
            for whole, part in zip(grads, torch.autograd.grad(y, row, grad[begin:end]), strict=True):
                whole[begin:end] = part
        return *grads, None, None


def one_row(q, k, v, causal):
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.fixture
def kernel_on_the_cpu(monkeypatch):
    def attend(q, k, v, offsets, length, *, causal):
        assert all(count <= length for count in offsets.diff().tolist())
        return RowByRow.apply(q, k, v, offsets, causal)

    monkeypatch.setattr(attention_plan, "varlen_attention", attend)
    monkeypatch.setattr(attention_plan, "choose_packed", lambda *_: Choice(True, "played on the CPU"))


def valid(lengths, longest=None):
    longest = max(lengths) if longest is None else longest
    return valid_positions(torch.tensor(lengths, dtype=torch.int32), longest)


@given(st.lists(st.integers(0, 6), max_size=5), st.integers(0, 8))
def test_a_packing_brings_the_valid_tokens_to_the_front_in_order(lengths, longest):
    lengths = [min(length, longest) for length in lengths]
    packing = packing_of(valid(lengths, longest).reshape(len(lengths), longest))
    tokens = [row * longest + place for row, length in enumerate(lengths) for place in range(length)]
    assert packing.token_T[: len(tokens)].tolist() == tokens
    assert packing.filled_T.tolist() == [True] * len(tokens) + [False] * (len(lengths) * longest - len(tokens))
    assert packing.rank_T[: len(tokens)].tolist() == [place for length in lengths for place in range(length)]
    assert packing.offsets_B1.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert packing.offsets_B1.dtype == torch.int32
    everything = torch.arange(len(lengths) * longest)
    assert torch.equal(packing.token_T[packing.slot_T], everything)
    assert torch.equal(packing.slot_T[packing.token_T], everything)


def test_packing_and_unpacking_drop_what_padding_and_last_slots_hold_and_their_gradients():
    packing = packing_of(valid([2, 0, 3], 3))
    x = torch.arange(9.0).reshape(3, 3, 1).requires_grad_()
    poisoned = x.detach().masked_fill(~valid([2, 0, 3], 3).unsqueeze(-1), torch.nan).requires_grad_()
    packed = packing.pack(poisoned)
    assert packed.flatten().tolist() == [0, 1, 6, 7, 8, 0, 0, 0, 0]
    (grad,) = torch.autograd.grad(packed, poisoned, torch.tensor([[1.0, 2, 3, 4, 5] + [torch.nan] * 4]).T)
    assert grad.flatten().tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5]

    slots = torch.tensor([[1.0, 2, 3, 4, 5] + [torch.nan] * 4]).T.requires_grad_()
    rows = packing.unpack(slots)
    assert rows.flatten().tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5]
    (grad,) = torch.autograd.grad(rows, slots, poisoned)
    assert grad.flatten().tolist() == [0, 1, 6, 7, 8, 0, 0, 0, 0]


def test_pack_and_unpack_have_the_gradients_of_finite_differences():
    packing = packing_of(valid([2, 0, 3], 4))
    assert torch.autograd.gradcheck(packing.pack, torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(packing.unpack, torch.randn(12, 2, dtype=torch.float64, requires_grad=True))


def layer_and_gradients(layer, x, plan, keep):
    x = x.detach().requires_grad_()
    y = layer(x, plan).masked_fill(~keep.unsqueeze(-1), 0)
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary_base", [None, 100.0])
def test_the_packed_plan_is_the_mask_plan_forward_and_backward(kernel_on_the_cpu, lengths, causal, rotary_base):
    keep = valid(lengths, 5)
    layer = MultiHeadAttention(6, 2, 4, rotary_base).double()
    x = torch.randn(len(lengths), 5, 6, dtype=torch.float64)
    options = {"causal": causal, "dtype": torch.float64, "head_dim": 4}
    packed = plan_attention(keep, **options)
    assert packed.kind == "packed"
    masked = AttentionPlan("mask", "", causal, mask_B1LL=attention_plan.attention_mask(keep, causal=causal))
    poisoned = x.masked_fill(~keep.unsqueeze(-1), torch.nan)
    expected = layer_and_gradients(layer, x.masked_fill(~keep.unsqueeze(-1), 0), masked, keep)
    expected[1] = expected[1].masked_fill(~keep.unsqueeze(-1), 0)
    for found, wanted in zip(layer_and_gradients(layer, poisoned, packed, keep), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_plan_is_the_mask_plan_where_rows_are_full(causal):
    keep = valid([5, 5])
    layer = MultiHeadAttention(6, 2, 4, 100.0).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    options = {"causal": causal, "dtype": torch.float64, "head_dim": 4}
    dense, masked = plan_attention(keep, all_full=True, **options), plan_attention(keep, **options)
    assert (dense.kind, masked.kind) == ("dense", "mask")
    expected = layer_and_gradients(layer, x, masked, keep)
    for found, wanted in zip(layer_and_gradients(layer, x, dense, keep), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("twin", ["all-softmax", "causal-softmax", None])
@pytest.mark.parametrize("lengths", [[6, 0, 3], [0, 0, 0], [6, 6, 6]])
def test_a_model_has_the_same_loss_and_gradients_with_every_plan(kernel_on_the_cpu, twin, lengths, monkeypatch):
    torch.manual_seed(0)
    model = presets.build(presets.resolve("gbla-tiny", twin=twin)).double()
    ids, codes = torch.randint(0, 2**31, (3, 6)), torch.randint(0, 256, (3, 2, 4))
    lengths = torch.tensor(lengths, dtype=torch.int32)

    def run(**options):
        loss = model(ids, lengths, codes, **options)
        return [loss, *torch.autograd.grad(loss.sum(), list(model.parameters()))]

    assert model.attention_plan(valid_positions(lengths, 6)).kind == "packed"
    packed = run()
    dense = run(all_full=True) if lengths.min() == 6 else packed
    monkeypatch.setattr(attention_plan, "choose_packed", lambda *_: Choice(False, "not now"))
    for found, other, wanted in zip(packed, dense, run(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(other, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (0, 0)])
def test_an_empty_batch_goes_through_every_plan(kernel_on_the_cpu, batch, length):
    layer = MultiHeadAttention(6, 2, 4, 100.0)
    keep = torch.ones(batch, length, dtype=torch.bool)
    for all_full in (False, True):
        plan = plan_attention(keep, causal=False, dtype=torch.float32, head_dim=4, all_full=all_full)
        assert layer(torch.randn(batch, length, 6), plan).shape == (batch, length, 6)


def test_the_choice_says_why():
    keep = valid([2, 1])
    on_cpu = plan_attention(keep, causal=False, dtype=torch.bfloat16, head_dim=64)
    assert (on_cpu.kind, on_cpu.mask_B1LL.shape) == ("mask", (2, 1, 2, 2))
    assert "on cpu" in on_cpu.reason
    assert not attention_plan.choose_dense(keep, all_full=False).ok
    assert not attention_plan.choose_dense(torch.ones(0, 3, dtype=torch.bool), all_full=True).ok


def test_the_choice_on_a_cuda_device_depends_on_dtype_width_and_capability(monkeypatch):
    class OnCuda:
        device = torch.device("cuda", 0)

        def numel(self):
            return 6

    found = 90
    monkeypatch.setattr(attention_plan, "capability", lambda device: found)
    assert attention_plan.choose_packed(OnCuda(), torch.bfloat16, 64).ok
    assert "float32" in attention_plan.choose_packed(OnCuda(), torch.float32, 64).reason
    assert "width 36" in attention_plan.choose_packed(OnCuda(), torch.float16, 36).reason
    assert "width 512" in attention_plan.choose_packed(OnCuda(), torch.float16, 512).reason
    found = 75
    assert "7.5" in attention_plan.choose_packed(OnCuda(), torch.float16, 64).reason


def test_the_dtype_of_a_projection_is_autocasts_where_it_is_on():
    weight = torch.zeros(2, 2)
    assert matmul_dtype(weight) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul_dtype(weight) == torch.bfloat16 == F.linear(weight, weight).dtype
        assert matmul_dtype(weight.double()) == torch.float64 == F.linear(weight.double(), weight.double()).dtype


@pytest.mark.parametrize("causal", [False, True])
def test_both_spellings_of_torchs_function_are_called_as_they_want(monkeypatch, causal):
    from torch.nn.attention import varlen

    seen = {}

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        seen.update(is_causal=is_causal)

    def newer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        seen.update(window_size=window_size)

    for function, expected in (
        (older, {"is_causal": causal}),
        (newer, {"window_size": (-1, 0) if causal else (-1, -1)}),
    ):
        seen.clear()
        monkeypatch.setattr(varlen, "varlen_attn", function)
        attention_plan._varlen_function.cache_clear()
        attention_plan.varlen_attention(None, None, None, None, 3, causal=causal)
        assert seen == expected
    attention_plan._varlen_function.cache_clear()


def test_an_exported_graph_takes_the_mask_plan_even_of_full_rows():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(6, 2, 4, 100.0)

        def forward(self, x, lengths):
            keep = valid_positions(lengths, x.shape[1])
            plan = plan_attention(keep, causal=False, dtype=x.dtype, head_dim=4, all_full=True)
            return self.attention(x, plan)

    x, lengths = torch.randn(2, 5, 6), torch.tensor([5, 5], dtype=torch.int32)
    program = torch.export.export(Layer(), (x, lengths))
    calls = [node for node in program.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(calls) == 1 and (len(calls[0].args) > 3 or "attn_mask" in calls[0].kwargs)
