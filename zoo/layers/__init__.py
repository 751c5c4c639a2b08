"""Building blocks that more than one model uses. Shape suffixes as in zoo.kernels, plus N layers, K beams, M digits."""

from zoo.layers.attention import MultiHeadAttention
from zoo.layers.attention_plan import UNPADDED_CAUSAL, AttentionPlan, matmul_dtype, plan_attention
from zoo.layers.gbla_mixer import GatedBidirectionalLinearAttention
from zoo.layers.mlp import ReluMLP, SwiGLU
from zoo.layers.multi_hash import MultiHashEmbedding
from zoo.layers.rotary import rotate

__all__ = [
    "UNPADDED_CAUSAL",
    "AttentionPlan",
    "GatedBidirectionalLinearAttention",
    "MultiHashEmbedding",
    "MultiHeadAttention",
    "ReluMLP",
    "SwiGLU",
    "matmul_dtype",
    "plan_attention",
    "rotate",
]
