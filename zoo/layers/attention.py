"""Multi-head softmax attention over ragged batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.attention_plan import AttentionPlan, Packing, dense_attention, matmul_dtype
from zoo.layers.rotary import rotate, rotate_tokens


class MultiHeadAttention(nn.Module):
    """Self-attention with one packed projection and optional rotary positions.

    Args:
        d_model: width of input and output.
        num_heads: H.
        head_dim: D; H * D need not equal ``d_model``.
        rotary_base: wavelength base of the rotary positions; ``None`` for no positions.
    """

    def __init__(self, d_model: int, num_heads: int, head_dim: int, rotary_base: float | None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.rotary_base = rotary_base
        self.qkv = nn.Linear(d_model, 3 * num_heads * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)

    def forward(self, x_BLC: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend within the rows of ``x`` [B, L, d_model]. Outputs at padding may hold anything finite."""
        if plan.packing is not None:
            return self._packed(x_BLC, plan.packing, causal=plan.causal)
        if plan.kind == "dense":
            return self._dense(x_BLC, plan)
        return self._masked(x_BLC, plan)

    def _masked(self, x_BLC: Tensor, plan: AttentionPlan) -> Tensor:
        qkv = self.qkv(x_BLC).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q_BHLD, k_BHLD, v_BHLD = qkv.unbind(0)
        if self.rotary_base is not None:
            positions = torch.arange(x_BLC.shape[1], device=x_BLC.device)
            q_BHLD = rotate(q_BHLD, positions, self.rotary_base)
            k_BHLD = rotate(k_BHLD, positions, self.rotary_base)
        # A mask holds causality already, and SDPA takes one or the other.
        is_causal = plan.causal and plan.mask_B1LL is None
        o_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=plan.mask_B1LL, is_causal=is_causal)
        return self.out(o_BHLD.transpose(1, 2).flatten(2))

    def _dense(self, x_BLC: Tensor, plan: AttentionPlan) -> Tensor:
        positions_L = torch.arange(x_BLC.shape[1], device=x_BLC.device)
        q_BLHD, k_BLHD, v_BLHD = self._heads(self.qkv(x_BLC), positions_L)
        return self.out(dense_attention(q_BLHD, k_BLHD, v_BLHD, plan).flatten(2))

    def _packed(self, x_BLC: Tensor, packing: Packing, *, causal: bool) -> Tensor:
        # The projection would cast under autocast anyway; casting first moves half the bytes.
        x_TC = packing.pack(x_BLC.to(matmul_dtype(self.qkv.weight)))
        q_THD, k_THD, v_THD = self._heads(packing.guard(self.qkv(x_TC)), packing.rank_T)
        return packing.unpack(self.out(packing.attend(q_THD, k_THD, v_THD, causal=causal).flatten(1)))

    def _heads(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a packed projection [..., 3 * H * D] into rotated q, rotated k, and v, each [..., H, D]."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        if self.rotary_base is not None:
            q = rotate_tokens(q, positions, self.rotary_base)
            k = rotate_tokens(k, positions, self.rotary_base)
        return q, k, v
