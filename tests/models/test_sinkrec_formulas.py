"""SinkRec's layers against loops over positions, heads and taps, written from the formulas and not from the code."""

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, softplus

from zoo.models.sinkrec import SinkRec
from zoo.models.sinkrec_config import PRESETS
from zoo.models.sinkrec_layers import Events

LENGTH = 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = PRESETS["sinkrec-tiny"].with_overrides(num_items=20, window=8, codebook_size=16)
    model = SinkRec(config).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    for level in model.memory.quantizer.training_side.layers:
        level._codebook.embed.normal_()
    return model


def unit(x):
    return x / torch.sqrt(x @ x + 1e-6)


def normed(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


@torch.no_grad()
def test_the_time_features_are_sines_and_cosines_of_the_logarithm_of_seconds(model):
    times = torch.tensor([[50, 50, 57, 40, 3600 * 24 * 400]])
    start = model._start(1, layers=False)
    found = model._time_features(times, torch.ones(1, 5, dtype=torch.bool), start)
    for place, passed in enumerate([0, 0, 7, 0, 3600 * 24 * 400 - 40]):
        y = math.log(1 + passed)
        angles = [y * 2.0**power for power in range(-6, 2)]
        wanted = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        torch.testing.assert_close(found[0, place], wanted)


@torch.no_grad()
def test_the_memory_windows_are_convolutions_with_dilations_1_and_4(model):
    memory = model.memory
    x = torch.randn(1, LENGTH, 64, dtype=torch.float64)
    found = memory.encoded(x, torch.zeros(1, 12, 64, dtype=torch.float64))
    for t in range(LENGTH):
        windows = []
        for dilation, taps in zip((1, 4), memory.taps, strict=True):
            sums = torch.zeros(64, dtype=torch.float64)
            for back in range(4):
                if t - back * dilation >= 0:
                    sums += taps[3 - back] * normed(x[0, t - back * dilation], memory.norm.weight)
            windows.append(sums)
        torch.testing.assert_close(found[0, t], memory.project.weight @ torch.cat(windows))


@torch.no_grad()
def test_the_memory_is_injected_through_a_gate(model):
    memory = model.memory
    x, m = torch.randn(1, 5, 64, dtype=torch.float64), torch.randn(1, 5, 32, dtype=torch.float64)
    found = memory.reinject(x, m)
    for t in range(5):
        gate = torch.sigmoid(memory.gate.weight @ torch.cat([x[0, t], m[0, t]]) + memory.gate.bias)
        torch.testing.assert_close(found[0, t], x[0, t] + gate * (memory.inject.weight @ m[0, t]))


@torch.no_grad()
def test_the_memory_is_held_to_the_sum_of_its_window_of_four_events(model):
    memory = model.memory
    x = torch.randn(1, LENGTH, 64, dtype=torch.float64)
    before, valid = torch.zeros(1, 12, 64, dtype=torch.float64), torch.arange(LENGTH).unsqueeze(0) < LENGTH - 7
    found = memory.forward(x, before, valid)
    loss = memory.reconstruction_loss(found, x, before, valid)
    each = []
    for t in range(LENGTH - 7):
        window = sum(normed(x[0, s], memory.norm.weight) for s in range(max(0, t - 3), t + 1))
        each.append(1 - cosine_similarity(memory.reconstruct.weight @ found.vectors[0, t], window, dim=0))
    torch.testing.assert_close(loss, torch.stack(each).mean())


@torch.no_grad()
def test_tdgd_is_its_formulas(model):
    """a_t, b'_t, the purified query, the recurrence and the gated output, head by head and event by event."""
    tdgd, config = model.group[0].mixer, model.config
    heads, keys, values = config.num_heads, config.key_dim, config.value_dim
    x = torch.randn(1, LENGTH, 64, dtype=torch.float64)
    memory, time = torch.randn(1, LENGTH, 32, dtype=torch.float64), torch.randn(1, LENGTH, 16, dtype=torch.float64)
    lengths = torch.tensor([LENGTH], dtype=torch.int32)
    found, _ = tdgd(x, Events(lengths, torch.arange(LENGTH).unsqueeze(0), time, memory), None)

    inputs = x[0] @ tdgd.qkv.weight.mT
    state = torch.zeros(heads, values, keys, dtype=torch.float64)
    for t in range(LENGTH):
        mixed = sum(tdgd.conv_weight[:, 3 - back] * inputs[t - back] for back in range(4) if t >= back)
        mixed = mixed * torch.sigmoid(mixed)
        q, k = mixed[: heads * keys].view(heads, keys), mixed[heads * keys : 2 * heads * keys].view(heads, keys)
        v = mixed[2 * heads * keys :].view(heads, values)
        shift_q, shift_k = (tdgd.time_to_query_key.weight @ time[0, t]).view(2, heads, keys)
        decay, write = (tdgd.decay_and_write.weight @ x[0, t] + tdgd.decay_and_write.bias).view(2, heads)
        decay = decay + tdgd.time_to_decay.weight @ time[0, t]
        memory_key = (tdgd.memory_key.weight @ memory[0, t]).view(heads, keys)
        both = torch.cat([x[0, t], memory[0, t]])
        sees = torch.sigmoid(tdgd.coverage.weight @ both + tdgd.coverage.bias)
        aligned = torch.sigmoid(tdgd.alignment.weight @ x[0, t] + tdgd.alignment.bias)
        read = []
        for h in range(heads):
            query, key, remembered = unit(q[h] + shift_q[h]), unit(k[h] + shift_k[h]), unit(memory_key[h])
            a = torch.exp(-torch.exp(tdgd.decay_rate[h]) * softplus(decay[h]))
            covered = sees[h] * max(0.0, float(key @ remembered))
            b = torch.sigmoid(write[h]) * (1 - covered)
            query = query - aligned[h] * (remembered @ query) * remembered
            eye = torch.eye(keys, dtype=torch.float64)
            state[h] = a * state[h] @ (eye - b * torch.outer(key, key)) + b * torch.outer(v[h], key)
            read.append(normed(keys**-0.5 * state[h] @ query, tdgd.norm_weight))
        gate = tdgd.gate.weight @ x[0, t]
        o = torch.cat(read) * gate * torch.sigmoid(gate)
        torch.testing.assert_close(found[0, t], tdgd.out.weight @ o, rtol=1e-8, atol=1e-9)
