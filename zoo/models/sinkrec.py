"""SinkRec: next-item retrieval from very long histories with a recurrent memory kept clean (arXiv 2606.09888).

A causal model over items and their times. Windows of the history are quantised to codes, whose sum, the conditional
memory, says what has been seen before; the gated delta rule writes and reads only what that memory does not cover. (P)
marks what the paper states, (R) our reading where it is silent.

Shape suffixes: B batch, L length, C d_model, M memory width, H heads, K key width, V value width, S keys a position, W
window, N layers that hold a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.kernels import causal_short_conv, gated_delta_rule
from zoo.kernels.ragged import accumulation_dtype, valid_positions
from zoo.layers import ResidualQuantizer, SwiGLU, local_attention, rotate_tokens, windowed_step
from zoo.models.fields import check_one_or_more, check_types, overridden
from zoo.models.parts import Part
from zoo.signature import BATCH, BEFORE, LENGTH, Signature, TensorSpec

CODES = "codes"
"""The output of a part that holds memory codes."""

WINDOW_WIDTH = 4
DILATIONS = (1, 4)
REACH = (WINDOW_WIDTH - 1) * max(DILATIONS)
"""Events before the present one that a memory window sees."""

LATEST = 2**40
"""Seconds that a time stays below: 34,000 years."""

MOST_EVENTS = 2**17
"""Events of a history: rotary angles stay exact enough in float32."""

NO_TARGET = -100
"""Stands where no event follows."""


@dataclass(frozen=True)
class SinkRecConfig:
    """Sizes and switches of one SinkRec model.

    Attributes:
        num_items: items of the catalogue, numbered from 0.
        d_model: model width.
        num_heads: heads, of the recurrence and of attention.
        key_dim: width K of a key and query of the recurrence.
        value_dim: width V of a value of the recurrence.
        head_dim: width of an attention head.
        group: mixers of the hybrid group in order, T recurrence (TDGD) and A attention (R: TTTA).
        num_loops: how often the same group runs (P: shared, R: 2).
        mlp_width: hidden width of the SwiGLU blocks.
        window: last positions that attention sees (R: 256).
        whole_history: training makes ``window`` the recipe's max_length, whatever it is here, so that attention sees
            all that the model is trained and ranked on. It changes nothing else.
        memory: the conditional memory; without it neither purification nor memory pairs nor re-injection exist.
        memory_dim: width M of the memory.
        memory_levels: levels R of the residual quantiser (R: 3).
        codebook_size: codes a level (R: 256).
        write_purification: suppress writes that the memory covers.
        read_purification: remove what is along the memory from queries.
        time: decay and addressing depend on the time since the event before.
        time_features: sines and cosines of that time (R: 16).
        conv_width: taps of the short convolution of q, k and v (R: 4).
        temperature: of the cosine between user and item.
        sampled_negatives: items a batch that the softmax is taken over besides the targets; 0 for all items.
        negatives_power: these are drawn by how often an item was a target so far, plus 1, to this power; 0: uniformly.
        commitment_weight: of the quantiser's commitment loss.
        reconstruction_weight: of the loss of the windows' reconstruction from the memory.
        codebook_decay: of the codebooks' moving averages.
        dead_below: a code chosen less often than this on (moving) average a batch is drawn anew.
        rotary_base: wavelength base of rotary positions in attention.
        dropout: after the embedding and in every residual branch, in training only.
        eps: of every RMSNorm.
    """

    d_model: int
    num_heads: int
    key_dim: int
    value_dim: int
    head_dim: int
    mlp_width: int
    memory_dim: int
    num_items: int = 1
    group: str = "TTTA"
    num_loops: int = 2
    window: int = 256
    whole_history: bool = False
    memory: bool = True
    memory_levels: int = 3
    codebook_size: int = 256
    write_purification: bool = True
    read_purification: bool = True
    time: bool = True
    time_features: int = 16
    conv_width: int = 4
    temperature: float = 0.05
    sampled_negatives: int = 0
    negatives_power: float = 0.75
    commitment_weight: float = 0.25
    reconstruction_weight: float = 0.1
    codebook_decay: float = 0.95
    dead_below: float = 1.0
    rotary_base: float = 10_000.0
    dropout: float = 0.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        if not self.group or set(self.group) - {"T", "A"}:
            raise ConfigError(f"group is {self.group!r}; write one letter a layer, T (recurrence) or A (attention)")
        check_one_or_more(self, _POSITIVE)
        for name in ("head_dim", "time_features"):
            if getattr(self, name) % 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be even")
        for name in (
            "sampled_negatives",
            "negatives_power",
            "commitment_weight",
            "reconstruction_weight",
            "dead_below",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("temperature", "eps", "codebook_decay"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and below 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be in [0, 1)")

    @property
    def shown(self) -> int:
        """Keys that each position shows to attention: its own, and that of its memory."""
        return 2 if self.memory else 1

    @property
    def mixers(self) -> str:
        """One letter a layer that runs, loops counted: T recurrence, A attention."""
        return self.group * self.num_loops

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: q, k and v of all heads."""
        return self.num_heads * (2 * self.key_dim + self.value_dim)

    def layers(self, letter: str) -> int:
        """Return how many layers of a kind hold a state, every loop counted."""
        return self.mixers.count(letter)

    def with_overrides(self, **overrides: Any) -> SinkRecConfig:
        """Return a copy with some fields changed; an unknown field raises ConfigError."""
        return overridden("SinkRec", self, overrides)


_POSITIVE = (
    "d_model",
    "num_heads",
    "key_dim",
    "value_dim",
    "head_dim",
    "mlp_width",
    "memory_dim",
    "num_items",
    "num_loops",
    "window",
    "memory_levels",
    "codebook_size",
    "time_features",
    "conv_width",
    "rotary_base",
)

_BASE = SinkRecConfig(
    d_model=512, num_heads=8, key_dim=64, value_dim=64, head_dim=64, mlp_width=1408, memory_dim=256,
)  # fmt: skip

PRESETS = {
    # Ours. The same model trained on histories of up to 32,768 and 4,096 events: the recipes differ.
    "sinkrec-long": _BASE,
    "sinkrec-base": _BASE,
    # Ours, for MovieLens-1M.
    "sinkrec-ml1m": SinkRecConfig(
        d_model=256, num_heads=4, key_dim=64, value_dim=64, head_dim=64, mlp_width=704, memory_dim=128, dropout=0.2,
    ),
    # Ours, for tests and the demo.
    "sinkrec-tiny": SinkRecConfig(
        d_model=64, num_heads=2, key_dim=32, value_dim=32, head_dim=32, mlp_width=128, memory_dim=32, group="TA",
        window=32, codebook_size=64, dropout=0.1,
    ),
}  # fmt: skip

TWINS: dict[str, dict[str, Any]] = {
    "no-memory": {"memory": False},
    "no-write-purification": {"write_purification": False},
    "no-read-purification": {"read_purification": False},
    "no-time": {"time": False},
    "no-loop": {"num_loops": 1},
    "no-attention": {"group": "T"},
    "plain-gated-deltanet": {"memory": False, "time": False},
    "sasrec": {"memory": False, "time": False, "group": "AAAAAAAA", "num_loops": 1, "whole_history": True},
}
"""The ablations, and the baseline: each is a preset with these fields changed.

``plain-gated-deltanet`` has nothing but the plain gated delta rule and local attention.

``sasrec`` is causal softmax attention over the whole history (SASRec, arXiv 1808.09781) in our blocks: same widths,
head, loss and recipe, no recurrence, memory or time. It has as many layers as a preset runs, loops counted (8;
``sinkrec-tiny`` runs 4), each with weights of its own: equal in depth, with half as many weights again as the preset
has in its blocks, so doubt is in its favour. Three things are not those of the published model but ours on both sides:
rotary instead of learned positions, SwiGLU and RMSNorm instead of ReLU and LayerNorm, softmax over all items instead of
one drawn negative. Dropout is the preset's."""


class State(NamedTuple):
    """What a history leaves behind: a new event needs nothing else of it.

    Attributes:
        recurrent: float32 [N, B, H, K, V], of every recurrence.
        conv: [N, B, conv_width - 1, channels], the last inputs of every short convolution.
        keys: [N, B, W, S, H, D], the last keys of every attention, rotated; the latest last.
        values: [N, B, W, S, H, D].
        windows: [B, REACH, C], the last embeddings, which memory windows see.
        user: [B, C], the user vector; zeros before the first event.
        seen: int64 [B], events so far.
        last_time: int64 [B], seconds of the last event.
    """

    recurrent: Tensor
    conv: Tensor
    keys: Tensor
    values: Tensor
    windows: Tensor
    user: Tensor
    seen: Tensor
    last_time: Tensor


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


class Losses(NamedTuple):
    """Of a training batch.

    Attributes:
        next_item: float32 or wider [B, L - 1], cross-entropy of the item after each position; 0 where there is none.
        targets: how many of those there are, int64 scalar.
        commitment: float32 scalar.
        reconstruction: float32 scalar, mean over valid positions.
        total: float32 scalar, mean over targets, all three weighted.
    """

    next_item: Tensor
    targets: Tensor
    commitment: Tensor
    reconstruction: Tensor
    total: Tensor


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
        """Return x + sigmoid(W_g [x; m]) * W_m m."""
        gate = torch.sigmoid(self.gate(torch.cat([x_BLC, memory_BLM.to(x_BLC.dtype)], dim=-1)))
        return x_BLC + gate * self.inject(memory_BLM)

    def reconstruction_loss(self, memory: Memory, x_BLC: Tensor, before_BEC: Tensor, valid_BL: Tensor) -> Tensor:
        """Return 1 - cosine of what the memory says and the sum of its contiguous window, mean over valid positions."""
        length = x_BLC.shape[1]
        with torch.no_grad():
            seen = widened(self.norm(torch.cat([before_BEC, x_BLC], dim=1)))
            window = torch.stack([seen[:, REACH - n : REACH - n + length] for n in range(WINDOW_WIDTH)]).sum(0)
        told = widened(self.reconstruct(memory.vectors))
        loss = 1 - F.cosine_similarity(told, window, dim=-1)
        return (loss * valid_BL).sum() / valid_BL.sum().clamp(min=1)


class TDGD(nn.Module):
    """Temporal-aware state-relation differential gated delta net: the gated delta rule that the memory keeps clean."""

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
    """Causal softmax attention to the last events and to their memories (P), with rotary positions (R)."""

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


class SinkRec(nn.Module):
    """The whole model: item embedding, conditional memory, looped hybrid group, cosine head over the same embedding."""

    target_counts: Tensor

    def __init__(self, config: SinkRecConfig) -> None:
        super().__init__()
        self.config = config
        self.items = nn.Embedding(config.num_items, config.d_model)
        if config.memory:
            self.memory = MemoryEncoder(config)
        self.group = nn.ModuleList([Layer(config, mixer) for mixer in config.group])
        self.loop_scale = nn.Parameter(torch.empty(config.num_loops, config.d_model))
        self.norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)
        if config.sampled_negatives:
            self.register_buffer("target_counts", torch.zeros(config.num_items))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight anew (R): embeddings from N(0, 1), projections from N(0, 0.25 / fan-in), biases zero.

        Decays start as in Gated DeltaNet's public description: rates of 1 to 16, steps of 0.001 to 0.1.
        """
        # From the leaves up: a recurrence sets a bias of one of its projections, which is zeroed before.
        for module in reversed([*self.modules()]):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, MemoryEncoder):
                nn.init.normal_(module.taps, std=WINDOW_WIDTH**-0.5)
            elif isinstance(module, TDGD):
                nn.init.normal_(module.conv_weight, std=self.config.conv_width**-0.5)
                nn.init.ones_(module.norm_weight)
                module.decay_rate.uniform_(1, 16).log_()
                steps = torch.empty_like(module.decay_rate).uniform_(math.log(0.001), math.log(0.1)).exp_()
                module.decay_and_write.bias[: self.config.num_heads] = steps.expm1().log()
        nn.init.ones_(self.loop_scale)

    def initial_state(self, batch: int) -> State:
        """Return the state before the first event of ``batch`` rows."""
        return self._start(batch, layers=True)

    def _start(self, batch: int, *, layers: bool) -> State:
        """Return zeros, with the states of ``layers`` or without: a history read from its start needs none."""
        config = self.config
        x, wide = self.items.weight, accumulation_dtype(self.items.weight.dtype)
        recurrences, attentions = (config.layers("T"), config.layers("A")) if layers else (0, 0)
        window = (attentions, batch, config.window, config.shown, config.num_heads, config.head_dim)
        states = (recurrences, batch, config.num_heads, config.key_dim, config.value_dim)
        return State(
            recurrent=x.new_zeros(states, dtype=wide),
            conv=x.new_zeros(recurrences, batch, config.conv_width - 1, config.conv_channels),
            keys=x.new_zeros(window),
            values=x.new_zeros(window),
            windows=x.new_zeros(batch, REACH, config.d_model),
            user=x.new_zeros(batch, config.d_model),
            seen=x.new_zeros(batch, dtype=torch.int64),
            last_time=x.new_zeros(batch, dtype=torch.int64),
        )

    def prefill(self, items: Tensor, times: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """Read whole histories.

        Args:
            items: int64 [B, L] in [0, num_items), oldest first, right-padded; padding may hold anything.
            times: int64 [B, L], seconds; where they go back, no time has passed.
            lengths: int32 [B], clamped to [0, L]. A row of length 0 is an empty history.

        Returns:
            User vectors [B, C] of length 1, zeros of an empty history, and the state after the last event.
        """
        state = self.read(items, times, lengths, None).state()
        return state.user, state

    def users(self, items: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        """Return the user vectors [B, C] of ``prefill`` without the state, for ranking many users; same arguments."""
        read = self.read(items, times, lengths, None, kept=False)
        return last_rows(F.pad(read.users, (0, 0, 1, 0)), read.events.lengths, 1).squeeze(1)

    def step(self, items: Tensor, times: Tensor, lengths: Tensor, state: State) -> tuple[Tensor, State]:
        """Read T new events a row after what ``state`` has seen; arguments and result as those of ``prefill``.

        The cost does not depend on how much that was. ``prefill`` of a history is the same as ``prefill`` of its start
        and ``step`` of the rest, wherever it is split.
        """
        state = self.read(items, times, lengths, state).state()
        return state.user, state

    def score(self, user: Tensor) -> Tensor:
        """Return the score of every item [B, num_items] for user vectors [B, C]: cosine over temperature."""
        return user @ unit(self.items.weight).to(user.dtype).mT / self.config.temperature

    def forward(self, items: Tensor, times: Tensor, lengths: Tensor) -> Losses:
        """Return the losses of predicting each event of a history from those before it; arguments as of ``prefill``.

        Nothing is computed that only later events would need, and nothing here waits for a GPU.
        """
        read = self.read(items, times, lengths, None, kept=False)
        following = valid_positions(lengths - 1, items.shape[1])[:, :-1]
        targets = items[:, 1:].masked_fill(~following, NO_TARGET)
        next_item = self._cross_entropy(read.users[:, :-1].flatten(0, 1), targets.flatten()).view(following.shape)
        total = next_item.sum() / following.sum().clamp(min=1)
        commitment = reconstruction = total.new_zeros(())
        if read.memory is not None:
            commitment = read.memory.commitment
            reconstruction = self.memory.reconstruction_loss(read.memory, read.embedded, read.windows, read.valid)
            total = total + self.config.commitment_weight * commitment
            total = total + self.config.reconstruction_weight * reconstruction
        return Losses(next_item, following.sum(), commitment, reconstruction, total)

    def _cross_entropy(self, users: Tensor, targets: Tensor) -> Tensor:
        """Return -log softmax of the targets [T], over all items or over those of the batch and sampled ones.

        Losses of ``NO_TARGET`` are 0. In float32 under autocast too: bfloat16 would round a logit, a cosine over the
        temperature, by up to 0.04 where the temperature is 0.05.
        """
        config = self.config
        with torch.autocast(users.device.type, enabled=False):
            users, table = widened(users), unit(self.items.weight)
            if not config.sampled_negatives:
                logits = users @ table.mT / config.temperature
                return F.cross_entropy(logits, targets, reduction="none", ignore_index=NO_TARGET)
            # Sampled softmax with the log-Q correction (Bengio and Senecal 2008); what was seen is the proposal.
            drawn, expected = self._negatives(targets)
            right = (users * table[targets.clamp(min=0)]).sum(-1, keepdim=True) / config.temperature
            wrong = users @ table[drawn].mT / config.temperature - expected.log()
            wrong = wrong.masked_fill(drawn == targets.unsqueeze(-1), -torch.inf)
            places = targets.masked_fill(targets != NO_TARGET, 0)
            logits = torch.cat([right, wrong], dim=1)
            return F.cross_entropy(logits, places, reduction="none", ignore_index=NO_TARGET)

    @torch.no_grad()
    def _negatives(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Draw items [n], with how often each is expected among them; in training count the targets."""
        config = self.config
        if self.training:
            there = (targets != NO_TARGET).to(self.target_counts.dtype)
            self.target_counts.index_add_(0, targets.clamp(min=0), there)
        share = (self.target_counts.double() + 1) ** config.negatives_power
        ends = share.cumsum(0)
        points = torch.rand(config.sampled_negatives, dtype=ends.dtype, device=ends.device) * ends[-1]
        drawn = torch.searchsorted(ends, points).clamp(max=config.num_items - 1)
        return drawn, (config.sampled_negatives * share[drawn] / ends[-1]).float()

    def codes(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Return the memory codes int64 [B, L, R] of histories; what stands at padding means nothing."""
        valid = valid_positions(lengths, items.shape[1])
        embedded = self.embed(items, valid)
        before = embedded.new_zeros(embedded.shape[0], REACH, embedded.shape[2])
        return self.memory(embedded, before, valid).codes

    def parts(self) -> tuple[Part, ...]:
        """Return what is exported: ``prefill``, and ``step`` of one event a row.

        Both also give the memory codes of their events where there is a memory.
        """
        config = self.config
        state = _state_specs(config)

        def outputs(length: int | str) -> tuple[TensorSpec, ...]:
            codes = TensorSpec(
                CODES, "int64", (BATCH, length, config.memory_levels), "memory codes", config.codebook_size
            )
            return (*state.values(), codes) if config.memory else tuple(state.values())

        def events(length: int | str) -> tuple[TensorSpec, ...]:
            most = LENGTH if isinstance(length, str) else length + 1
            return (
                TensorSpec("items", "int64", (BATCH, length), "events, oldest first, right-padded", config.num_items),
                TensorSpec("times", "int64", (BATCH, length), "their seconds", LATEST),
                TensorSpec("lengths", "int32", (BATCH,), "valid events of each row", most),
            )

        inputs = [replace(spec, name=name + BEFORE) for name, spec in state.items()]
        prefill = Signature(events(LENGTH), outputs(LENGTH))
        step = Signature((*events(1), *inputs), outputs(1))
        return Part("prefill", _Prefill(self), prefill), Part("step", _Step(self), step)

    def embed(self, items: Tensor, valid: Tensor) -> Tensor:
        """Return the items' embeddings [B, L, C], zero at padding."""
        return self.items(items.masked_fill(~valid, 0)) * valid.unsqueeze(-1)

    def read(self, items: Tensor, times: Tensor, lengths: Tensor, state: State | None, *, kept: bool = True) -> Read:
        """Read events after ``state``; ``kept`` says whether what they leave behind is computed."""
        config = self.config
        valid = valid_positions(lengths, items.shape[1])
        lengths = valid.sum(-1, dtype=torch.int32)
        embedded = self.embed(items, valid)
        start = self._start(items.shape[0], layers=False) if state is None else state
        windows = start.windows.to(embedded.dtype)
        x_BLC, memory = self.dropout(embedded), None
        if config.memory:
            memory = self.memory(embedded, windows, valid)
            x_BLC = self.memory.reinject(x_BLC, memory.vectors)
        events = Events(
            lengths,
            start.seen.unsqueeze(-1) + torch.arange(items.shape[1], device=items.device),
            self._time_features(times, valid, start) if config.time else None,
            None if memory is None else memory.vectors,
            kept,
        )
        known = start.seen.clamp(max=config.window)
        before = {"T": (start.recurrent, start.conv), "A": (start.keys, start.values)}
        after: dict[str, list[LayerState]] = {letter: [] for letter in before}
        for scale_C in self.loop_scale.unbind(0):
            for layer, letter in zip(self.group, config.group, strict=True):
                index = len(after[letter])
                own = None if state is None else (before[letter][0][index], before[letter][1][index])
                x_BLC, left = layer(x_BLC, events, own, known, scale_C)
                if left is not None:
                    after[letter].append(left)
        users = unit(self.norm(x_BLC)).to(x_BLC.dtype)
        return Read(users, memory, embedded, valid, events, times, start, windows, after)

    def _time_features(self, times: Tensor, valid: Tensor, start: State) -> Tensor:
        """Return sines and cosines [B, L, F] of log(1 + seconds since the event before), 0 for the first."""
        dtype = self.items.weight.dtype
        first = torch.where(start.seen > 0, start.last_time, times[:, 0]) if times.shape[1] else start.last_time
        passed = times - torch.cat([first.unsqueeze(1), times], dim=1)[:, : times.shape[1]]
        passed = passed.clamp(min=0).masked_fill(~valid, 0)
        y = torch.log1p(passed.to(accumulation_dtype(dtype)))
        half = self.config.time_features // 2
        # Up to 2 a unit of log time (at 16 features), which tells 1 hour from 2: more would magnify the rounding of y,
        # which reaches 27, and ONNX Runtime rounds logarithms worse than PyTorch.
        frequencies = 2.0 ** torch.arange(2 - half, 2, dtype=y.dtype, device=y.device)
        angles = y.unsqueeze(-1) * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def _state_specs(config: SinkRecConfig) -> dict[str, TensorSpec]:
    """Return the tensors of a state by name; of layers that a model does not have they are empty."""
    recurrences, attentions, heads = config.layers("T"), config.layers("A"), config.num_heads
    window = (attentions, BATCH, config.window, config.shown, heads, config.head_dim)
    specs = {
        "recurrent": ("fp32", (recurrences, BATCH, heads, config.key_dim, config.value_dim), "states of recurrences"),
        "conv": ("float", (recurrences, BATCH, config.conv_width - 1, config.conv_channels), "inputs of convolutions"),
        "keys": ("float", window, "last keys of attention"),
        "values": ("float", window, "last values of attention"),
        "windows": ("float", (BATCH, REACH, config.d_model), "last embeddings"),
        "user": ("float", (BATCH, config.d_model), "user vector"),
        "seen": ("int64", (BATCH,), "events so far"),
        "last_time": ("int64", (BATCH,), "seconds of the last event"),
    }  # fmt: skip
    limits = {"seen": MOST_EVENTS, "last_time": LATEST}
    return {
        name: TensorSpec(name, dtype, shape, meaning, limits.get(name))
        for name, (dtype, shape, meaning) in specs.items()
    }


class _Prefill(nn.Module):
    def __init__(self, model: SinkRec) -> None:
        super().__init__()
        self.model = model

    def forward(self, items: Tensor, times: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return self.model.read(items, times, lengths, None).outputs()


class _Step(nn.Module):
    def __init__(self, model: SinkRec) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        items: Tensor,
        times: Tensor,
        lengths: Tensor,
        recurrent: Tensor,
        conv: Tensor,
        keys: Tensor,
        values: Tensor,
        windows: Tensor,
        user: Tensor,
        seen: Tensor,
        last_time: Tensor,
    ) -> tuple[Tensor, ...]:
        before = State(recurrent, conv, keys, values, windows, user, seen, last_time)
        return self.model.read(items, times, lengths, before).outputs()


class Read(NamedTuple):
    """What reading a piece of history gave; ``windows`` are the embeddings before it, ``after`` what layers left."""

    users: Tensor
    memory: Memory | None
    embedded: Tensor
    valid: Tensor
    events: Events
    times: Tensor
    start: State
    windows: Tensor
    after: dict[str, list[LayerState]]

    def outputs(self) -> tuple[Tensor, ...]:
        """Return what a part gives: the state, and with a memory its codes int64 [B, L, R]."""
        return (*self.state(), *(() if self.memory is None else (self.memory.codes,)))

    def state(self) -> State:
        """Return the state after the last event of each row."""
        start, lengths, users = self.start, self.events.lengths, self.users
        before = {"T": (start.recurrent, start.conv), "A": (start.keys, start.values)}
        (recurrent, conv), (keys, values) = (
            [torch.stack(x) for x in zip(*self.after[letter], strict=True)] if self.after[letter] else before[letter]
            for letter in before
        )
        return State(
            recurrent,
            conv,
            keys,
            values,
            windows=last_rows(torch.cat([self.windows, self.embedded], dim=1), lengths, REACH),
            user=last_rows(torch.cat([start.user.unsqueeze(1).to(users.dtype), users], dim=1), lengths, 1).squeeze(1),
            seen=start.seen + lengths,
            last_time=last_rows(torch.cat([start.last_time.unsqueeze(1), self.times], dim=1), lengths, 1).squeeze(1),
        )


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
