"""The GBLA token mixer: short convolution, packed projection, linear attention with gated norm, output projection."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.kernels import causal_short_conv, gated_bidirectional_linear_attention
from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout
from zoo.kernels.ragged import accumulation_dtype, valid_positions


class GatedBidirectionalLinearAttention(nn.Module):
    """One GBLA mixer layer (arXiv 2606.07317, steps 1 to 5 of its layer), each addition switchable.

    Args:
        d_model: width of input and output.
        num_heads: H.
        head_dim: D.
        conv_width: taps of the short convolution; 0 for none.
        key_gate: weigh keys by a softmax over the sequence.
        gated_norm: finish with RMSNorm(O) * SiLU(R).
        causal: let position i see only j <= i (ablation; quadratic, standard ops only).
        eps: of the RMSNorm.
    """

    norm_weight: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        conv_width: int = 4,
        key_gate: bool = True,
        gated_norm: bool = True,
        causal: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.layout = PackedLayout(num_heads, head_dim, key_gate, gated_norm)
        self.causal = causal
        self.eps = eps
        self.conv_weight = nn.Parameter(torch.empty(d_model, conv_width)) if conv_width else None
        self.projection = nn.Linear(d_model, self.layout.width, bias=False)
        if gated_norm:
            self.norm_weight = nn.Parameter(torch.ones(num_heads, head_dim))
        else:
            self.register_buffer("norm_weight", torch.ones(num_heads, head_dim), persistent=False)
        self.out = nn.Linear(self.layout.inner, d_model, bias=False)
        self.reset_conv()

    def reset_conv(self) -> None:
        """Start the convolution near the identity: 1 at the present position, small noise elsewhere."""
        if self.conv_weight is not None:
            with torch.no_grad():
                nn.init.normal_(self.conv_weight, std=0.1 / math.sqrt(self.conv_weight.shape[1]))
                self.conv_weight[:, -1] += 1

    def forward(self, x_BLC: Tensor, lengths_B: Tensor) -> Tensor:
        """Mix ``x`` [B, L, d_model] over the valid positions; padded outputs are zero."""
        if self.conv_weight is not None:
            x_BLC = causal_short_conv(x_BLC, self.conv_weight, lengths_B)
        packed_BLP = self.projection(x_BLC)
        if self.causal:
            y_BLE = causal_gated_linear_attention(packed_BLP, self.norm_weight, lengths_B, self.layout, self.eps)
        else:
            y_BLE = gated_bidirectional_linear_attention(
                packed_BLP,
                self.norm_weight,
                lengths_B,
                num_heads=self.layout.num_heads,
                head_dim=self.layout.head_dim,
                eps=self.eps,
                key_gate=self.layout.key_gate,
                gated_norm=self.layout.gated_norm,
            )
        return self.out(y_BLE)


def causal_gated_linear_attention(
    packed_BLP: Tensor, norm_weight_HD: Tensor, lengths_B: Tensor, layout: PackedLayout, eps: float
) -> Tensor:
    """Return the causal twin of the bidirectional op: sums run over j <= i only.

    For ablations. It forms the [B, H, L, L] weights, so time and memory are quadratic in L, in float32.
    """
    dtype = accumulation_dtype(packed_BLP.dtype)
    length = packed_BLP.shape[1]
    valid_BL = valid_positions(lengths_B, length)
    packed = packed_BLP.to(dtype).masked_fill(~valid_BL.unsqueeze(-1), 0)

    def heads(offset: int) -> Tensor:
        part = packed[..., offset : offset + layout.inner]
        return part.unflatten(-1, (layout.num_heads, layout.head_dim)).transpose(1, 2)

    q, k, v = heads(layout.query), heads(layout.key), heads(layout.value)
    weights_BHLL = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    positions = torch.arange(length, device=packed.device)
    visible_LL = positions.unsqueeze(0) <= positions.unsqueeze(1)
    if layout.key_gate_logit is not None:
        logits_BHL = packed[..., layout.key_gate_logit : layout.used_width].transpose(1, 2)
        # The running maximum, written as a masked maximum: cummax has no ONNX translation.
        logits_BHLL = logits_BHL.unsqueeze(2).masked_fill(~visible_LL, -torch.inf)
        running_max_BHL1 = logits_BHLL.amax(-1, keepdim=True) if length > 0 else logits_BHL.unsqueeze(3)
        gap_BHLL = (logits_BHL.unsqueeze(2) - running_max_BHL1).masked_fill(~visible_LL, 0)
        weights_BHLL = weights_BHLL * torch.exp(gap_BHLL)
    weights_BHLL = weights_BHLL.masked_fill(~visible_LL, 0)
    total_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    y_BHLD = (weights_BHLL @ v) / torch.where(total_BHL1 > 0, total_BHL1, torch.ones_like(total_BHL1))
    if layout.residual_gate is not None:
        y_BHLD = y_BHLD * torch.rsqrt(y_BHLD.square().mean(-1, keepdim=True) + eps)
        y_BHLD = y_BHLD * norm_weight_HD.to(dtype).unsqueeze(1) * F.silu(heads(layout.residual_gate))
    y_BLE = y_BHLD.transpose(1, 2).flatten(2).masked_fill(~valid_BL.unsqueeze(-1), 0)
    return y_BLE.to(packed_BLP.dtype)
