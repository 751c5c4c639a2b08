"""What the linear-attention layer and the gated delta rule are compared with, on the same input, in the same precision.

Softmax peers read the packed projection in place, [B, L, 3, H, D], with no copy of q, k or v.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo.kernels.causal_short_conv.reference import causal_short_conv_reference
from zoo.kernels.gated_bidirectional_linear_attention.reference import gated_bidirectional_linear_attention_reference
from zoo.layers import GatedBidirectionalLinearAttention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, L, H, D] -> [B, L, H, D]."""

DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]
"""q, k, v, log_decay, beta, initial_state or None -> o, final state; normalises q and k itself, scale D^-0.5."""

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


def fla_delta_rule(*, normalize: bool) -> tuple[DeltaRule | None, str]:
    """Return the chunked gated delta rule of fla-core, or None and why not."""
    module, reason = _fla_module()
    return module and _without_state(module.chunk_gated_delta_rule, normalize=normalize), reason


def fla_delta_rule_step() -> tuple[DeltaRule | None, str]:
    """Return the recurrent gated delta rule of fla-core, state in and out, or None and why not."""
    module, reason = _fla_module()
    if module is None:
        return None, reason

    def step(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return module.fused_recurrent_gated_delta_rule(
            q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return step, reason


def flash_qla_delta_rule(*, normalize: bool) -> tuple[DeltaRule | None, str]:
    """Return the gated delta rule of FlashQLA, D 128 only, or None and why not.

    It normalises q and k in plain PyTorch. So fla's kernels do that for it where they are installed.
    """
    try:
        module = importlib.import_module("flash_qla")
    except Exception as error:  # it raises whatever TileLang raises where it finds no compiler or GPU that it knows
        return None, f"no FlashQLA: {first_line(error)}; pip install flash-qla==0.1.3"
    rule, reason = module.chunk_gated_delta_rule, f"FlashQLA is flash-qla {module.__version__}"
    if not normalize:
        return _without_state(rule, normalize=False), reason
    try:
        l2norm = importlib.import_module("fla.modules.norm.l2norm").l2norm
    except Exception:  # as above
        return _without_state(rule, normalize=True), f"{reason} with its own normalisation"
    unit = _without_state(rule, normalize=False)

    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return unit(l2norm(q), l2norm(k), v, log_decay, beta, state)

    return run, f"{reason} behind fla's normalisation"


def _fla_module() -> tuple[Any, str]:
    # Where FlashQLA is installed, fla hands D 128 to it; that is a peer of its own.
    os.environ["FLA_FLASH_QLA"] = "0"
    try:
        module = importlib.import_module("fla.ops.gated_delta_rule")
        version = importlib.import_module("fla").__version__
    except Exception as error:  # it asks Triton for the GPU as it is imported, which raises whatever it likes
        return None, f"no fla: {first_line(error)}; pip install fla-core==0.6.0"
    return module, f"fla is fla-core {version}"


def _without_state(function: Callable[..., tuple[Tensor, Tensor | None]], *, normalize: bool) -> DeltaRule:
    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return function(q, k, v, g=log_decay, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=normalize)

    return run


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def reference_mixer(layer: GatedBidirectionalLinearAttention, x_BLC: Tensor, lengths_B: Tensor) -> Tensor:
    """Compute a GBLA mixer layer from the kernels' references: no custom op, so torch.compile sees all of it."""
    if layer.conv_weight is not None:
        x_BLC = causal_short_conv_reference(x_BLC, layer.conv_weight, lengths_B, "none")
    packed_BLP = layer.projection(x_BLC)
    y_BLE = gated_bidirectional_linear_attention_reference(
        packed_BLP, layer.norm_weight, lengths_B, layer.layout, layer.eps
    )
    return layer.out(y_BLE)
