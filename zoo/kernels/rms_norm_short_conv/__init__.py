"""RMSNorm and the short causal convolution over [B, L, C] in one pass: the pre-norm of a linear-attention layer.

    n[b, t, c] = x[b, t, c] / sqrt(mean_c(x[b, t, c]^2) + eps) * norm_weight[c]
    y[b, t, c] = sum_w weight[c, w] * n[b, t - (W - 1) + w, c]        (n is 0 left of the first event)

y is 0 at padded positions and has a dtype of its own: under autocast the residual stream is float32 and the next
projection reads bfloat16. n is never rounded or stored.

With h = n / norm_weight, g = dy and d[t] = norm_weight * sum_w weight[w] * g[t + (W - 1) - w], the gradients are

    dx = (d - h * mean_c(d * h)) / sqrt(mean_c(x^2) + eps)
    dweight[w] = norm_weight * P[w],   dnorm_weight = sum_w weight[w] * P[w],   P[w] = sum_t g[t] * h[t - (W - 1) + w]

(RMSNorm: Zhang and Sennrich, arXiv 1910.07467.)
"""

from zoo.kernels.rms_norm_short_conv.op import rms_norm_short_conv

__all__ = ["rms_norm_short_conv"]
