"""One training step of the tiny model on a CUDA device, in bf16 autocast, against the CPU in float32."""

import pytest
import torch

from zoo.models import presets

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("twin", [None, "all-softmax", "causal", "no-gated-norm"])
def test_loss_and_gradients_under_autocast_are_near_those_of_float32(twin):
    torch.manual_seed(0)
    model = presets.build(presets.resolve("gbla-tiny", twin=twin, overrides={"dropout": 0.0}))
    ids = torch.randint(0, 2**31, (8, 50))
    lengths = torch.tensor([50, 0, 1, 7, 33, 49, 50, 2], dtype=torch.int32)
    codes = torch.randint(0, 256, (8, 2, 4))
    model(ids, lengths, codes).mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    cpu_loss = model(ids, lengths, codes).mean().item()

    model.cuda().zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids.cuda(), lengths.cuda(), codes.cuda()).mean()
    loss.backward()
    assert loss.item() == pytest.approx(cpu_loss, rel=1e-2)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.cpu() - expected[name]).norm() / expected[name].norm()
        assert error < 0.1, f"{name}: {error:.3f}"
