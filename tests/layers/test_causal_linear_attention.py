import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout
from zoo.layers import causal_linear_attention
from zoo.layers.causal_linear_attention import (
    causal_gated_linear_attention,
    chunked_causal_attention,
    quadratic_causal_attention,
)

LAYOUTS = {
    "gbla": PackedLayout(2, 8, True, True),
    "no key gate": PackedLayout(2, 8, False, True),
    "no gated norm": PackedLayout(2, 8, True, False),
    "bla": PackedLayout(2, 8, False, False),
}


def inputs(length, *, dtype=torch.float64, spread=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    phi_q, phi_k = (torch.rand(2, 3, length, 4, generator=draw, dtype=dtype) + 0.1 for _ in range(2))
    v = torch.randn(2, 3, length, 4, generator=draw, dtype=dtype)
    return phi_q, phi_k, v, spread * torch.randn(2, 3, length, generator=draw, dtype=dtype)


@settings(deadline=None, max_examples=40)
@given(length=st.integers(0, 70), chunk=st.sampled_from([1, 3, 16]), gate=st.booleans(), spread=st.floats(0, 300))
def test_both_forms_are_the_same_function(length, chunk, gate, spread):
    phi_q, phi_k, v, logits = inputs(length, spread=spread)
    logits = logits if gate else None
    expected = quadratic_causal_attention(phi_q, phi_k, v, logits)
    torch.testing.assert_close(chunked_causal_attention(phi_q, phi_k, v, logits, chunk), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_both_forms_have_the_same_gradients(gate, spread):
    leaves = [x.requires_grad_() for x in inputs(41, spread=spread)]
    given_ = leaves if gate else leaves[:3]
    weight = torch.randn(2, 3, 41, 4, dtype=torch.float64)
    grads = []
    for form, extra in ((quadratic_causal_attention, ()), (chunked_causal_attention, (8,))):
        y = form(*given_, *([] if gate else [None]), *extra)
        grads.append(torch.autograd.grad((y * weight).sum(), given_))
    for quadratic, chunked in zip(*grads, strict=True):
        torch.testing.assert_close(chunked, quadratic, rtol=1e-8, atol=1e-10)


def test_a_key_that_outweighs_all_others_by_far_overflows_nothing():
    phi_q, phi_k, v, logits = inputs(200, dtype=torch.float32)
    logits[:, :, 100] = 1e4
    y = chunked_causal_attention(phi_q, phi_k, v, logits)
    torch.testing.assert_close(y, quadratic_causal_attention(phi_q, phi_k, v, logits), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y[:, :, 150], v[:, :, 100])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_op_at_any_length_is_the_quadratic_one(layout, monkeypatch):
    packed = torch.randn(3, 150, layout.width, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, 8, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([150, 0, 97], dtype=torch.int32)
    results = []
    for above in (0, 1000):
        monkeypatch.setattr(causal_linear_attention, "CHUNKED_ABOVE", above)
        y = causal_gated_linear_attention(packed, weight, lengths, layout, 1e-6)
        grads = torch.autograd.grad(y.square().sum(), (packed, weight), allow_unused=True)
        results.append((y, *(grad for grad in grads if grad is not None)))
    for chunked, quadratic in zip(*results, strict=True):
        torch.testing.assert_close(chunked, quadratic, rtol=1e-8, atol=1e-9)
    assert (results[0][0][1] == 0).all() and (results[0][0][2, 97:] == 0).all()


def test_autocast_leaves_the_sums_in_float32():
    layout = LAYOUTS["gbla"]
    packed, weight = torch.randn(2, 140, layout.width), torch.ones(2, 8)
    lengths = torch.tensor([140, 9], dtype=torch.int32)
    plain = causal_gated_linear_attention(packed, weight, lengths, layout, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(causal_gated_linear_attention(packed, weight, lengths, layout, 1e-6), plain)


def test_an_exported_graph_serves_lengths_on_both_sides_of_the_threshold(monkeypatch):
    monkeypatch.setattr(causal_linear_attention, "CHUNKED_ABOVE", 4)
    layout = LAYOUTS["gbla"]

    class Layer(torch.nn.Module):
        def forward(self, packed, weight, lengths):
            return causal_gated_linear_attention(packed, weight, lengths, layout, 1e-6)

    def arguments(length):
        return torch.randn(2, length, layout.width), torch.ones(2, 8), torch.tensor([length, 2], dtype=torch.int32)

    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, None, {0: torch.export.Dim.DYNAMIC})
    exported = torch.export.export(Layer(), arguments(6), dynamic_shapes=dynamic).module()
    for length in (3, 9):
        example = arguments(length)
        torch.testing.assert_close(exported(*example), Layer()(*example), rtol=1e-4, atol=1e-5)


def test_memory_grows_with_the_length_not_with_its_square():
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    def saved(length):
        sizes.clear()
        leaves = [x.requires_grad_() for x in inputs(length)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunked_causal_attention(*leaves)
        return sum(sizes)

    assert saved(1024) < 2.2 * saved(512)
