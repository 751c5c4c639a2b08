"""SinkRec: next-item retrieval from very long histories with a recurrent memory kept clean (arXiv 2606.09888).

A causal model over items and their times. Windows of the history are quantised to codes, whose sum, the conditional
memory, says what has been seen before; the gated delta rule writes and reads only what that memory does not cover. (P)
marks what the paper states, (R) our reading where it is silent.

Shape suffixes: B batch, L length, C d_model, M memory width, H heads, K key width, V value width, S keys a position, W
window, N layers that hold a state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.kernels.ragged import accumulation_dtype, valid_positions
from zoo.models.parts import Part
from zoo.models.sinkrec_config import SinkRecConfig
from zoo.models.sinkrec_layers import (
    REACH,
    TDGD,
    WINDOW_WIDTH,
    Events,
    Layer,
    LayerState,
    Memory,
    MemoryEncoder,
    last_rows,
    unit,
    widened,
)
from zoo.signature import BATCH, BEFORE, LENGTH, Signature, TensorSpec

CODES = "codes"
"""The output of a part that holds memory codes."""
LATEST = 2**40
"""Seconds that a time stays below: 34,000 years."""

MOST_EVENTS = 2**17
"""Events of a history: rotary angles stay exact enough in float32."""

NO_TARGET = -100
"""Stands where no event follows."""


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

    def of_layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by letter of ``group`` what its layers hold, [N, ...] each."""
        return {"T": (self.recurrent, self.conv), "A": (self.keys, self.values)}


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
        before = start.of_layers()
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
        before = start.of_layers()
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
