"""Sizes and switches of SinkRec: configurations, presets, and the twins that they are compared with.

(P) marks what the paper states, (R) our reading where it is silent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zoo.errors import ConfigError
from zoo.models.fields import check_one_or_more, check_types, overridden


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
        if self.conv_width < 2:
            raise ConfigError(f"conv_width is {self.conv_width}; use 2 or more, one tap leaves no state to export")
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

    def twin(self, name: str) -> SinkRecConfig:
        """Return a comparison model of this one, a name of ``TWINS``."""
        groups = {SASREC: "A" * len(self.mixers), NO_ATTENTION: self.group.replace("A", "")}
        group = {"group": groups[name]} if name in groups else {}
        return self.with_overrides(**TWINS[name], **group)


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

NO_ATTENTION, SASREC = "no-attention", "sasrec"
TWINS: dict[str, dict[str, Any]] = {
    "no-memory": {"memory": False},
    "no-write-purification": {"write_purification": False},
    "no-read-purification": {"read_purification": False},
    "no-time": {"time": False},
    "no-loop": {"num_loops": 1},
    NO_ATTENTION: {},
    "plain-gated-deltanet": {"memory": False, "time": False},
    SASREC: {"memory": False, "time": False, "num_loops": 1, "whole_history": True},
}
"""The ablations, and the baseline: each is a preset with these fields changed.

``no-attention`` keeps the recurrences of the preset's group and nothing stands for its attention.

``plain-gated-deltanet`` has nothing but the plain gated delta rule and local attention.

``sasrec`` is causal softmax attention over the whole history (SASRec, arXiv 1808.09781) in our blocks: same widths,
head, loss and recipe, no recurrence, memory or time. It has as many layers as the preset runs, loops counted, each with
weights of its own: equal in depth, with half as many weights again as the preset has in its blocks, so doubt is in its
favour. Three things are not those of the published model but ours on both sides:
rotary instead of learned positions, SwiGLU and RMSNorm instead of ReLU and LayerNorm, softmax over all items instead of
one drawn negative. Dropout is the preset's."""
