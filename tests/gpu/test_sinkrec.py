"""The tiny SinkRec on a CUDA device: training against the CPU, and a step after a prefill, also from a CUDA graph."""

import pytest
import torch

from zoo.models import presets

pytestmark = pytest.mark.gpu
ITEMS = 200


def model_of(twin, **overrides):
    torch.manual_seed(0)
    overrides = {"num_items": ITEMS, "window": 32, "dropout": 0.0, **overrides}
    return presets.build(presets.resolve("sinkrec-tiny", twin=twin, overrides=overrides))


def histories(lengths, length):
    times = 10**9 + torch.randint(1, 10**5, (len(lengths), length)).cumsum(1)
    return torch.randint(ITEMS, (len(lengths), length)), times, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("twin", ["no-memory", "sasrec"])
@pytest.mark.parametrize("window", [32, 100], ids=["blocks", "whole"])
def test_loss_and_gradients_under_autocast_are_near_those_of_float32(twin, window):
    """Without the memory, whose codes may flip by rounding."""
    model = model_of(twin, window=window)
    batch = histories([80, 0, 1, 7, 33, 79], 80)
    expected_loss = model(*batch).total
    expected_loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.cuda().zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(*(x.cuda() for x in batch)).total
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-2)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.cpu() - expected[name]).norm() / expected[name].norm()
        assert error < 0.15, f"{name}: {error:.3f}"


def test_the_whole_model_trains_with_its_codebooks():
    model = model_of(None).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    batch = [x.cuda() for x in histories([60] * 16, 60)]
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            total = model(*batch).total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.7 * losses[0] and model.memory.quantizer.health()["dead_codes"] < 0.9


@pytest.mark.parametrize("twin", [None, "sasrec"])
@torch.no_grad()
def test_a_step_after_a_prefill_is_the_prefill_of_the_whole_also_in_a_graph(twin):
    model = model_of(twin, window=64).cuda().eval()
    items, times, lengths = (x.cuda() for x in histories([50, 50], 50))
    wanted, _ = model.prefill(items, times, lengths)
    _, state = model.prefill(items[:, :-1], times[:, :-1], lengths - 1)
    event = items[:, -1:].contiguous(), times[:, -1:].contiguous(), torch.ones_like(lengths)
    found, _ = model.step(*event, state)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = model.step(*event, state)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, found, rtol=1e-4, atol=1e-4)
