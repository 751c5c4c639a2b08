"""The two recommenders that a trained model must beat: what is popular, and what usually follows the last item."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.sparse import csr_matrix

from zoo.data import Dataset


class Popularity:
    """Scores every item by its training events."""

    name = "popularity"

    def __init__(self, dataset: Dataset) -> None:
        self.counts = np.zeros(dataset.num_items)
        for items in _training_histories(dataset):
            np.add.at(self.counts, items, 1)

    def scores(self, last_items: np.ndarray) -> np.ndarray:
        """Return float64 [U, N] for users whose newest items are ``last_items`` int [U] (-1 for none)."""
        return np.broadcast_to(self.counts, (len(last_items), len(self.counts))).copy()


class LastItem:
    """Scores every item by how often it directly followed the user's last item in training; popularity breaks ties."""

    name = "last item"

    def __init__(self, dataset: Dataset) -> None:
        self.popularity = Popularity(dataset).counts
        pairs = [(items[:-1], items[1:]) for items in _training_histories(dataset) if len(items) > 1]
        before = np.concatenate([pair[0] for pair in pairs]) if pairs else np.zeros(0, np.int32)
        after = np.concatenate([pair[1] for pair in pairs]) if pairs else np.zeros(0, np.int32)
        shape = (dataset.num_items, dataset.num_items)
        self.transitions = csr_matrix((np.ones(len(before)), (before, after)), shape=shape)

    def scores(self, last_items: np.ndarray) -> np.ndarray:
        """Return float64 [U, N] for users whose newest items are ``last_items`` int [U] (-1 for none)."""
        known = last_items >= 0
        followed = self.transitions[np.where(known, last_items, 0)].toarray() * known[:, None]
        return followed + self.popularity / (self.popularity.sum() + 1)


def rank(scores: np.ndarray, seen: np.ndarray, k: int) -> np.ndarray:
    """Return the ``k`` best items int64 [U, k] of ``scores`` [U, N] that are not ``seen`` bool [U, N]; -1 fills up."""
    masked = np.where(seen, -np.inf, scores)
    order = np.argsort(-masked, axis=1, kind="stable")[:, :k]
    ranked = np.where(np.isneginf(np.take_along_axis(masked, order, 1)), -1, order)
    return np.pad(ranked, ((0, 0), (0, k - ranked.shape[1])), constant_values=-1)


def _training_histories(dataset: Dataset) -> Iterator[np.ndarray]:
    for start, length in zip(dataset.user_offsets[:-1], dataset.train_lengths(), strict=True):
        yield dataset.items[start : start + length]
