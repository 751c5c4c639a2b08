"""The causal twin of gated bidirectional linear attention, in standard ops: sums run over j <= i only.

For ablations. Two forms of the same function: a quadratic one, which exports, and a chunked one, whose memory is
linear in the length. With m_i = max_{j <= i} s_j the running maximum of the key-gate logits,

    O_i = sum_{j <= i} exp(s_j - m_i) phi(q_i)^T phi(k_j) v_j / sum_{j <= i} exp(s_j - m_i) phi(q_i)^T phi(k_j)

The chunked form cuts the sequence into chunks of C positions. Within a chunk it forms the [C, C] weights; of the chunks
before, it needs only the sums of phi(k_j) exp(s_j - M_n) [v_j, 1], where M_n is the running maximum at the end of chunk
n. Every exponent is at most 0, and no factor is smaller than the product it goes into, so nothing overflows, and
nothing vanishes that the quadratic form keeps.

Shape suffixes: B batch, L length, P packed columns, E inner width, H heads, D head width, N chunks, C chunk, V = D + 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout
from zoo.kernels.ragged import accumulation_dtype, valid_positions

CHUNK = 64
"""Positions whose weights are formed at once."""

CHUNKED_ABOVE = 128
"""Sequences longer than this take the chunked form, except in an export."""


def causal_gated_linear_attention(
    packed_BLP: Tensor, norm_weight_HD: Tensor, lengths_B: Tensor, layout: PackedLayout, eps: float
) -> Tensor:
    """Return the causal twin of the bidirectional op.

    Args:
        packed_BLP: any float dtype, laid out as ``layout`` says; padding may hold anything.
        norm_weight_HD: weight of the gated RMSNorm.
        lengths_B: int32, clamped to [0, L].
        layout: which columns hold q, k, v, r and s.
        eps: of the RMSNorm.

    Returns:
        [B, L, H * D] in the dtype of ``packed``, zero at padding. Sums are float32 (float64 for float64 input), under
        autocast too. Memory is linear in L above ``CHUNKED_ABOVE``; an exported graph is quadratic at every length.
    """
    if torch.is_autocast_enabled(packed_BLP.device.type):
        with torch.autocast(packed_BLP.device.type, enabled=False):
            return causal_gated_linear_attention(packed_BLP, norm_weight_HD, lengths_B, layout, eps)
    dtype = accumulation_dtype(packed_BLP.dtype)
    valid_BL = valid_positions(lengths_B, packed_BLP.shape[1])
    packed = packed_BLP.to(dtype).masked_fill(~valid_BL.unsqueeze(-1), 0)

    def heads(offset: int) -> Tensor:
        part = packed[..., offset : offset + layout.inner]
        return part.unflatten(-1, (layout.num_heads, layout.head_dim)).transpose(1, 2)

    phi_q, phi_k = F.elu(heads(layout.query)) + 1, F.elu(heads(layout.key)) + 1
    logits_BHL = None
    if layout.key_gate_logit is not None:
        logits_BHL = packed[..., layout.key_gate_logit : layout.used_width].transpose(1, 2)
    chunked = not torch.compiler.is_exporting() and packed_BLP.shape[1] > CHUNKED_ABOVE
    form = chunked_causal_attention if chunked else quadratic_causal_attention
    y_BHLD = form(phi_q, phi_k, heads(layout.value), logits_BHL)
    if layout.residual_gate is not None:
        y_BHLD = y_BHLD * torch.rsqrt(y_BHLD.square().mean(-1, keepdim=True) + eps)
        y_BHLD = y_BHLD * norm_weight_HD.to(dtype).unsqueeze(1) * F.silu(heads(layout.residual_gate))
    y_BLE = y_BHLD.transpose(1, 2).flatten(2).masked_fill(~valid_BL.unsqueeze(-1), 0)
    return y_BLE.to(packed_BLP.dtype)


def quadratic_causal_attention(
    phi_q_BHLD: Tensor, phi_k_BHLD: Tensor, v_BHLD: Tensor, logits_BHL: Tensor | None
) -> Tensor:
    """Return O [B, H, L, D] through the [B, H, L, L] weights; no key gate where ``logits`` is ``None``."""
    length = v_BHLD.shape[2]
    weights_BHLL = phi_q_BHLD @ phi_k_BHLD.mT
    visible_LL = _not_after(length, length, v_BHLD.device)
    if logits_BHL is not None:
        # The running maximum, written as a masked maximum: cummax has no ONNX translation.
        logits_BHLL = logits_BHL.unsqueeze(2).masked_fill(~visible_LL, -torch.inf)
        running_max_BHL1 = logits_BHLL.amax(-1, keepdim=True) if length > 0 else logits_BHL.unsqueeze(3)
        gap_BHLL = (logits_BHL.unsqueeze(2) - running_max_BHL1).masked_fill(~visible_LL, 0)
        weights_BHLL = weights_BHLL * torch.exp(gap_BHLL)
    weights_BHLL = weights_BHLL.masked_fill(~visible_LL, 0)
    return _divide(weights_BHLL @ v_BHLD, weights_BHLL.sum(-1, keepdim=True))


def chunked_causal_attention(
    phi_q_BHLD: Tensor, phi_k_BHLD: Tensor, v_BHLD: Tensor, logits_BHL: Tensor | None, chunk: int = CHUNK
) -> Tensor:
    """Return what ``quadratic_causal_attention`` returns, with memory linear in L: C weights a position, not L."""
    length = v_BHLD.shape[2]
    missing = -length % chunk

    def chunks(x_BHL_: Tensor) -> Tensor:
        padding = (0, 0) * (x_BHL_.dim() - 3) + (0, missing)
        return F.pad(x_BHL_, padding).unflatten(2, (-1, chunk))

    phi_q, phi_k = chunks(phi_q_BHLD), chunks(phi_k_BHLD)
    v_BHNCV = chunks(F.pad(v_BHLD, (0, 1), value=1.0))  # the column of ones sums the weights themselves
    visible_CC = _not_after(chunk, chunk, v_BHLD.device)
    weights_BHNCC = phi_q @ phi_k.mT
    if logits_BHL is None:
        weights_BHNCC = weights_BHNCC.masked_fill(~visible_CC, 0)
        sums_BHNDV = phi_k.mT @ v_BHNCV
        before_BHNDV = sums_BHNDV.cumsum(2) - sums_BHNDV
        summed_BHNCV = weights_BHNCC @ v_BHNCV + phi_q @ before_BHNDV
    else:
        logits_BHNC = chunks(logits_BHL)
        # The maximum cancels in the quotient, so no gradient goes through it.
        running_max_BHNC = logits_BHNC.detach().flatten(2).cummax(2).values.unflatten(2, (-1, chunk))
        end_max_BHN = running_max_BHNC[..., -1]
        gap_BHNCC = logits_BHNC.unsqueeze(3) - running_max_BHNC.unsqueeze(4)
        weights_BHNCC = weights_BHNCC * torch.exp(gap_BHNCC.masked_fill(~visible_CC, 0))
        weights_BHNCC = weights_BHNCC.masked_fill(~visible_CC, 0)
        gate_BHNC = torch.exp(logits_BHNC - end_max_BHN.unsqueeze(3))
        sums_BHNDV = (phi_k * gate_BHNC.unsqueeze(4)).mT @ v_BHNCV
        before_BHNDV = _sums_before(sums_BHNDV, end_max_BHN)
        previous_max_BHN = torch.cat([end_max_BHN[..., :1], end_max_BHN[..., :-1]], -1)
        shrink_BHNC = torch.exp((previous_max_BHN.unsqueeze(3) - running_max_BHNC).clamp(max=0))
        summed_BHNCV = weights_BHNCC @ v_BHNCV + (phi_q * shrink_BHNC.unsqueeze(4)) @ before_BHNDV
    summed_BHLV = summed_BHNCV.flatten(2, 3)[:, :, :length]
    return _divide(summed_BHLV[..., :-1], summed_BHLV[..., -1:])


def _sums_before(sums_BHNDV: Tensor, end_max_BHN: Tensor) -> Tensor:
    """Return, for each chunk n, the sums of all chunks before it in the scale of the maximum at the end of n - 1."""
    count = end_max_BHN.shape[2]
    previous_max_BHN = torch.cat([end_max_BHN[..., :1], end_max_BHN[..., :-1]], -1)
    gap_BHNN = end_max_BHN.unsqueeze(2) - previous_max_BHN.unsqueeze(3)
    is_before_NN = _not_after(count, count, sums_BHNDV.device).tril(-1)
    decay_BHNN = torch.exp(gap_BHNN.masked_fill(~is_before_NN, -torch.inf))
    return (decay_BHNN @ sums_BHNDV.flatten(3)).view_as(sums_BHNDV)


def _not_after(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a bool mask [queries, keys], true where key j is not after query i."""
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device).unsqueeze(1)


def _divide(numerator: Tensor, total: Tensor) -> Tensor:
    """Return the quotient; 0 / 0, where every weight has vanished, is 0."""
    return numerator / torch.where(total > 0, total, torch.ones_like(total))
