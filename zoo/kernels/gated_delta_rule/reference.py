"""The recurrence and its gradient in plain PyTorch, one position at a time, for any float dtype and device.

Shape suffixes: B batch, T length, H heads, K key width, V value width, C positions of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.kernels.ragged import accumulation_dtype, valid_positions

NORM_EPS = 1e-6
_SEGMENT = 64


class Inputs(NamedTuple):
    """The differentiable inputs of the op, in its order; the same type holds their gradients."""

    q: Tensor
    """[B, T, H, K]"""
    k: Tensor
    """[B, T, H, K]"""
    v: Tensor
    """[B, T, H, V]"""
    log_decay: Tensor
    """[B, T, H]"""
    beta: Tensor
    """[B, T, H]"""
    initial_state: Tensor | None
    """[B, H, K, V], zeros if None"""


def prepare(inputs: Inputs, lengths_B: Tensor) -> Inputs:
    """Return the inputs in the dtype of sums, with zeros at padding: there nothing is forgotten, written or read."""
    dtype = accumulation_dtype(inputs.q.dtype)
    padding_BT = ~valid_positions(lengths_B, inputs.q.shape[1])
    q, k, v, log_decay, beta = (
        x.to(dtype).masked_fill(padding_BT.view(*padding_BT.shape, *(1,) * (x.dim() - 2)), 0) for x in inputs[:5]
    )
    state = inputs.initial_state
    if state is None:
        batch, _, heads, key_dim = inputs.q.shape
        state = q.new_zeros(batch, heads, key_dim, inputs.v.shape[3])
    return Inputs(q, k, v, log_decay, beta, state.to(dtype))


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(|x|^2 + eps) over the last axis, and the factor."""
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x * factor, factor


def normalized_backward(grad: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient of x for that of ``y``, both as ``normalized`` returned."""
    return factor * (grad - y * (grad * y).sum(-1, keepdim=True))


def gated_delta_rule_reference(
    inputs: Inputs, lengths_B: Tensor, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in the dtype of q and the final state [B, H, K, V] in that of sums."""
    q, k, v, log_decay, beta, state = prepare(inputs, lengths_B)
    if normalize:
        q, k = normalized(q)[0], normalized(k)[0]
    assert state is not None
    outputs = []
    for t in range(q.shape[1]):
        state, _, _ = _step(state, k[:, t], v[:, t], log_decay[:, t], beta[:, t])
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return o.to(inputs.q.dtype), state.clone(memory_format=torch.contiguous_format)


def gated_delta_rule_backward_reference(
    grad_o: Tensor, grad_state: Tensor | None, inputs: Inputs, lengths_B: Tensor, scale: float, normalize: bool
) -> Inputs:
    """Return the gradients of all inputs, each in its input's dtype, that of the initial state even where it was None.

    Args:
        grad_o: [B, T, H, V], gradient of o; padded positions may hold anything.
        grad_state: [B, H, K, V], gradient of the final state, or None for zeros.
        inputs: as in the forward.
        lengths_B: as in the forward.
        scale: as in the forward.
        normalize: as in the forward.
    """
    prepared = prepare(inputs, lengths_B)
    q, k, v, log_decay, beta, state = prepared
    assert state is not None
    if normalize:
        (q, q_factor), (k, k_factor) = normalized(q), normalized(k)
    padding_BT11 = ~valid_positions(lengths_B, q.shape[1])[..., None, None]
    grad_o = grad_o.to(q.dtype).masked_fill(padding_BT11, 0)
    grad = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
    if grad_state is not None:
        grad.copy_(grad_state)
    starts, length = [state], q.shape[1]
    for t in range(length):
        state = _step(state, k[:, t], v[:, t], log_decay[:, t], beta[:, t])[0]
        if (t + 1) % _SEGMENT == 0:
            starts.append(state)
    dq, dk, dv, dlog_decay, dbeta = (x.new_zeros(x.shape) for x in (q, k, v, log_decay, beta))
    for segment in reversed(range(len(starts))):
        times = range(segment * _SEGMENT, min(length, (segment + 1) * _SEGMENT))
        steps, state = [], starts[segment]
        for t in times:
            state, forgotten, error = _step(state, k[:, t], v[:, t], log_decay[:, t], beta[:, t])
            steps.append((state, forgotten, error))
        for t in reversed(times):
            state, forgotten, error = steps[t - segment * _SEGMENT]
            write = beta[:, t, :, None]
            dq[:, t] = scale * torch.einsum("bhkv,bhv->bhk", state, grad_o[:, t])
            grad = grad + scale * q[:, t, :, :, None] * grad_o[:, t, :, None, :]
            dwrite = torch.einsum("bhkv,bhk->bhv", grad, k[:, t])
            dbeta[:, t] = (dwrite * error).sum(-1)
            dv[:, t] = derror = write * dwrite
            dk[:, t] = torch.einsum("bhkv,bhv->bhk", grad, write * error) - torch.einsum(
                "bhkv,bhv->bhk", forgotten, derror
            )
            grad = grad - k[:, t, :, :, None] * derror[:, :, None, :]
            dlog_decay[:, t] = (grad * forgotten).sum((-1, -2))
            grad = grad * log_decay[:, t, :, None, None].exp()
    if normalize:
        dq, dk = normalized_backward(dq, q, q_factor), normalized_backward(dk, k, k_factor)
    dq, dk, dv, dlog_decay, dbeta = (
        x.masked_fill(padding_BT11[..., 0] if x.dim() == 3 else padding_BT11, 0).to(given.dtype)
        for x, given in zip((dq, dk, dv, dlog_decay, dbeta), inputs[:5], strict=True)
    )
    return Inputs(dq, dk, dv, dlog_decay, dbeta, grad)


def _step(
    state_BHKV: Tensor, k_BHK: Tensor, v_BHV: Tensor, log_decay_BH: Tensor, beta_BH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state after one position, the state it forgot down to, and what that did not say yet."""
    forgotten_BHKV = state_BHKV * log_decay_BH[..., None, None].exp()
    error_BHV = v_BHV - torch.einsum("bhkv,bhk->bhv", forgotten_BHKV, k_BHK)
    written_BHKV = k_BHK[..., None] * (beta_BH[..., None] * error_BHV)[..., None, :]
    return forgotten_BHKV + written_BHKV, forgotten_BHKV, error_BHV
