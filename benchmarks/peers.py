"""What the linear-attention layer is compared with, on the same input and in the same precision.

Softmax peers read the packed projection in place, [B, L, 3, H, D], with no copy of q, k or v.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo.kernels.causal_short_conv.reference import causal_short_conv_reference
from zoo.kernels.gated_bidirectional_linear_attention.reference import gated_bidirectional_linear_attention_reference
from zoo.layers import GatedBidirectionalLinearAttention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, L, H, D] -> [B, L, H, D]."""

FLA_NOTE = (
    "fla-core 0.6.0 has no peer: its linear attention ops are all causal (fla.ops.linear_attn), and a causal sum run "
    "in both directions is another, slower function."
)


class SoftmaxLayer:
    """Projection to q, k, v; softmax attention; projection out. Full rows, no positions."""

    def __init__(self, d_model: int, num_heads: int, head_dim: int, attention: Attention) -> None:
        self.heads, self.attention = (3, num_heads, head_dim), attention
        self.qkv = torch.empty(3 * num_heads * head_dim, d_model)
        self.out = torch.empty(d_model, num_heads * head_dim)

    def with_weights(self, qkv: Tensor, out: Tensor) -> SoftmaxLayer:
        """Set the weights and return the layer."""
        self.qkv, self.out = qkv, out
        return self

    def __call__(self, x_BLC: Tensor) -> Tensor:
        """Map [B, L, d_model] to the same."""
        q, k, v = F.linear(x_BLC, self.qkv).unflatten(-1, self.heads).unbind(2)
        return F.linear(self.attention(q, k, v).flatten(2), self.out)


def plain_attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """Softmax attention written out, every step in the dtype of its input: the reference of the softmax peers."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return (weights @ v).transpose(1, 2)


def cudnn_attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """cuDNN's fused attention."""
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q_BLHD, k_BLHD, v_BLHD)


def torch_flash_attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """FlashAttention as torch carries it."""
    return _sdpa(SDPBackend.FLASH_ATTENTION, q_BLHD, k_BLHD, v_BLHD)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return o.transpose(1, 2)


def flash_attention_3() -> tuple[Attention | None, str]:
    """Return FlashAttention-3 from the fa3-fwd wheel, or None and why not."""
    try:
        flash_attn_func = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except (ImportError, OSError) as error:
        return None, f"no FlashAttention-3: {error}; pip install fa3-fwd==0.0.3"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return attend, "FlashAttention-3 is fa3-fwd 0.0.3"


def reference_mixer(layer: GatedBidirectionalLinearAttention, x_BLC: Tensor, lengths_B: Tensor) -> Tensor:
    """Compute a GBLA mixer layer from the kernels' references: no custom op, so torch.compile sees all of it."""
    if layer.conv_weight is not None:
        x_BLC = causal_short_conv_reference(x_BLC, layer.conv_weight, lengths_B, "none")
    packed_BLP = layer.projection(x_BLC)
    y_BLE = gated_bidirectional_linear_attention_reference(
        packed_BLP, layer.norm_weight, lengths_B, layer.layout, layer.eps
    )
    return layer.out(y_BLE)
