"""Ranking metrics with one relevant item a user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ranks_of(ranked: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the place of each target in its ranking, 0 being first; the ranking's length where it is absent.

    ``ranked`` int [U, K] holds item indices, best first, negative ones never matching; ``targets`` int [U].
    """
    hits = (ranked == targets[:, None]) & (ranked >= 0)
    return np.where(hits.any(1), hits.argmax(1), ranked.shape[1])


def recall(ranks: np.ndarray, k: int) -> float:
    """Return the share of users whose target is among the first ``k``: Recall@k, the same as HR@k here."""
    return float((ranks < k).mean()) if len(ranks) else 0.0


def ndcg(ranks: np.ndarray, k: int) -> float:
    """Return NDCG@k with one relevant item: the mean of 1 / log2(rank + 2), 0 where the rank is ``k`` or worse."""
    return float(np.where(ranks < k, 1 / np.log2(ranks + 2.0), 0.0).mean()) if len(ranks) else 0.0


def mrr(ranks: np.ndarray, k: int) -> float:
    """Return MRR@k: the mean of 1 / (rank + 1), 0 where the rank is ``k`` or worse."""
    return float(np.where(ranks < k, 1 / (ranks + 1.0), 0.0).mean()) if len(ranks) else 0.0


def interval95(share: float, users: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a share of ``users``."""
    if users == 0:
        return 0.0, 1.0
    z = 1.959964
    centre = (share + z * z / (2 * users)) / (1 + z * z / users)
    half = z * np.sqrt(share * (1 - share) / users + z * z / (4 * users * users)) / (1 + z * z / users)
    return float(centre - half), float(centre + half)


def metrics_of(ranks: np.ndarray, ks: Sequence[int], ndcg_ks: Sequence[int]) -> dict[str, float]:
    """Return ``{"Recall@k": ..., "NDCG@k": ..., "MRR@10": ...}`` of the ranks int [U] of each user's target."""
    metrics = {f"Recall@{k}": recall(ranks, k) for k in ks} | {f"NDCG@{k}": ndcg(ranks, k) for k in ndcg_ks}
    return metrics | {"MRR@10": mrr(ranks, 10)}
