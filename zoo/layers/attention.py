"""Multi-head softmax attention over ragged batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.rotary import rotate


def attention_mask(valid_BL: Tensor, *, causal: bool) -> Tensor:
    """Return a bool mask [B, 1, L, L], true where query i may see key j.

    A padded query sees itself, so that no row of the softmax is empty; its output is discarded by the caller.
    """
    length = valid_BL.shape[1]
    positions = torch.arange(length, device=valid_BL.device)
    query, key = positions.unsqueeze(1), positions.unsqueeze(0)
    seen = valid_BL[:, None, None, :]
    if causal:
        seen = seen & (key <= query)
    return seen | (key == query)


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

    def forward(self, x_BLC: Tensor, mask_B1LL: Tensor | None, *, is_causal: bool = False) -> Tensor:
        """Attend within ``x`` [B, L, d_model]; either ``mask`` (true = seen) or ``is_causal``."""
        qkv = self.qkv(x_BLC).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q_BHLD, k_BHLD, v_BHLD = qkv.unbind(0)
        if self.rotary_base is not None:
            positions = torch.arange(x_BLC.shape[1], device=x_BLC.device)
            q_BHLD = rotate(q_BHLD, positions, self.rotary_base)
            k_BHLD = rotate(k_BHLD, positions, self.rotary_base)
        o_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask_B1LL, is_causal=is_causal)
        return self.out(o_BHLD.transpose(1, 2).flatten(2))
