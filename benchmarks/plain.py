"""The GBLA core and layer as a good engineer writes them in bfloat16 PyTorch: the peer for torch.compile.

Tensors stay in bfloat16 except for statistics (softmax of the gates, key normaliser, denominator, RMSNorm), whose
elementwise steps a compiler fuses. Full rows only. As in the op, packed [B, L, P] is q | k | v | r | s | padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout

DEFAULT, AUTOTUNED = "default", "max-autotune-no-cudagraphs"
"""Modes of torch.compile."""

COMPILED = "torch_compile"
"""A result holds the fastest of the compiled peers under this name."""


def core(packed_BLP: Tensor, norm_weight_HD: Tensor, layout: PackedLayout, eps: float) -> Tensor:
    """Return Y [B, L, H * D] of full rows; autograd derives the backward."""
    length, inner = packed_BLP.shape[1], layout.inner
    q, k, v, r = packed_BLP[..., : 4 * inner].unflatten(-1, (4, layout.num_heads, layout.head_dim)).unbind(2)
    logits_BLH = packed_BLP[..., 4 * inner : layout.used_width]
    # Times L: the mean weight is then 1, so no step works near the end of a 16-bit range. The factor cancels in O.
    gate_BLH = torch.softmax(logits_BLH, 1, dtype=torch.float32) * length
    weighted_k = ((F.elu(k) + 1) * gate_BLH.unsqueeze(-1)).to(packed_BLP.dtype)
    z_BHD = weighted_k.sum(1, dtype=torch.float32)
    # Divided by z, the state is a mean of the values, which its rounding to 16 bits suits.
    kv_BHDE = torch.einsum("blhd,blhe->bhde", weighted_k, v) / length
    phi_q = F.elu(q) + 1
    numerator = torch.einsum("blhd,bhde->blhe", phi_q, kv_BHDE).float()
    denominator_BLH1 = (phi_q.float() * (z_BHD / length).unsqueeze(1)).sum(-1, keepdim=True)
    o = numerator / denominator_BLH1
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * norm_weight_HD.float()
    return (o * F.silu(r.float())).to(packed_BLP.dtype).flatten(2)


def short_conv(x_BLC: Tensor, weight_CW: Tensor) -> Tensor:
    """Convolve causally by shifted multiply-adds, which a compiler makes one pass."""
    length, width = x_BLC.shape[1], weight_CW.shape[1]
    padded = F.pad(x_BLC, (0, 0, width - 1, 0)).float()
    taps = (padded[:, w : w + length] * weight_CW[:, w].float() for w in range(width))
    return sum(taps, start=torch.zeros((), device=x_BLC.device)).to(x_BLC.dtype)


def layer(mixer: Any, x_BLC: Tensor) -> Tensor:
    """Compute a GBLA mixer layer (``zoo.layers.GatedBidirectionalLinearAttention``) with its weights, full rows."""
    if mixer.conv_weight is not None:
        x_BLC = short_conv(x_BLC, mixer.conv_weight)
    packed_BLP = F.linear(x_BLC, mixer.projection.weight)
    return F.linear(core(packed_BLP, mixer.norm_weight, mixer.layout, mixer.eps), mixer.out.weight)


def compiled_peers(function: Callable[..., Tensor], *, autotune: bool) -> dict[str, Callable[..., Tensor]]:
    """Return the function compiled by each mode that is tried, by name; they compile when they are first called."""
    modes = (DEFAULT, AUTOTUNED) if autotune else (DEFAULT,)
    return {f"{COMPILED} {mode}": torch.compile(function, dynamic=False, mode=mode) for mode in modes}


def with_fastest(timings: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Put the fastest compiled peer under ``COMPILED`` as well, and return its mode; None where none was timed."""
    peers = [name for name in timings if name.startswith(f"{COMPILED} ")]
    if not peers:
        return dict(timings), None
    best = min(peers, key=lambda name: timings[name].median)
    return {**timings, COMPILED: timings[best]}, best.removeprefix(f"{COMPILED} ")
