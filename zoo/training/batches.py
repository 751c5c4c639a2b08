"""Training batches: every position of every user's training part is a target, batched by history length.

The batches of an epoch depend on the dataset, the settings, the seed and the epoch only, so a resumed run needs no more
than its step number to go on with exactly the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zoo.data import Dataset
from zoo.errors import ConfigError, DataError

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
        return Batch(*_moved([getattr(self, name) for name in self.__dataclass_fields__], device))

    @property
    def targets(self) -> float:
        """How many targets the batch has."""
        return float(self.weights.sum())

    def pieces(self, tokens: int) -> Iterator[Batch]:
        """Yield parts of the batch of at most ``tokens`` tokens (or one row), long rows first, less padded; 0: itself.

        The rows must be sorted by length, as those of ``TrainingBatches`` are.
        """
        for rows, longest in _pieces(self.lengths, self.item_ids.shape, tokens):
            yield Batch(self.item_ids[rows, :longest], self.lengths[rows], self.target_codes[rows], self.weights[rows])


class TrainingBatches:
    """Length-bucketed batches over the training part of a dataset (all events but each user's newest).

    Args:
        dataset: prepared data.
        batch_size: B.
        max_length: newest events of a history that are kept.
        targets_per_history: K, the events t .. t + K - 1 decoded from the history before t.
        held_out: newest events of each user that are not trained on.
        seed: decides the order.

    Raises:
        DataError: no user has two training events.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        max_length: int,
        targets_per_history: int = 1,
        held_out: int = 2,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.max_length = max_length
        self.targets_per_history = targets_per_history
        self.seed = seed
        starts, train_lengths = dataset.user_offsets[:-1], dataset.train_lengths(held_out)
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
            lengths = np.minimum(self._position, self.max_length)
            for examples in _epoch(self.seed, epoch, lengths, self.batch_size)[index:]:
                yield self._batch(examples)
            epoch, index = epoch + 1, 0

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


@dataclass(frozen=True)
class SequenceBatch:
    """One training batch of pieces of histories.

    Attributes:
        items: int64 [B, L], dense item indices, right-padded with 0.
        times: int64 [B, L], seconds.
        lengths: int32 [B]; every event but the first of a row is a target.
    """

    items: Tensor
    times: Tensor
    lengths: Tensor

    @property
    def targets(self) -> float:
        """How many targets the batch has."""
        return float((self.lengths - 1).clamp(min=0).sum())

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the batch on another device."""
        return SequenceBatch(*_moved((self.items, self.times, self.lengths), device))

    def pieces(self, tokens: int) -> Iterator[SequenceBatch]:
        """Yield parts as ``Batch.pieces`` does."""
        for rows, longest in _pieces(self.lengths, self.items.shape, tokens):
            yield SequenceBatch(self.items[rows, :longest], self.times[rows, :longest], self.lengths[rows])


class SequenceBatches:
    """Length-bucketed batches of the training parts themselves, cut into pieces of at most ``max_length`` from the end.

    Args:
        dataset: prepared data.
        batch_size: B.
        max_length: most events of a piece; an older piece is an example of its own.
        held_out: newest events of each user that are not trained on.
        seed: decides the order.

    Raises:
        ConfigError: ``max_length`` is 1, and of one event nothing follows.
        DataError: no user has two training events.
    """

    def __init__(self, dataset: Dataset, *, batch_size: int, max_length: int, held_out: int = 2, seed: int = 0) -> None:
        if max_length < 2:
            raise ConfigError(
                f"max_length is {max_length}; of a history at least two events are needed, one to predict"
            )
        self.dataset, self.batch_size, self.max_length, self.seed = dataset, batch_size, max_length, seed
        starts, lengths = [], []
        for start, length in zip(dataset.user_offsets[:-1], dataset.train_lengths(held_out), strict=True):
            end = start + length
            while end - start > 1:
                # One event more than the piece before it begins with: its last target is that first event.
                first = max(start, end - max_length)
                starts.append(first)
                lengths.append(end - first)
                end = first + 1 if first > start else start
        self._starts, self._lengths = np.array(starts, np.int64), np.array(lengths, np.int64)
        if not len(starts):
            raise DataError(f"no user of {dataset.name} has two training events; a user needs at least four events")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last of which may be smaller."""
        return -(-len(self._starts) // self.batch_size)

    def from_step(self, step: int) -> Iterator[SequenceBatch]:
        """Yield batches without end, the first being that of ``step``."""
        epoch, index = divmod(step, self.steps_per_epoch)
        while True:
            for examples in _epoch(self.seed, epoch, self._lengths, self.batch_size)[index:]:
                yield self._batch(examples)
            epoch, index = epoch + 1, 0

    def _batch(self, examples: np.ndarray) -> SequenceBatch:
        lengths = self._lengths[examples]
        offsets = np.arange(min(_few_lengths(int(lengths.max())), self.max_length))
        valid = offsets < lengths[:, None]
        source = np.where(valid, self._starts[examples][:, None] + offsets, 0)
        return _sequences(self.dataset, source, valid)


def _epoch(seed: int, epoch: int, lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Return the examples of each batch of an epoch: of like length within pools, pools and batches in random order."""
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(lengths))
    pool = batch_size * _POOL_BATCHES
    batches = []
    for start in range(0, len(order), pool):
        chosen = order[start : start + pool]
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
        batches += [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]
    return [batches[i] for i in draw.permutation(len(batches))]


def _few_lengths(length: int) -> int:
    """Return a length to pad to, a multiple of 8: cuDNN's attention takes 0.2 s to plan each shape it has not seen."""
    return -(-length // 8) * 8


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on another device."""
    if device.type == "cuda":  # only from pinned memory does the copy leave the host free
        tensors = [tensor.pin_memory() for tensor in tensors]
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def _pieces(lengths: Tensor, shape: torch.Size, tokens: int) -> Iterator[tuple[slice, int]]:
    """Yield rows and length of parts of at most ``tokens`` tokens (or one row), long rows first; 0: the whole batch."""
    end = len(lengths)
    if not tokens or shape.numel() <= tokens:
        yield slice(0, end), shape[1]
        return
    while end:
        longest = int(lengths[end - 1])
        rows = slice(max(0, end - max(1, tokens // max(1, longest))), end)
        yield rows, longest
        end = rows.start


def _sequences(dataset: Dataset, source: np.ndarray, valid: np.ndarray) -> SequenceBatch:
    """Return the events at ``source`` int64 [B, L], 0 where not ``valid``."""
    items, times = (np.where(valid, x[source], 0).astype(np.int64) for x in (dataset.items, dataset.timestamps))
    lengths = valid.sum(1).astype(np.int32)
    return SequenceBatch(torch.from_numpy(items), torch.from_numpy(times), torch.from_numpy(lengths))


def timed_histories(
    dataset: Dataset, users: np.ndarray, ends: np.ndarray, max_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense items and times, int64 [B, L], and lengths int32 [B]; otherwise as ``histories``."""
    source, valid = _newest(dataset, users, ends, max_length)
    found = _sequences(dataset, source, valid)
    return found.items, found.times, found.lengths


def _newest(dataset: Dataset, users: np.ndarray, ends: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the newest events before ``ends`` lie, int64 [B, L], and which of them exist."""
    lengths = np.minimum(ends - dataset.user_offsets[users], max_length)
    offsets = np.arange(max(1, lengths.max(initial=0)))
    valid = offsets < lengths[:, None]
    return np.where(valid, (ends - lengths)[:, None] + offsets, 0), valid


def histories(dataset: Dataset, users: np.ndarray, ends: np.ndarray, max_length: int) -> tuple[Tensor, Tensor]:
    """Return item ids int64 [B, L] and lengths int32 [B] of the newest events of ``users`` before ``ends``.

    ``ends`` int64 [B] are offsets into ``dataset.items``, exclusive. L is the longest history of the batch, at least 1.
    """
    source, valid = _newest(dataset, users, ends, max_length)
    ids = np.where(valid, dataset.item_ids[dataset.items[source]], 0)
    return torch.from_numpy(ids), torch.from_numpy(valid.sum(1).astype(np.int32))
