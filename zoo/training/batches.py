"""Training batches: every position of every user's training part is a target, batched by history length.

The batches of an epoch depend on the dataset, the settings, the seed and the epoch only, so a resumed run needs no more
than its step number to go on with exactly the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zoo.data import Dataset
from zoo.errors import DataError

_POOL_BATCHES = 32
"""Examples are sorted by length within pools of this many batches: little padding, and still a fresh mix each epoch."""


@dataclass(frozen=True)
class Batch:
    """One training batch.

    Attributes:
        item_ids: int64 [B, L], right-padded with 0.
        lengths: int32 [B].
        target_codes: int64 [B, K, M].
        weights: float32 [B, K], 1 for a target, 0 where the training part has ended.
    """

    item_ids: Tensor
    lengths: Tensor
    target_codes: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        tensors = [getattr(self, name) for name in self.__dataclass_fields__]
        if device.type == "cuda":  # only from pinned memory does the copy leave the host free
            tensors = [tensor.pin_memory() for tensor in tensors]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def pieces(self, tokens: int) -> Iterator[Batch]:
        """Yield parts of the batch of at most ``tokens`` tokens (or one row), long rows first, less padded; 0: itself.

        The rows must be sorted by length, as those of ``TrainingBatches`` are.
        """
        end = len(self.lengths)
        if not tokens or self.item_ids.numel() <= tokens:
            yield self
            return
        while end:
            longest = int(self.lengths[end - 1])
            rows = slice(max(0, end - max(1, tokens // max(1, longest))), end)
            yield Batch(self.item_ids[rows, :longest], self.lengths[rows], self.target_codes[rows], self.weights[rows])
            end = rows.start


class TrainingBatches:
    """Length-bucketed batches over the training part of a dataset (all events but each user's last two).

    Args:
        dataset: prepared data.
        batch_size: B.
        max_length: newest events of a history that are kept.
        targets_per_history: K, the events t .. t + K - 1 decoded from the history before t.
        seed: decides the order.

    Raises:
        DataError: no user has two training events.
    """

    def __init__(
        self, dataset: Dataset, *, batch_size: int, max_length: int, targets_per_history: int = 1, seed: int = 0
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.max_length = max_length
        self.targets_per_history = targets_per_history
        self.seed = seed
        starts, train_lengths = dataset.user_offsets[:-1], dataset.train_lengths()
        counts = np.maximum(train_lengths - 1, 0)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        self._position = 1 + np.arange(counts.sum()) - first
        self._start = np.repeat(starts, counts)
        self._end = self._start + np.repeat(train_lengths, counts)
        if not len(self._position):
            raise DataError(f"no user of {dataset.name} has two training events; a user needs at least four events")
        self._codes = dataset.semantic_ids.codes.astype(np.int64)

    @property
    def examples(self) -> int:
        """Histories in an epoch."""
        return len(self._position)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last of which may be smaller."""
        return -(-self.examples // self.batch_size)

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches without end, the first being that of ``step``."""
        epoch, index = divmod(step, self.steps_per_epoch)
        while True:
            batches = self._epoch(epoch)
            for examples in batches[index:]:
                yield self._batch(examples)
            epoch, index = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        draw = np.random.default_rng([self.seed, epoch])
        order = draw.permutation(self.examples)
        lengths = np.minimum(self._position, self.max_length)
        pool = self.batch_size * _POOL_BATCHES
        batches = []
        for start in range(0, len(order), pool):
            chosen = order[start : start + pool]
            chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
            batches += [chosen[i : i + self.batch_size] for i in range(0, len(chosen), self.batch_size)]
        return [batches[i] for i in draw.permutation(len(batches))]

    def _batch(self, examples: np.ndarray) -> Batch:
        start, target, end = (
            self._start[examples],
            self._start[examples] + self._position[examples],
            self._end[examples],
        )
        lengths = np.minimum(target - start, self.max_length)
        offsets = np.arange(lengths.max())
        source = np.where(offsets < lengths[:, None], (target - lengths)[:, None] + offsets, 0)
        ids = np.where(offsets < lengths[:, None], self.dataset.item_ids[self.dataset.items[source]], 0)
        following = target[:, None] + np.arange(self.targets_per_history)
        exists = following < end[:, None]
        codes = self._codes[self.dataset.items[np.where(exists, following, target[:, None])]]
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(lengths.astype(np.int32)),
            torch.from_numpy(codes),
            torch.from_numpy(exists.astype(np.float32)),
        )


def histories(dataset: Dataset, users: np.ndarray, ends: np.ndarray, max_length: int) -> tuple[Tensor, Tensor]:
    """Return item ids int64 [B, L] and lengths int32 [B] of the newest events of ``users`` before ``ends``.

    ``ends`` int64 [B] are offsets into ``dataset.items``, exclusive. L is the longest history of the batch, at least 1.
    """
    starts = dataset.user_offsets[users]
    lengths = np.minimum(ends - starts, max_length)
    offsets = np.arange(max(1, lengths.max(initial=0)))
    valid = offsets < lengths[:, None]
    source = np.where(valid, (ends - lengths)[:, None] + offsets, 0)
    ids = np.where(valid, dataset.item_ids[dataset.items[source]], 0)
    return torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32))
