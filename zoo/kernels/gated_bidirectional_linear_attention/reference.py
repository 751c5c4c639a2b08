"""Gated bidirectional linear attention and its gradient in plain PyTorch, for any float dtype and device.

Sums and states are float32 (float64 for float64 input). Memory is linear in L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout
from zoo.kernels.ragged import accumulation_dtype, valid_positions


class _Forward(NamedTuple):
    """What the backward needs of the forward; all [B, H, ...] in the accumulation dtype."""

    phi_q_BHLD: Tensor
    weighted_phi_k_BHLD: Tensor
    v_BHLD: Tensor
    state_BHDD: Tensor
    normaliser_BHD: Tensor
    denominator_BHL: Tensor
    output_BHLD: Tensor


def gated_bidirectional_linear_attention_reference(
    packed_BLP: Tensor, norm_weight_HD: Tensor, lengths_B: Tensor, layout: PackedLayout, eps: float
) -> Tensor:
    """Return Y [B, L, H * D] in the dtype of ``packed``, zero at padded positions."""
    parts = _unpack(packed_BLP, lengths_B, layout)
    y_BHLD = _attend(parts, lengths_B).output_BHLD
    if layout.gated_norm:
        rstd = torch.rsqrt(y_BHLD.square().mean(-1, keepdim=True) + eps)
        y_BHLD = y_BHLD * rstd * norm_weight_HD.to(y_BHLD.dtype).unsqueeze(1) * F.silu(parts["r"])
    padding_BL1 = ~valid_positions(lengths_B, packed_BLP.shape[1]).unsqueeze(-1)
    return _pack_heads(y_BHLD).masked_fill(padding_BL1, 0).to(packed_BLP.dtype)


def gated_bidirectional_linear_attention_backward_reference(
    grad_BLE: Tensor,
    packed_BLP: Tensor,
    norm_weight_HD: Tensor,
    lengths_B: Tensor,
    layout: PackedLayout,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``packed`` [B, L, P] and ``norm_weight`` [H, D]; nothing but the inputs was saved."""
    parts = _unpack(packed_BLP, lengths_B, layout)
    saved = _attend(parts, lengths_B)
    padding_BL1 = ~valid_positions(lengths_B, packed_BLP.shape[1]).unsqueeze(-1)
    dtype = saved.output_BHLD.dtype
    grad_o = _split_heads(grad_BLE.to(dtype).masked_fill(padding_BL1, 0), layout)
    grads: dict[str, Tensor] = {}
    grad_norm_weight = torch.zeros_like(norm_weight_HD)
    if layout.gated_norm:
        weight = norm_weight_HD.to(dtype).unsqueeze(1)
        rstd = torch.rsqrt(saved.output_BHLD.square().mean(-1, keepdim=True) + eps)
        normed = saved.output_BHLD * rstd
        sigmoid = torch.sigmoid(parts["r"])
        silu = parts["r"] * sigmoid
        grads["r"] = grad_o * normed * weight * sigmoid * (1 + parts["r"] * (1 - sigmoid))
        grad_norm_weight = (grad_o * normed * silu).sum((0, 2)).to(norm_weight_HD.dtype)
        grad_normed = grad_o * weight * silu
        grad_o = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))

    grad_numerator = grad_o / saved.denominator_BHL.unsqueeze(-1)
    grad_denominator = -(grad_numerator * saved.output_BHLD).sum(-1, keepdim=True)
    grad_phi_q = grad_numerator @ saved.state_BHDD.mT + grad_denominator * saved.normaliser_BHD.unsqueeze(2)
    grad_state = saved.phi_q_BHLD.mT @ grad_numerator
    grad_normaliser = (saved.phi_q_BHLD * grad_denominator).sum(2)

    grad_weighted_k = saved.v_BHLD @ grad_state.mT + grad_normaliser.unsqueeze(2)
    grads["v"] = saved.weighted_phi_k_BHLD @ grad_state
    # d phi / dx is phi itself below zero and 1 above, so the stabilised phi serves as its own derivative there.
    grads["q"] = torch.where(parts["q"] > 0, grad_phi_q, grad_phi_q * saved.phi_q_BHLD)
    scale = torch.exp(_log_scale(parts, lengths_B)).unsqueeze(-1)
    grads["k"] = grad_weighted_k * torch.where(parts["k"] > 0, scale, saved.weighted_phi_k_BHLD)
    if layout.key_gate:
        grads["s"] = (grad_weighted_k * saved.weighted_phi_k_BHLD).sum(-1)

    columns = [_pack_heads(grads[name]) for name in ("q", "k", "v", "r") if name in grads]
    if layout.key_gate:
        columns.append(grads["s"].transpose(1, 2))
    grad_packed = F.pad(torch.cat(columns, -1), (0, layout.width - layout.used_width))
    return grad_packed.masked_fill(padding_BL1, 0).to(packed_BLP.dtype), grad_norm_weight


def _attend(parts: dict[str, Tensor], lengths_B: Tensor) -> _Forward:
    """Return O before the epilogue, and the sums it came from."""
    q, k, v = parts["q"], parts["k"], parts["v"]
    phi_q = torch.where(q > 0, q + 1, torch.exp(q - q.clamp(max=0).amax(-1, keepdim=True)))
    log_scale_BHL1 = _log_scale(parts, lengths_B).unsqueeze(-1)
    # exp(k + log_scale) stays in range where exp(k) alone would vanish; log_scale is at most 0 where any k is positive.
    weighted_phi_k = torch.where(k > 0, (k + 1) * torch.exp(log_scale_BHL1), torch.exp(k + log_scale_BHL1))
    state_BHDD = weighted_phi_k.mT @ v
    normaliser_BHD = weighted_phi_k.sum(2)
    denominator_BHL = (phi_q @ normaliser_BHD.unsqueeze(-1)).squeeze(-1)
    denominator_BHL = torch.where(denominator_BHL > 0, denominator_BHL, torch.ones_like(denominator_BHL))
    output = (phi_q @ state_BHDD) / denominator_BHL.unsqueeze(-1)
    return _Forward(phi_q, weighted_phi_k, v, state_BHDD, normaliser_BHD, denominator_BHL, output)


def _log_scale(parts: dict[str, Tensor], lengths_B: Tensor) -> Tensor:
    """Return [B, H, L]: the log weight of each position, shifted so that the largest term of a head is near 1."""
    k = parts["k"]
    logits_BHL = parts["s"] if "s" in parts else k.new_zeros(k.shape[:3])
    padding_B1L = ~valid_positions(lengths_B, k.shape[2]).unsqueeze(1)
    if k.shape[2] == 0:
        return logits_BHL
    largest_BHL = (logits_BHL + k.clamp(max=0).amax(-1)).masked_fill(padding_B1L, -torch.inf)
    shift_BH1 = largest_BHL.amax(-1, keepdim=True)
    shift_BH1 = torch.where(torch.isfinite(shift_BH1), shift_BH1, torch.zeros_like(shift_BH1))
    return (logits_BHL - shift_BH1).masked_fill(padding_B1L, -torch.inf)


def _unpack(packed_BLP: Tensor, lengths_B: Tensor, layout: PackedLayout) -> dict[str, Tensor]:
    """Return q, k, v (and r) as [B, H, L, D] and s as [B, H, L], padding replaced by zeros."""
    padding_BL1 = ~valid_positions(lengths_B, packed_BLP.shape[1]).unsqueeze(-1)
    packed = packed_BLP.to(accumulation_dtype(packed_BLP.dtype)).masked_fill(padding_BL1, 0)
    offsets = {"q": layout.query, "k": layout.key, "v": layout.value, "r": layout.residual_gate}
    parts = {
        name: _split_heads(packed[..., offset : offset + layout.inner], layout)
        for name, offset in offsets.items()
        if offset is not None
    }
    if layout.key_gate_logit is not None:
        parts["s"] = packed[..., layout.key_gate_logit : layout.used_width].transpose(1, 2)
    return parts


def _split_heads(x_BLE: Tensor, layout: PackedLayout) -> Tensor:
    return x_BLE.unflatten(-1, (layout.num_heads, layout.head_dim)).transpose(1, 2)


def _pack_heads(x_BHLD: Tensor) -> Tensor:
    return x_BHLD.transpose(1, 2).flatten(-2)
