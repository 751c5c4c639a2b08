"""Softmax attention to the last W positions, in time linear in the length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from each position to the last ``window`` positions, itself included.

    Positions go together in blocks of W, which see themselves and the block before. There is no mask for padding:
    on the right of a row only padding sees it.

    Args:
        q: [B, L, H, D].
        k: [B, L, S, H, D]: each position shows S keys.
        v: [B, L, S, H, D].
        window: W.

    Returns:
        [B, L, H, D].
    """
    batch, length, heads, width = q.shape
    shown = k.shape[2]
    blocks = (length + window - 1) // window
    padding = blocks * window - length
    q = F.pad(q, (0, 0, 0, 0, 0, padding)).view(batch, blocks, window, heads, width)
    q = q.permute(1, 0, 3, 2, 4).reshape(blocks, batch * heads, window, width)
    k, v = (_with_block_before(x, window, padding, blocks) for x in (k, v))
    # Of the first block the one before does not exist.
    i = torch.arange(window, device=q.device).unsqueeze(-1)
    j = torch.arange(2 * window, device=q.device) - window
    seen = (j <= i) & (j > i - window)
    exists = (torch.arange(blocks, device=q.device) > 0).view(-1, 1, 1) | (j >= 0)
    mask = (seen & exists).unsqueeze(-1).expand(-1, -1, -1, shown).flatten(2).unsqueeze(1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    o = o.view(blocks, batch, heads, window, width).permute(1, 0, 3, 2, 4)
    return o.reshape(batch, blocks * window, heads, width)[:, :length]


def _with_block_before(x: Tensor, window: int, padding: int, blocks: int) -> Tensor:
    """Return [blocks, B * H, 2 * W * S, D] of [B, L, S, H, D]: each block after the one before it."""
    batch, _, shown, heads, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, 0, window, padding)).view(batch, blocks + 1, window, shown, heads, width)
    x = torch.cat([x[:, :-1], x[:, 1:]], dim=2)
    return x.permute(1, 0, 4, 2, 3, 5).reshape(blocks, batch * heads, 2 * window * shown, width)


def windowed_step(q: Tensor, k: Tensor, v: Tensor, known: Tensor, window: int) -> Tensor:
    """Attend from T new positions to the last ``window`` ones, of which P came before.

    Args:
        q: [B, T, H, D].
        k: [B, P + T, S, H, D], the P positions before the new ones first, the latest of them last.
        v: [B, P + T, S, H, D].
        known: int [B], how many of the P positions exist.
        window: W; P is W - 1 or more where that many exist.

    Returns:
        [B, T, H, D].
    """
    before = k.shape[1] - q.shape[1]
    i = torch.arange(q.shape[1], device=q.device).unsqueeze(-1) + before
    j = torch.arange(k.shape[1], device=q.device)
    seen = (j <= i) & (j > i - window)
    exists = j >= before - known.view(-1, 1, 1)
    mask = (seen & exists).unsqueeze(-1).expand(-1, -1, -1, k.shape[2]).flatten(2).unsqueeze(1)
    k, v = (x.permute(0, 3, 1, 2, 4).flatten(2, 3) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)
