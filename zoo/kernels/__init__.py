"""The custom ops: one folder an op, with its mathematics, its reference and its registration in reading order.

Shape suffixes on tensors: B batch, L length, C channels, W kernel width, H heads, D head width, P packed width.
Importing this package registers the ops under ``torch.ops.zoo``; it needs neither Triton nor a GPU.
"""

from zoo.kernels.causal_short_conv import causal_short_conv
from zoo.kernels.gated_bidirectional_linear_attention import gated_bidirectional_linear_attention, packed_width
from zoo.kernels.gated_delta_rule import gated_delta_rule
from zoo.kernels.rms_norm_short_conv import rms_norm_short_conv

__all__ = [
    "causal_short_conv",
    "gated_bidirectional_linear_attention",
    "gated_delta_rule",
    "packed_width",
    "rms_norm_short_conv",
]
