"""The ops written as the papers' sums, one row and one position at a time, in float64."""

import itertools
import math

import torch
from torch import Tensor


def naive_causal_short_conv(x: Tensor, weight: Tensor, lengths: list[int], activation: str) -> Tensor:
    x, weight = x.double(), weight.double()
    width = weight.shape[1]
    y = torch.zeros_like(x)
    for row, length in enumerate(lengths):
        for t in range(length):
            for tap in range(width):
                source = t - (width - 1) + tap
                if source >= 0:
                    y[row, t] += weight[:, tap] * x[row, source]
            if activation == "silu":
                y[row, t] = y[row, t] * torch.sigmoid(y[row, t])
    return y


def naive_gbla(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, r: Tensor | None, norm_weight: Tensor, lengths: list[int]
) -> Tensor:
    """q, k, v, r [B, L, H, D], s [B, L, H]; the softmax gate is normalised as the paper writes it."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        for head in range(q.shape[2]):
            gate = torch.ones(length, dtype=torch.float64)
            if s is not None:
                gate = torch.softmax(s[row, :length, head].double(), 0)
            phi_k = [_phi(k[row, j, head]) for j in range(length)]
            for i in range(length):
                phi_q = _phi(q[row, i, head])
                weights = [float(gate[j] * (phi_q @ phi_k[j])) for j in range(length)]
                out = sum(w * v[row, j, head] for j, w in enumerate(weights)) / math.fsum(weights)
                if r is not None:
                    gate_r = r[row, i, head].double()
                    out = out / torch.sqrt((out * out).mean() + 1e-6) * norm_weight[head].double()
                    out = out * gate_r * torch.sigmoid(gate_r)
                y[row, i, head] = out
    return y.flatten(2)


def naive_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    lengths: list[int],
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """The paper's S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T; differentiable in everything."""
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[3]
    rows, states = [], []
    for row, head in itertools.product(range(batch), range(heads)):
        state = torch.zeros(key_dim, value_dim, dtype=torch.float64)
        if initial_state is not None:
            state = initial_state[row, head].double()
        outputs = []
        for t in range(length):
            if t >= lengths[row]:
                outputs.append(torch.zeros(value_dim, dtype=torch.float64))
                continue
            query, key = q[row, t, head], k[row, t, head]
            if normalize:
                query, key = (x / torch.sqrt((x * x).sum() + 1e-6) for x in (query, key))
            forget = log_decay[row, t, head].exp() * (torch.eye(key_dim) - beta[row, t, head] * torch.outer(key, key))
            state = forget @ state + beta[row, t, head] * torch.outer(key, v[row, t, head])
            outputs.append(scale * (state.T @ query))
        rows.append(torch.stack(outputs) if outputs else torch.zeros(0, value_dim, dtype=torch.float64))
        states.append(state)
    if not rows:
        return v.new_zeros(v.shape), v.new_zeros(batch, heads, key_dim, value_dim)
    o_BHTV = torch.stack(rows).view(batch, heads, length, value_dim)
    return o_BHTV.transpose(1, 2), torch.stack(states).view(batch, heads, key_dim, value_dim)


def _phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(x))
