"""The same in chunks, as the kernels compute it, in plain PyTorch: what the op runs where the kernels do not.

The names are those of the package docstring; shape suffixes those of ``reference``, N counts chunks. All products are
in the dtype of sums, so for float64 inputs this is a second exact reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.gated_delta_rule.reference import Inputs, normalized, normalized_backward, prepare
from zoo.kernels.ragged import valid_positions

CHUNK = 64


class _Chunks(NamedTuple):
    """Everything of a chunk that does not depend on the state, [B, H, N, C, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    decay: Tensor
    """D [C, C]"""
    inverse: Tensor
    """T [C, C]"""
    attention: Tensor
    """D_ij (q_i.k_j) [C, C]"""

    def at(self, n: int) -> _Chunks:
        """Return chunk n, [B, H, C, ...]."""
        return _Chunks(*(x[:, :, n] for x in self))


def gated_delta_rule_chunked(inputs: Inputs, lengths_B: Tensor, scale: float, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in the dtype of q and the final state [B, H, K, V] in that of sums."""
    prepared = prepare(inputs, lengths_B)
    chunks = _chunks(prepared, normalize)
    state = prepared.initial_state
    assert state is not None
    outputs = []
    for n in range(chunks.q.shape[2]):
        c = chunks.at(n)
        writes = _writes(c, state)
        outputs.append(scale * (_exp(c.g) * (c.q @ state) + c.attention @ writes))
        state = _after(c, state, writes)
    o = _sequence(outputs, inputs.v).to(inputs.q.dtype)
    return o, state.clone(memory_format=torch.contiguous_format)


def gated_delta_rule_chunked_backward(
    grad_o: Tensor, grad_state: Tensor | None, inputs: Inputs, lengths_B: Tensor, scale: float, normalize: bool
) -> Inputs:
    """Return the gradients of all inputs; arguments and result as ``gated_delta_rule_backward_reference``."""
    prepared = prepare(inputs, lengths_B)
    chunks = _chunks(prepared, normalize)
    padding_BT11 = ~valid_positions(lengths_B, inputs.q.shape[1])[..., None, None]
    do = scale * _split(grad_o.to(chunks.q.dtype).masked_fill(padding_BT11, 0))
    state = prepared.initial_state
    assert state is not None
    states, all_writes = [], []
    for n in range(chunks.q.shape[2]):
        c = chunks.at(n)
        states.append(state)
        all_writes.append(_writes(c, state))
        state = _after(c, state, all_writes[-1])
    ds = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
    if grad_state is not None:
        ds.copy_(grad_state)
    gradients: list[tuple[Tensor, ...]] = []
    for n in reversed(range(chunks.q.shape[2])):
        *gradient, ds = _chunk_backward(chunks.at(n), do[:, :, n], states[n], all_writes[n], ds)
        gradients.append(tuple(gradient))
    gradients.reverse()
    like = (prepared.q, prepared.k, prepared.v, prepared.log_decay[..., None], prepared.beta[..., None])
    columns = list(zip(*gradients, strict=True)) if gradients else [()] * 5
    dq, dk, dv, dlog_decay, dbeta = (_sequence(list(x), given) for x, given in zip(columns, like, strict=True))
    if normalize:
        dq = normalized_backward(dq, *normalized(prepared.q))
        dk = normalized_backward(dk, *normalized(prepared.k))
    dq, dk, dv, dlog_decay, dbeta = (
        x.masked_fill(padding_BT11, 0).view(given.shape).to(given.dtype)
        for x, given in zip((dq, dk, dv, dlog_decay, dbeta), inputs[:5], strict=True)
    )
    return Inputs(dq, dk, dv, dlog_decay, dbeta, ds)


def _chunk_backward(
    c: _Chunks, do: Tensor, state: Tensor, writes: Tensor, ds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log a, b and of the state before the chunk, for that of the state after it.

    With X the right-hand side that T solves for, dU = P^T do + D_Cj dS^T k_j, dX = T^T dU and dA = -dX U^T.
    """
    reach = _exp(c.g)
    rest = c.decay[..., -1, :, None]
    last = torch.exp(c.g[..., -1])[..., None, None]
    beta = c.beta[..., None]
    dwrites = c.attention.mT @ do + rest * (c.k @ ds)
    dx = c.inverse.mT @ dwrites
    missing = c.v - reach * (c.k @ state)
    da = -(dx @ writes.mT).tril(-1)
    a = (c.decay * (c.k @ c.k.mT)).tril(-1)
    dkk = da * beta * c.decay
    dp = do @ writes.mT
    dqk = dp * c.decay
    dq_state, dk_state, dk_after = reach * (do @ state.mT), beta * reach * (dx @ state.mT), rest * (writes @ ds.mT)
    dq = dqk @ c.k + dq_state
    dk = dqk.mT @ c.q + dkk @ c.k + dkk.mT @ c.k - dk_state + dk_after
    # log a_l is in D_ij where i >= l > j, in exp(g_i) where i >= l, in D_Cj where j < l. Each is summed as it is: in a
    # difference of sums over all of the chunk, the gradient of a strong decay would be lost in rounding.
    pairs = _from_here_on(da * beta * a + dp * c.attention, -2).tril(-1).sum(-1)
    reached = _from_here_on((c.q * dq_state - c.k * dk_state).sum(-1), -1)
    after = (c.k * dk_after).sum(-1)[..., :-1].cumsum(-1)
    dlog_decay = pairs + reached + F.pad(after, (1, 0)) + (last * state * ds).sum((-1, -2))[..., None]
    dbeta = (dx * missing).sum(-1) + (da * a).sum(-1)
    before = last * ds + (reach * c.q).mT @ do - (beta * reach * c.k).mT @ dx
    return dq, dk, beta * dx, dlog_decay[..., None], dbeta[..., None], before


def _chunks(inputs: Inputs, normalize: bool) -> _Chunks:
    q, k = (normalized(inputs.q)[0], normalized(inputs.k)[0]) if normalize else (inputs.q, inputs.k)
    q, k, v = _split(q), _split(k), _split(inputs.v)
    log_decay, beta = _split(inputs.log_decay[..., None])[..., 0], _split(inputs.beta[..., None])[..., 0]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # g_i - g_j as the sum of what lies between: the difference is NaN after a log a of -inf, noise after one of -1e6.
    between = log_decay[..., :, None].masked_fill(~later.tril(-1), 0).cumsum(-2)
    decay = between.masked_fill(~later, -torch.inf).exp()
    system = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system + identity, identity, upper=False, unitriangular=True)
    return _Chunks(q, k, v, beta, log_decay.cumsum(-1), decay, inverse, decay * (q @ k.mT))


def _writes(c: _Chunks, state: Tensor) -> Tensor:
    """Return U [B, H, C, V]."""
    return c.inverse @ (c.beta[..., None] * (c.v - _exp(c.g) * (c.k @ state)))


def _after(c: _Chunks, state: Tensor, writes: Tensor) -> Tensor:
    rest = c.decay[..., -1, :, None]
    return torch.exp(c.g[..., -1])[..., None, None] * state + (rest * c.k).mT @ writes


def _from_here_on(x: Tensor, dim: int) -> Tensor:
    """Return the sums from each position to the last."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _exp(g: Tensor) -> Tensor:
    return torch.exp(g)[..., None]


def _split(x_BTHX: Tensor) -> Tensor:
    """Return [B, H, N, C, X], zeros filling up the last chunk."""
    batch, length, heads, width = x_BTHX.shape
    count = -(-length // CHUNK)
    padded = F.pad(x_BTHX, (0, 0, 0, 0, 0, count * CHUNK - length))
    return padded.reshape(batch, count, CHUNK, heads, width).permute(0, 3, 1, 2, 4).contiguous()


def _sequence(chunks: list[Tensor], like_BTHX: Tensor) -> Tensor:
    """Return [B, T, H, X] from a list of [B, H, C, X]."""
    if not chunks:
        return like_BTHX.new_zeros(like_BTHX.shape)
    joined = torch.cat(chunks, 2).transpose(1, 2)
    return joined[:, : like_BTHX.shape[1]].contiguous()
