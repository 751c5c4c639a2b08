"""Softmax attention to the last W positions, in time linear in the length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend from each position to the last ``window`` positions, itself included.

    Positions go together in blocks of W, which see themselves and the block before; a history no longer than W is one
    block, and with one key a position it needs no mask, so that a GPU takes a kernel that never stores scores. There is
    no mask for padding: on the right of a row only padding sees it.

    Args:
        q: [B, L, H, D].
        k: [B, L, S, H, D]: each position shows S keys.
        v: [B, L, S, H, D].
        window: W.

    Returns:
        [B, L, H, D].
    """
    length, heads = q.shape[1:3]
    if not torch.compiler.is_exporting() and length <= window:
        return _causal(q, k, v)
    # An exported graph always has two blocks or more, so that one graph serves all lengths.
    end = length + window if torch.compiler.is_exporting() else length
    first = torch.arange(0, end, window, device=q.device).unsqueeze(-1)
    own = first + torch.arange(window, device=q.device)
    seen = first - window + torch.arange(2 * window, device=q.device)
    # Of the first block the one before does not exist, nor does the end of the last one: those take another's place.
    q, k, v = q[:, own.clamp(max=length - 1)], *(x[:, seen.clamp(0, length - 1)] for x in (k, v))
    mask = (seen.unsqueeze(1) <= own.unsqueeze(2)) & (seen.unsqueeze(1) > own.unsqueeze(2) - window)
    mask = mask & (seen.unsqueeze(1) >= 0)
    mask = mask.unsqueeze(-1).expand(-1, -1, -1, k.shape[3]).flatten(2).unsqueeze(1)
    k, v = (x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2) for x in (k, v))
    o = F.scaled_dot_product_attention(q.permute(1, 0, 3, 2, 4).flatten(1, 2), k, v, attn_mask=mask)
    positions = torch.arange(length, device=o.device)
    return o.unflatten(1, (-1, heads))[positions // window, :, :, positions % window].transpose(0, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each position to all up to itself; shapes as of ``local_attention``."""
    length, shown = k.shape[1:3]
    q, k, v = q.transpose(1, 2), *(x.flatten(1, 2).transpose(1, 2) for x in (k, v))
    if shown == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().repeat_interleave(shown, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


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
