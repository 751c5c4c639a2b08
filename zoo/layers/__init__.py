"""Building blocks that more than one model uses. Shape suffixes as in zoo.kernels, plus N layers, K beams, M digits."""

from zoo.layers.attention import MultiHeadAttention
from zoo.layers.attention_plan import UNPADDED_CAUSAL, AttentionPlan, matmul_dtype, plan_attention
from zoo.layers.gbla_mixer import GatedBidirectionalLinearAttention
from zoo.layers.local_attention import local_attention, windowed_step
from zoo.layers.mlp import ReluMLP, SwiGLU
from zoo.layers.multi_hash import MultiHashEmbedding
from zoo.layers.residual_quantizer import Quantized, ResidualQuantizer, nearest_codes
from zoo.layers.rotary import rotate, rotate_tokens

__all__ = [
    "UNPADDED_CAUSAL",
    "AttentionPlan",
    "GatedBidirectionalLinearAttention",
    "MultiHashEmbedding",
    "MultiHeadAttention",
    "Quantized",
    "ReluMLP",
    "ResidualQuantizer",
    "SwiGLU",
    "local_attention",
    "matmul_dtype",
    "nearest_codes",
    "plan_attention",
    "rotate",
    "rotate_tokens",
    "windowed_step",
]
