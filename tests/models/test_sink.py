import pytest
import torch
import torch.nn.functional as F

from zoo.errors import ConfigError
from zoo.kernels import gated_delta_rule
from zoo.models.sink import influence, sink
from zoo.models.sinkrec import SinkRec
from zoo.models.sinkrec_config import PRESETS
from zoo.models.sinkrec_layers import Writes


def drawn(batch=2, length=13, heads=3, key_dim=8, value_dim=6):
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(batch, length, heads, key_dim, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(batch, length, heads, value_dim, dtype=torch.float64)
    log_decay, beta = -torch.rand(batch, length, heads).double(), torch.rand(batch, length, heads).double()
    return Writes(q, k, log_decay, beta), v


def test_the_influence_is_what_autograd_says():
    (q, k, log_decay, beta), v = drawn()
    lengths = torch.tensor([13, 9], dtype=torch.int32)
    found = influence(Writes(q, k, log_decay, beta), v, lengths)
    v.requires_grad_()
    o, _ = gated_delta_rule(q, k, v, log_decay, beta, None, lengths)
    for row, t, head in ((0, 12, 1), (1, 8, 0), (0, 5, 2), (1, 11, 1)):
        # o_t is linear in v with the same factor for every column, so one column's gradient is the factor.
        slope = torch.autograd.grad(o[row, t, head, 0], v, retain_graph=True)[0][row, :, head, 0]
        torch.testing.assert_close(found[row, head, t], slope.abs() * v[row, :, head].detach().norm(dim=-1))


def test_the_influence_is_what_a_recurrence_of_each_write_alone_says():
    writes, v = drawn(batch=1, length=9)
    found = influence(writes, v, torch.tensor([9], dtype=torch.int32))
    q, k, log_decay, beta = (x[0, :, 0] for x in writes)
    for j in range(9):
        state = torch.zeros(8, 6, dtype=torch.float64)
        for t in range(9):
            state = log_decay[t].exp() * (state - beta[t] * torch.outer(k[t], k[t] @ state))
            if t == j:
                state = state + beta[t] * torch.outer(k[t], v[0, t, 0])
            torch.testing.assert_close(found[0, 0, t, j], (8**-0.5 * q[t] @ state).norm())


def test_a_repeated_code_that_is_written_again_and_again_is_the_sink():
    torch.manual_seed(0)
    model = SinkRec(PRESETS["sinkrec-tiny"].with_overrides(num_items=50)).double().eval()
    items, times = torch.randint(50, (40,)), torch.arange(40) * 1000
    codes = torch.tensor([7] * 25 + list(range(10, 25)))
    found = sink(model, items, times, codes)
    assert found.code == 7 and found.influence.shape == (40,) and (found.influence > 0).all()
    assert found.ratio == pytest.approx(float(found.influence[:25].sum() / found.influence.sum()))
    own = model.codes(items[None], torch.tensor([40], dtype=torch.int32))[0, :, 0]
    assert 0 < sink(model, items, times, own).ratio <= 1


def test_a_history_that_is_too_long_is_refused():
    writes = Writes(*(torch.zeros(1, 9000, 1, 8) for _ in range(2)), *(torch.zeros(1, 9000, 1) for _ in range(2)))
    with pytest.raises(ConfigError, match="8192"):
        influence(writes, torch.zeros(1, 9000, 1, 8), torch.tensor([9000], dtype=torch.int32))
