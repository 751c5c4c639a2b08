"""Gated bidirectional linear attention with its gated RMSNorm epilogue (GBLA, arXiv 2606.07317).

Per row and head, over the valid positions j, with phi(x) = elu(x) + 1:

    g   = softmax_j(s_j)                                                    key gate; 1 without it
    O_i = phi(q_i)^T (sum_j g_j phi(k_j) v_j^T) / phi(q_i)^T (sum_j g_j phi(k_j))
    Y_i = RMSNorm(O_i) * norm_weight * SiLU(r_i)                            O_i without the gated norm

Everything is read in place from one packed projection [B, L, P]: [q | k | v | r | s | padding], each of q, k, v, r
H * D wide in head-major order, s H wide. Parts that are switched off are absent.

O does not change when phi(q_i), or all g_j phi(k_j) of a head, are scaled by a common factor. That is used three
times: the softmax normaliser is dropped, the largest s_j + min(k_j, 0) is subtracted in the exponent, and so is the
largest min(q_i, 0) of a row. Gates of any size and inputs far below zero therefore neither overflow nor vanish.
"""

from zoo.kernels.gated_bidirectional_linear_attention.op import gated_bidirectional_linear_attention
from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout, packed_width

__all__ = ["PackedLayout", "gated_bidirectional_linear_attention", "packed_width"]
