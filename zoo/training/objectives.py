"""What a model is trained on and ranked by: the part of training and evaluation that differs from model to model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from zoo.data import Dataset
from zoo.errors import ConfigError
from zoo.models.gbla import GBLAConfig
from zoo.models.presets import Config
from zoo.models.sinkrec_config import SinkRecConfig
from zoo.training.batches import SequenceBatches, TrainingBatches
from zoo.training.config import TrainConfig
from zoo.training.ranking import rank_users, rank_users_by_score

SplitName = Literal["valid", "test"]


class Batch(Protocol):
    """A training batch, whatever it holds."""

    lengths: Tensor

    @property
    def targets(self) -> float:
        """How many targets it has."""

    def to(self, device: Any) -> Any:
        """Return it on another device."""

    def pieces(self, tokens: int) -> Iterator[Any]:
        """Yield parts of at most ``tokens`` tokens."""


class Objective(Protocol):
    """How one model learns from a dataset."""

    steps_per_epoch: int
    unit: str

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield batches without end, the first being that of ``step``."""

    def loss(self, model: Any, batch: Any, targets: float) -> Tensor:
        """Return the batch's share of a mean loss over ``targets`` targets."""

    def rank(self, model: Any, users: np.ndarray, split: SplitName, most: int) -> np.ndarray:
        """Return the ``most`` best items of each user, int64 [U, most], -1 where there is none."""

    def health(self, model: Any) -> dict[str, float]:
        """Return what else is worth a column in the log."""


class SemanticIdObjective:
    """GBLA: write the semantic ID of the next item; rank by constrained beam search."""

    unit = "nats per semantic ID"

    def __init__(self, dataset: Dataset, plan: TrainConfig, seed: int) -> None:
        self.dataset, self.plan = dataset, plan
        self._batches = TrainingBatches(
            dataset,
            batch_size=plan.batch_size,
            max_length=plan.max_length,
            targets_per_history=plan.targets_per_history,
            held_out=plan.held_out,
            seed=seed,
        )
        self.steps_per_epoch = self._batches.steps_per_epoch

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield batches without end, the first being that of ``step``."""
        return self._batches.from_step(step)

    def loss(self, model: Any, batch: Any, targets: float) -> Tensor:
        """Return the sum of the targets' losses over ``targets``."""
        losses_BK: Tensor = model(batch.item_ids, batch.lengths, batch.target_codes)
        return (losses_BK * batch.weights).sum() / targets

    def rank(self, model: Any, users: np.ndarray, split: SplitName, most: int) -> np.ndarray:
        """Rank with as many beams as places."""
        found, _ = rank_users(
            model, self.dataset, users, split, max_length=self.plan.max_length, beams=most, batch_size=128,
            count_illegal=False,
        )  # fmt: skip
        return found

    def health(self, model: Any) -> dict[str, float]:
        """Nothing."""
        return {}


class NextItemObjective:
    """SinkRec: predict every event of a history from those before it; rank by score."""

    unit = "nats per item"

    def __init__(self, dataset: Dataset, plan: TrainConfig, seed: int) -> None:
        self.dataset, self.plan = dataset, plan
        self._batches = SequenceBatches(
            dataset, batch_size=plan.batch_size, max_length=plan.max_length, held_out=plan.held_out, seed=seed
        )
        self.steps_per_epoch = self._batches.steps_per_epoch

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield batches without end, the first being that of ``step``."""
        return self._batches.from_step(step)

    def loss(self, model: Any, batch: Any, targets: float) -> Tensor:
        """Return the mean loss of the batch, its other losses included, by its share of the targets."""
        losses = model(batch.items, batch.times, batch.lengths)
        total: Tensor = losses.total * (losses.targets / targets)
        return total

    def rank(self, model: Any, users: np.ndarray, split: SplitName, most: int) -> np.ndarray:
        """Rank the whole catalogue by score."""
        batch_size = 1024 if model.items.weight.is_cuda else 128
        return rank_users_by_score(
            model, self.dataset, users, split, max_length=self.plan.max_length, most=most, batch_size=batch_size
        )

    def health(self, model: Any) -> dict[str, float]:
        """Return what ``ResidualQuantizer.health`` says of the memory's codebooks."""
        memory = getattr(model, "memory", None)
        if memory is None:
            return {}
        health: dict[str, float] = memory.quantizer.health()
        return health


def objective(config: Config, dataset: Dataset, plan: TrainConfig, seed: int) -> Objective:
    """Return the objective of a model's configuration."""
    if isinstance(config, SinkRecConfig):
        return NextItemObjective(dataset, plan, seed)
    return SemanticIdObjective(dataset, plan, seed)


def fitted(config: Config, dataset: Dataset, plan: TrainConfig) -> Config:
    """Return the configuration with what the data and the recipe decide.

    Raises:
        ConfigError: the semantic IDs of the data do not fit the model.
    """
    if isinstance(config, SinkRecConfig):
        window = plan.max_length if config.whole_history else config.window
        return config.with_overrides(num_items=dataset.num_items, window=window)
    _check_semantic_ids(config, dataset)
    return config


def _check_semantic_ids(config: GBLAConfig, dataset: Dataset) -> None:
    ids = dataset.semantic_ids
    if (ids.num_digits, ids.codebook_size) != (config.num_digits, config.codebook_size):
        raise ConfigError(
            f"{dataset.name} has semantic IDs of {ids.num_digits} digits x {ids.codebook_size} codes, but the model "
            f"writes {config.num_digits} x {config.codebook_size}; prepare the data with "
            f"--levels {config.num_digits - 1} --codebook-size {config.codebook_size}, "
            "or change num_digits and codebook_size with --set"
        )
