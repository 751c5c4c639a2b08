"""The layers of SinkRec: conditional memory, TDGD, attention with memory pairs.

(P) marks what the paper states, (R) our reading where it is silent. Shape suffixes as in ``zoo.models.sinkrec``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.kernels import causal_short_conv, gated_delta_rule
from zoo.kernels.ragged import accumulation_dtype
from zoo.layers import ResidualQuantizer, SwiGLU, local_attention, rotate_tokens, windowed_step
from zoo.models.sinkrec_config import SinkRecConfig

WINDOW_WIDTH = 4
DILATIONS = (1, 4)
REACH = (WINDOW_WIDTH - 1) * max(DILATIONS)
"""Events before the present one that a memory window sees."""


class Memory(NamedTuple):
    """The conditional memory of a history.

    Attributes:
        vectors: [B, L, M], the sum of the chosen codes.
        codes: int64 [B, L, R].
        commitment: float32 scalar.
    """

    vectors: Tensor
    codes: Tensor
    commitment: Tensor


class Events(NamedTuple):
    """What every layer sees of a piece of history besides the residual stream.

    Attributes:
        lengths: int32 [B], valid positions of the piece.
        positions: int64 [B, L], counted from the start of the whole history.
        time: [B, L, F], features of the seconds since the event before; None without time.
        memory: [B, L, M]; None without the memory.
        kept: whether layers return what is left for later events; training has no use for it.
    """

    lengths: Tensor
    positions: Tensor
    time: Tensor | None
    memory: Tensor | None
    kept: bool = True


LayerState = tuple[Tensor, Tensor]
"""What one layer leaves for later events: recurrence and convolution inputs, or keys and values."""


class MemoryEncoder(nn.Module):
    """Windows ending at each event, contiguous and dilated, quantised (P; R: depthwise convolutions, a product)."""

    def __init__(self, config: SinkRecConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.taps = nn.Parameter(torch.empty(len(DILATIONS), WINDOW_WIDTH, config.d_model))
        self.project = nn.Linear(len(DILATIONS) * config.d_model, config.memory_dim, bias=False)
        self.quantizer = ResidualQuantizer(
            config.memory_dim,
            config.memory_levels,
            config.codebook_size,
            decay=config.codebook_decay,
            dead_below=config.dead_below,
        )
        self.gate = nn.Linear(config.d_model + config.memory_dim, config.d_model)
        self.inject = nn.Linear(config.memory_dim, config.d_model, bias=False)
        self.reconstruct = nn.Linear(config.memory_dim, config.d_model, bias=False)

    def forward(self, x_BLC: Tensor, before_BEC: Tensor, valid_BL: Tensor) -> Memory:
        """Encode [B, L, C], which the ``REACH`` embeddings ``before`` precede."""
        inputs = self.encoded(x_BLC, before_BEC)
        found = self.quantizer(inputs, valid_BL)
        return Memory(found.vectors.to(inputs.dtype), found.codes, found.commitment)

    def encoded(self, x_BLC: Tensor, before_BEC: Tensor) -> Tensor:
        """Return what is quantised, [B, L, M]; arguments as of ``forward``."""
        length = x_BLC.shape[1]
        seen = self.norm(torch.cat([before_BEC, x_BLC], dim=1))
        windows = [
            sum(
                seen[:, REACH - back * dilation : REACH - back * dilation + length] * taps[WINDOW_WIDTH - 1 - back]
                for back in range(WINDOW_WIDTH)
            )
            for dilation, taps in zip(DILATIONS, self.taps.unbind(0), strict=True)
        ]
        encoded: Tensor = self.project(torch.cat(windows, dim=-1))
        return encoded

    def reinject(self, x_BLC: Tensor, memory_BLM: Tensor) -> Tensor:
        """Return x + sigmoid(W_g [x; m] + bias) * W_m m (R), once, before the loops."""
        gate = torch.sigmoid(self.gate(torch.cat([x_BLC, memory_BLM.to(x_BLC.dtype)], dim=-1)))
        return x_BLC + gate * self.inject(memory_BLM)

    def reconstruction_loss(self, memory: Memory, x_BLC: Tensor, before_BEC: Tensor, valid_BL: Tensor) -> Tensor:
        """Return the mean over valid positions of 1 - cosine (R) of what the memory says and its window of 4 summed."""
        length = x_BLC.shape[1]
        with torch.no_grad():
            seen = widened(self.norm(torch.cat([before_BEC, x_BLC], dim=1)))
            window = torch.stack([seen[:, REACH - n : REACH - n + length] for n in range(WINDOW_WIDTH)]).sum(0)
        told = widened(self.reconstruct(memory.vectors))
        loss = 1 - F.cosine_similarity(told, window, dim=-1)
        return (loss * valid_BL).sum() / valid_BL.sum().clamp(min=1)


class TDGD(nn.Module):
    """Temporal-aware state-relation differential gated delta net: the gated delta rule that the memory keeps clean.

    Of each head, x being the normed stream, m the memory, f the time features ((P) the recurrence and what is purified,
    (R) the formulas of decay, addressing, coverage and strength; the scale K^-0.5 and biases are ours):

        log a_t = -exp(A) softplus(w_a x_t + w_dt f_t + bias)
        q_t, k_t = L2(SiLU(conv(W x))_t + W_f f_t),  v_t = SiLU(conv(W x))_t,  k^m_t = L2(W_km m_t)
        b'_t = sigmoid(w_b x_t + bias) (1 - sigmoid(w_c [x_t; m_t] + bias) max(0, k_t . k^m_t))
        q'_t = q_t - sigmoid(w_l x_t + bias) (k^m_t . q_t) k^m_t
        S_t = a_t S_{t-1} (I - b'_t k_t k_t^T) + b'_t v_t k_t^T,  o_t = K^-0.5 S_t q'_t
        y_t = W_o (RMSNorm(o_t) * SiLU(W_g x_t))

    L2(x) is x / sqrt(|x|^2 + 1e-6). Checked against a loop in tests/models/test_sinkrec_formulas.py.
    """

    def __init__(self, config: SinkRecConfig) -> None:
        super().__init__()
        self.config = config
        heads, width = config.num_heads, config.d_model
        self.qkv = nn.Linear(width, config.conv_channels, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.conv_channels, config.conv_width))
        self.decay_and_write = nn.Linear(width, 2 * heads)
        self.decay_rate = nn.Parameter(torch.empty(heads))
        self.gate = nn.Linear(width, heads * config.value_dim, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(config.value_dim))
        self.out = nn.Linear(heads * config.value_dim, width, bias=False)
        if config.time:
            self.time_to_decay = nn.Linear(config.time_features, heads, bias=False)
            self.time_to_query_key = nn.Linear(config.time_features, 2 * heads * config.key_dim, bias=False)
        if config.memory and (config.write_purification or config.read_purification):
            self.memory_key = nn.Linear(config.memory_dim, heads * config.key_dim, bias=False)
        if config.memory and config.write_purification:
            self.coverage = nn.Linear(width + config.memory_dim, heads)
        if config.memory and config.read_purification:
            self.alignment = nn.Linear(width, heads)

    def forward(self, x_BLC: Tensor, events: Events, state: LayerState | None) -> tuple[Tensor, LayerState | None]:
        """Map [B, L, C] to the same; ``state`` is that of the recurrence and of the convolution."""
        config = self.config
        q, k, v, conv = self.convolved(x_BLC, events, None if state is None else state[1])
        write = self.writes(x_BLC, events, q, k)
        o, recurrent = gated_delta_rule(
            write.q, write.k, v, write.log_decay, write.beta, None if state is None else state[0], events.lengths
        )
        o = F.rms_norm(o, (config.value_dim,), self.norm_weight.to(o.dtype), config.eps).flatten(2)
        return self.out(o * F.silu(self.gate(x_BLC))), None if conv is None else (recurrent, conv)

    def convolved(
        self, x_BLC: Tensor, events: Events, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k [B, L, H, K], v [B, L, H, V] and, where they are kept, the last inputs of the convolution."""
        config, lengths, kept = self.config, events.lengths, None
        inputs, past = self.qkv(x_BLC), config.conv_width - 1
        if before is None:
            mixed = causal_short_conv(inputs, self.conv_weight, lengths, activation="silu")
            if events.kept:
                kept = last_rows(F.pad(inputs, (0, 0, past, 0)), lengths, past)
        else:
            seen = torch.cat([before.to(inputs.dtype), inputs], dim=1)
            mixed = causal_short_conv(seen, self.conv_weight, lengths + past, activation="silu")[:, past:]
            kept = last_rows(seen, lengths, past)
        keys = config.num_heads * config.key_dim
        q, k, v = mixed.split([keys, keys, config.num_heads * config.value_dim], dim=-1)
        heads = (config.num_heads, -1)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads), kept

    def writes(self, x_BLC: Tensor, events: Events, q: Tensor, k: Tensor) -> Writes:
        """Return what the recurrence is run on: purified unit queries, unit keys, decays and write strengths."""
        config = self.config
        heads = (config.num_heads, -1)
        decay, write = widened(self.decay_and_write(x_BLC)).chunk(2, dim=-1)
        if events.time is not None:
            decay = decay + widened(self.time_to_decay(events.time))
            shift_q, shift_k = self.time_to_query_key(events.time).chunk(2, dim=-1)
            q, k = q + shift_q.unflatten(-1, heads), k + shift_k.unflatten(-1, heads)
        log_decay = -torch.exp(widened(self.decay_rate)) * F.softplus(decay)
        beta = torch.sigmoid(write)
        dtype, q, k = k.dtype, unit(q), unit(k)
        if events.memory is not None and (config.write_purification or config.read_purification):
            memory_key = unit(self.memory_key(events.memory).unflatten(-1, heads))
            if config.write_purification:
                both = torch.cat([x_BLC, events.memory.to(x_BLC.dtype)], dim=-1)
                covered = torch.sigmoid(widened(self.coverage(both))) * F.relu((k * memory_key).sum(-1))
                beta = beta * (1 - covered)
            if config.read_purification:
                strength = torch.sigmoid(widened(self.alignment(x_BLC))).unsqueeze(-1)
                q = q - strength * (memory_key * q).sum(-1, keepdim=True) * memory_key
        return Writes(q.to(dtype), k.to(dtype), log_decay, beta)


class Writes(NamedTuple):
    """What one recurrence is run on besides the values: q, k [B, L, H, K], log_decay and beta float32 [B, L, H]."""

    q: Tensor
    k: Tensor
    log_decay: Tensor
    beta: Tensor


class LocalAttention(nn.Module):
    """Causal softmax attention to the last events and to their memories (P), with rotary positions (R).

    Keys and values of the memories are projections of its own, rotated like those of the events (R).
    """

    def __init__(self, config: SinkRecConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.num_heads * config.head_dim
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        if config.memory:
            self.memory_key_value = nn.Linear(config.memory_dim, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def forward(
        self, x_BLC: Tensor, events: Events, state: LayerState | None, known: Tensor
    ) -> tuple[Tensor, LayerState | None]:
        """Map [B, L, C] to the same; ``state`` holds the last W keys and values, of which ``known`` int [B] exist."""
        config = self.config
        heads = (-1, config.num_heads, config.head_dim)
        q, k, v = self.qkv(x_BLC).unflatten(-1, heads).unbind(2)
        keys, values = [k], [v]
        if events.memory is not None:
            for found, x in zip((keys, values), self.memory_key_value(events.memory).chunk(2, dim=-1), strict=True):
                found.append(x.unflatten(-1, heads[1:]).to(k.dtype))
        k, v = torch.stack(keys, dim=2), torch.stack(values, dim=2)
        q = rotate_tokens(q, events.positions, config.rotary_base)
        k = rotate_tokens(k, events.positions.unsqueeze(-1), config.rotary_base)
        if state is None:
            o = local_attention(q, k, v, config.window)
            if not events.kept:
                return self.out(o.flatten(2)), None
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 0, config.window, 0)) for x in (k, v))
        else:
            k, v = (torch.cat([before.to(x.dtype), x], dim=1) for before, x in zip(state, (k, v), strict=True))
            o = windowed_step(q, k, v, known, config.window)
        kept = tuple(last_rows(x, events.lengths, config.window) for x in (k, v))
        return self.out(o.flatten(2)), (kept[0], kept[1])


class Layer(nn.Module):
    """Pre-norm residual block: one mixer, one MLP; both branches are scaled by the loop (R)."""

    def __init__(self, config: SinkRecConfig, mixer: str) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mixer = TDGD(config) if mixer == "T" else LocalAttention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mlp = SwiGLU(config.d_model, config.mlp_width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BLC: Tensor, events: Events, state: LayerState | None, known: Tensor, scale_C: Tensor
    ) -> tuple[Tensor, LayerState | None]:
        """Map [B, L, C] to the same, and the state of the mixer to the next one."""
        normed = self.mixer_norm(x_BLC)
        if isinstance(self.mixer, TDGD):
            y_BLC, state = self.mixer(normed, events, state)
        else:
            y_BLC, state = self.mixer(normed, events, state, known)
        x_BLC = x_BLC + self.dropout(y_BLC) * scale_C
        return x_BLC + self.dropout(self.mlp(self.mlp_norm(x_BLC))) * scale_C, state


def unit(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) along the last dimension, in float32 or wider."""
    x = widened(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or float64 if it is."""
    return x.to(accumulation_dtype(x.dtype))


def last_rows(x: Tensor, lengths: Tensor, number: int) -> Tensor:
    """Return the rows before position ``number + lengths`` of [B, number + L, ...]: the last ``number`` valid ones.

    The first ``number`` rows are those of before, ``lengths`` int32 [B] counts the valid ones among the rest.
    """
    places = lengths.long().unsqueeze(-1) + torch.arange(number, device=x.device)
    shape = (*places.shape, *x.shape[2:])
    return x.gather(1, places.view(*places.shape, *(1 for _ in x.shape[2:])).expand(shape))
