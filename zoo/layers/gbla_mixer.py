"""The GBLA token mixer: short convolution, packed projection, linear attention with gated norm, output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.kernels import causal_short_conv, gated_bidirectional_linear_attention, rms_norm_short_conv
from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout
from zoo.layers.attention_plan import matmul_dtype
from zoo.layers.causal_linear_attention import causal_gated_linear_attention


class GatedBidirectionalLinearAttention(nn.Module):
    """One GBLA mixer layer (arXiv 2606.07317, steps 1 to 5 of its layer), each addition switchable.

    Args:
        d_model: width of input and output.
        num_heads: H.
        head_dim: D.
        conv_width: taps of the short convolution; 0 for none.
        key_gate: weigh keys by a softmax over the sequence.
        gated_norm: finish with RMSNorm(O) * SiLU(R).
        causal: let position i see only j <= i (ablation; standard ops only).
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

    def forward(self, x_BLC: Tensor, lengths_B: Tensor, pre_norm: nn.RMSNorm | None = None) -> Tensor:
        """Mix ``x`` [B, L, d_model] over the valid positions, after ``pre_norm`` if given; padded outputs are zero."""
        packed_BLP = self.projection(self._convolve(x_BLC, lengths_B, pre_norm))
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

    def _convolve(self, x_BLC: Tensor, lengths_B: Tensor, pre_norm: nn.RMSNorm | None) -> Tensor:
        """Normalise and convolve; on a GPU in one pass, which reads ``x`` once and writes what is projected."""
        if self.conv_weight is None:
            return x_BLC if pre_norm is None else pre_norm(x_BLC)
        if pre_norm is None:
            return causal_short_conv(x_BLC, self.conv_weight, lengths_B)
        if not x_BLC.is_cuda or torch.compiler.is_exporting():
            return causal_short_conv(pre_norm(x_BLC), self.conv_weight, lengths_B)
        return rms_norm_short_conv(
            x_BLC,
            pre_norm.weight,
            self.conv_weight,
            lengths_B,
            eps=self.eps if pre_norm.eps is None else pre_norm.eps,
            out_dtype=matmul_dtype(self.projection.weight),
        )
