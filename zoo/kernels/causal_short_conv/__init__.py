"""Short causal convolution over [B, L, C]: depthwise, left-padded, no bias, optional SiLU.

    z[b, t, c] = sum_w weight[c, w] * x[b, t - (W - 1) + w, c]        (x is 0 left of the first event)
    y = z, or z * sigmoid(z) with activation "silu"; y is 0 at padded positions

The local mixing of GBLA (arXiv 2606.07317, kernel 4, no activation) and of Gated DeltaNet practice (SiLU).
"""

from zoo.kernels.causal_short_conv.op import causal_short_conv

__all__ = ["causal_short_conv"]
