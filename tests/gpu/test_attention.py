"""Softmax attention's plans on a CUDA device against the mask plan in float64 on the CPU, under the tolerance rule."""

import copy

import pytest
import torch

from validate.tolerance import deviation
from zoo.kernels.ragged import valid_positions
from zoo.layers import MultiHeadAttention, plan_attention
from zoo.models import presets

pytestmark = pytest.mark.gpu

HEADS, CHANNELS = 4, 96
RAGGED = [[0], [1], [65, 64, 63], [300, 0, 1, 257], [0, 0, 17]]


def layer_of(head_dim, dtype, seed=0):
    torch.manual_seed(seed)
    return MultiHeadAttention(CHANNELS, HEADS, head_dim, 10_000.0).to(dtype)


def run(layer, x, lengths, *, causal=False, all_full=False, expect):
    """Return output and gradients of input and weights, zero at padding, on the CPU; the plan must be ``expect``."""
    keep = valid_positions(torch.tensor(lengths, dtype=torch.int32, device=x.device), x.shape[1])
    weight = layer.qkv.weight
    plan = plan_attention(keep, causal=causal, dtype=weight.dtype, head_dim=layer.head_dim, all_full=all_full)
    assert plan.kind == expect, plan.reason
    x = x.detach().requires_grad_()
    y = layer(x, plan).masked_fill(~keep.unsqueeze(-1), 0)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(y)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    return [t.detach().cpu() for t in (y, *grads)]


def assert_inside_the_rule(head_dim, dtype, x, lengths, *, poison=0.0, **options):
    layer = layer_of(head_dim, dtype)
    x = x.to(dtype)
    keep = valid_positions(torch.tensor(lengths, dtype=torch.int32), x.shape[1]).unsqueeze(-1)
    clean, poisoned = x.masked_fill(~keep, 0), x.masked_fill(~keep, poison)
    causal = options.get("causal", False)
    found = run(copy.deepcopy(layer).cuda(), poisoned.cuda(), lengths, **options)
    ref64 = run(copy.deepcopy(layer).double(), clean.double(), lengths, causal=causal, expect="mask")
    low = run(copy.deepcopy(layer), clean, lengths, causal=causal, expect="mask")
    for name, out, wanted, reference in zip(("y", "dx", "dqkv", "dout"), found, ref64, low, strict=True):
        if name == "dx":
            assert (out.masked_fill(keep, 0) == 0).all()
        judged = deviation(out, wanted, reference, dtype)
        assert judged.ok, (name, judged)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_packed_plan_is_inside_the_rule_with_nan_in_the_padding(dtype, head_dim, lengths, causal):
    x = torch.randn(len(lengths), max(*lengths, 1) + 3, CHANNELS)
    assert_inside_the_rule(head_dim, dtype, x, lengths, poison=torch.nan, causal=causal, expect="packed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 100), (2, 257)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_plan_is_inside_the_rule(dtype, head_dim, batch, length, causal):
    x = torch.randn(batch, length, CHANNELS)
    assert_inside_the_rule(head_dim, dtype, x, [length] * batch, causal=causal, all_full=True, expect="dense")


def test_memory_that_held_nan_leaks_into_no_output_and_no_gradient():
    lengths, x = [130, 0, 7], torch.randn(3, 200, CHANNELS, device="cuda", dtype=torch.bfloat16)
    layer = layer_of(64, torch.bfloat16).cuda()
    clean = run(layer, x, lengths, expect="packed")
    for _ in range(3):
        poison = [torch.full((3 * 200 * size,), torch.nan, device="cuda") for size in (64, 128, 256, 768, 1024)]
        del poison
        for ours, theirs in zip(run(layer, x, lengths, expect="packed"), clean, strict=True):
            assert ours.isfinite().all()
            # FlashAttention adds up its key gradients in no fixed order.
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("twin", ["all-softmax", "causal-softmax"])
@pytest.mark.parametrize("all_full", [False, True])
def test_a_captured_encoder_follows_new_lengths_and_equals_the_eager_one(twin, all_full):
    torch.manual_seed(0)
    model = presets.build(presets.resolve("gbla-tiny", twin=twin)).cuda().bfloat16().eval()
    ids = torch.randint(0, 2**31, (3, 70), device="cuda")
    lengths = torch.tensor([70, 70, 70] if all_full else [70, 0, 9], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.encode(ids, lengths, all_full=all_full)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model.encode(ids, lengths, all_full=all_full)
        for new in ([70, 70, 70],) if all_full else ([70, 0, 9], [1, 70, 33], [0, 0, 0]):
            ids.copy_(torch.randint(0, 2**31, (3, 70)))
            lengths.copy_(torch.tensor(new, dtype=torch.int32))
            graph.replay()
            for ours, theirs in zip(captured, model.encode(ids, lengths, all_full=all_full), strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("twin", ["all-softmax", "causal-softmax", None])
@pytest.mark.parametrize("all_full", [False, True])
def test_the_loss_compiles_without_a_break_and_has_the_eager_gradients(twin, all_full):
    torch.manual_seed(0)
    model = presets.build(presets.resolve("gbla-tiny", twin=twin)).cuda()
    ids = torch.randint(0, 2**31, (3, 70), device="cuda")
    lengths = torch.tensor([70, 70, 70] if all_full else [70, 0, 9], dtype=torch.int32, device="cuda")
    codes = torch.randint(0, 256, (3, 2, 4), device="cuda")

    def gradients(forward):
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(ids, lengths, codes, all_full=all_full).mean()
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    loss, grads = gradients(torch.compile(model, fullgraph=True))
    expected_loss, expected = gradients(model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-2)
    for (name, _), ours, theirs in zip(model.named_parameters(), grads, expected, strict=True):
        assert (ours - theirs).norm() <= 0.1 * theirs.norm(), name


def test_under_autocast_the_plan_follows_the_dtype_of_the_projections():
    model = presets.build(presets.resolve("gbla-tiny", twin="all-softmax")).cuda()
    keep = torch.ones(2, 3, dtype=torch.bool, device="cuda")
    assert model.attention_plan(keep).kind == "mask"
    with torch.autocast("cuda", torch.bfloat16):
        assert model.attention_plan(keep).kind == "packed"
        assert model.attention_plan(keep, all_full=True).kind == "dense"
    assert model.half().attention_plan(keep).kind == "packed"
