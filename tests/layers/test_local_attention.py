"""Attention to the last positions against a mask over all of them."""

import pytest
import torch

from zoo.layers import local_attention


def masked(q, k, v, window):
    """The definition: softmax over the keys of positions j with i - window < j <= i."""
    length, shown = k.shape[1:3]
    i, j = torch.arange(length).unsqueeze(1), torch.arange(length).repeat_interleave(shown)
    scores = torch.einsum("blhd,bshd->bhls", q, k.flatten(1, 2)) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~((j <= i) & (j > i - window)), -torch.inf)
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v.flatten(1, 2))


@pytest.mark.parametrize("shown", [1, 2])
@pytest.mark.parametrize(("length", "window"), [(1, 1), (5, 1), (7, 8), (8, 8), (9, 8), (40, 8), (8, 1000)])
def test_each_position_sees_the_last_ones(length, window, shown):
    q = torch.randn(2, length, 3, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, length, shown, 3, 4, dtype=torch.float64).unbind(0)
    torch.testing.assert_close(local_attention(q, k, v, window), masked(q, k, v, window))


@pytest.mark.parametrize("shown", [1, 2])
def test_a_window_longer_than_the_history_costs_nothing(shown, monkeypatch):
    """The keys that the kernel is given are those of the history, and one key a position needs no mask."""
    taken = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def looking(q, k, v, **options):
        taken.append((k.shape[-2], options))
        return attention(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looking)
    q, (k, v) = torch.randn(1, 6, 2, 4), torch.randn(2, 1, 6, shown, 2, 4)
    local_attention(q, k, v, 2**20)
    ((keys, options),) = taken
    assert keys == 6 * shown and (shown == 2 or options == {"is_causal": True})
