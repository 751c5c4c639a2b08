"""How a preset is trained: one frozen dataclass, one recipe a preset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zoo.errors import ConfigError


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the losses of a run, apart from the model, the data and the seed.

    Attributes:
        steps: optimiser steps.
        batch_size: histories a step.
        max_length: newest events of a history that the encoder reads.
        targets_per_history: how many of the events that follow a history are decoded from it, each on its own. More
            than 1 makes each encoder pass teach more; the paper's setting is 1.
        held_out: newest events of each user that are not trained on. 2: one for validation, one for the test. 1 trains
            on the validation event too, as the published HSTU code does; nothing can be chosen by it then, and
            ``eval_every`` must be 0.
        peak_lr: highest learning rate.
        start_lr: learning rate of the first step (P: 1e-5).
        warmup_steps: linear rise from start_lr to peak_lr (P: 3000).
        final_lr_ratio: the rate falls linearly to this share of the peak at the last step (P: 0.1).
        weight_decay: decoupled, on matrices of projections only.
        betas: of AdamW.
        grad_clip: largest gradient norm.
        weight_average: decay of the exponential moving average of the weights that is validated and kept; 0 for none.
        eval_every: steps between validations; the weights of the best one are kept. 0 for none.
        eval_users: users of a validation, the same ones each time.
        checkpoint_every: steps between checkpoints.
        micro_batch_tokens: a batch with more tokens, padding included, is computed in pieces whose gradients add up; it
            bounds memory and changes nothing but rounding and what is drawn (dropout, sampled items). SinkRec's
            codebooks learn from each piece on its own. 0 for always in one piece.
        precision: ``auto`` (bf16 autocast on a GPU, fp32 on a CPU), ``fp32`` or ``bf16``.
    """

    steps: int
    batch_size: int
    max_length: int
    peak_lr: float
    targets_per_history: int = 1
    held_out: int = 2
    start_lr: float = 1e-5
    warmup_steps: int = 3000
    final_lr_ratio: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    grad_clip: float = 1.0
    weight_average: float = 0.0
    eval_every: int = 0
    eval_users: int = 2000
    checkpoint_every: int = 500
    micro_batch_tokens: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        for fields, (kind, wanted, holds) in _RULES.items():
            for name in fields:
                value = getattr(self, name)
                if not (isinstance(value, kind) and not isinstance(value, bool) and holds(value)):
                    raise ConfigError(f"{name} is {value!r}; it must be {wanted}")
        is_pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        if not (is_pair and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in self.betas)):
            raise ConfigError(f"betas is {self.betas!r}; it must be two numbers in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"precision is {self.precision!r}; choose auto, fp32 or bf16")
        if self.held_out == 1 and self.eval_every:
            raise ConfigError(
                f"eval_every is {self.eval_every} and held_out 1: validation would be on events that are trained on; "
                "set eval_every to 0, or held_out to 2"
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, 0 being the first (P: linear up, then linear down).

        A run shorter than four warm-ups warms up for a quarter of its steps.
        """
        warmup = min(self.warmup_steps, self.steps // 4)
        if step < warmup:
            return self.start_lr + (self.peak_lr - self.start_lr) * step / warmup
        fallen = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.peak_lr * (1 - (1 - self.final_lr_ratio) * min(1.0, fallen))


_Rule = tuple[Any, str, Callable[[Any], bool]]
_RULES: dict[tuple[str, ...], _Rule] = {
    ("steps", "batch_size", "max_length", "targets_per_history", "checkpoint_every", "eval_users"): (
        int, "a whole number, 1 or more", lambda value: value >= 1,
    ),
    ("warmup_steps", "eval_every", "micro_batch_tokens"): (int, "a whole number, 0 or more", lambda value: value >= 0),
    ("peak_lr", "start_lr", "grad_clip"): ((int, float), "a finite number above 0", lambda value: 0 < value < math.inf),
    ("weight_decay",): ((int, float), "a finite number, 0 or more", lambda value: 0 <= value < math.inf),
    ("held_out",): (int, "1 or 2", lambda value: value in (1, 2)),
    ("final_lr_ratio",): ((int, float), "a number in [0, 1]", lambda value: 0 <= value <= 1),
    ("weight_average",): ((int, float), "a number in [0, 1)", lambda value: 0 <= value < 1),
}  # fmt: skip
"""Fields -> their type, what they must be in words, and the test of it."""

RECIPES = {
    # (P) peak 5e-4; steps and batch are ours.
    "gbla-yandex": TrainConfig(
        steps=100_000, batch_size=64, max_length=2048, peak_lr=5e-4, eval_every=5000, checkpoint_every=1000
    ),
    # (P) Adam 5e-4, weight decay 1e-6, batch 256.
    "gbla-grid": TrainConfig(
        steps=30_000, batch_size=256, max_length=256, peak_lr=5e-4, weight_decay=1e-6, eval_every=2000
    ),
    "gbla-ml1m": TrainConfig(
        steps=10_000, batch_size=128, max_length=2048, peak_lr=1e-3, targets_per_history=8, warmup_steps=1000,
        eval_every=1000, eval_users=1000,
    ),
    # Two CPU cores, under three minutes. The newest 20 events say most about the next one in this data: see docs.
    "gbla-tiny": TrainConfig(
        steps=2200, batch_size=128, max_length=20, peak_lr=5e-3, targets_per_history=2, warmup_steps=200,
        weight_decay=0.1, weight_average=0.99, eval_every=550, checkpoint_every=200,
    ),
    "sinkrec-long": TrainConfig(
        steps=100_000, batch_size=8, max_length=32_768, peak_lr=1e-3, eval_every=5000, checkpoint_every=1000,
        micro_batch_tokens=2**17,
    ),
    "sinkrec-base": TrainConfig(
        steps=100_000, batch_size=64, max_length=4096, peak_lr=1e-3, eval_every=5000, checkpoint_every=1000,
        micro_batch_tokens=2**17,
    ),
    # Length, batch, rate and (in the model) dropout and temperature are those of the published HSTU on this data; 68
    # steps are an epoch. Softmax over all items, averaged weights and a falling rate are ours. Not yet run on a GPU.
    "sinkrec-ml1m": TrainConfig(
        steps=5000, batch_size=128, max_length=200, peak_lr=1e-3, warmup_steps=250, final_lr_ratio=0.01,
        weight_decay=0.1, weight_average=0.999, eval_every=250, eval_users=6040, checkpoint_every=2500,
    ),
    # Two CPU cores, about three minutes.
    "sinkrec-tiny": TrainConfig(
        steps=1000, batch_size=32, max_length=50, peak_lr=5e-3, warmup_steps=50, weight_decay=0.1, weight_average=0.99,
        eval_every=250, checkpoint_every=200,
    ),
}  # fmt: skip

_TWIN_PEAK_LR = {("gbla-yandex", "all-softmax"): 7e-4}
"""(P) The paper tunes the rate of the industrial all-softmax twin on its own."""


def recipe(preset: str, *, twin: str | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the recipe of a preset or twin with some fields changed.

    Raises:
        ConfigError: no recipe for the preset, or no such field.
    """
    if preset not in RECIPES:
        raise ConfigError(f"there is no recipe for {preset!r}; there is one for {', '.join(RECIPES)}")
    config = RECIPES[preset]
    if (preset, twin) in _TWIN_PEAK_LR:
        config = replace(config, peak_lr=_TWIN_PEAK_LR[preset, twin or ""])
    unknown = sorted(set(overrides or {}) - set(TrainConfig.__dataclass_fields__))
    if unknown:
        fields = ", ".join(TrainConfig.__dataclass_fields__)
        raise ConfigError(f"the training recipe has no field {unknown[0]!r}; its fields are {fields}")
    return replace(config, **(overrides or {}))
