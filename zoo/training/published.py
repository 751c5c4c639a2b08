"""Published results, as text beside our own: what was measured elsewhere, on what, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """Rows of (name, metric -> value) and where they are from."""

    rows: tuple[tuple[str, Mapping[str, float]], ...]
    source: str


GBLA_RECALL10 = {
    "base": 0.2780,
    "all-softmax": 0.2800,
    "causal-softmax": 0.1878,
    "fully-gbla": 0.2607,
    "no-key-gate": 0.2776,
    "no-conv": 0.2747,
    "no-gated-norm": 0.2726,
    "bla": 0.2675,
}
"""Recall@10 of the paper, on its own industrial data at length 2048 (arXiv 2606.07317); `base` is its hybrid."""

BASELINES: Mapping[tuple[str, str], Published] = {
    ("sinkrec", "ml-1m"): Published(
        (
            ("SASRec", {"Recall@10": 0.2853, "Recall@50": 0.5474, "NDCG@10": 0.1603}),
            ("HSTU", {"Recall@10": 0.3097, "Recall@50": 0.5754, "NDCG@10": 0.1720}),
            ("HSTU-large", {"Recall@10": 0.3294, "Recall@50": 0.5935, "NDCG@10": 0.1893}),
        ),
        "Published rows: README of meta-recsys/generative-recommenders (verified there 2024-04-15; arXiv 2402.17152), "
        "its own code and setup: width 50, the newest 200 events, 101 epochs of batch 128, 128 sampled negatives, "
        "training on all events but the last of each user, test metrics after every epoch, items among the 200 events "
        "left out of the ranking (`left out: read` here). Ours holds one more event out (`held_out` 2), by which the "
        "checkpoint is chosen, unless the recipe says 1.",
    ),
}
"""(model, dataset) -> rows that a study's table shows beside its own."""
