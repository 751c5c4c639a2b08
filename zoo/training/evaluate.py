"""Full-ranking evaluation by constrained beam search or by score, with two baselines under the same rules.

Leave-one-out: the history is everything before the target. Items that the user has had already are left out of every
ranking, the model's and the baselines' alike, as the published HSTU evaluation does; in data where users come back to
items that rule can be switched off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from zoo import files
from zoo.bundle import SEMANTIC_IDS, Bundle
from zoo.data import Dataset, load_dataset
from zoo.errors import BundleError, ConfigError
from zoo.models import presets
from zoo.models.loading import load_model
from zoo.models.sinkrec import SinkRec
from zoo.training.baselines import LastItem, Popularity, rank
from zoo.training.metrics import interval95, metrics_of, ranks_of
from zoo.training.ranking import rank_users, seen_items, target_ranks

REPORT = "reports/eval.json"
RANKS = "reports/ranks.npy"
RECALL_KS = (5, 10, 50)
NDCG_KS = (5, 10)


@dataclass(frozen=True)
class EvalReport:
    """Metrics of one split.

    Attributes:
        dataset: name of the data.
        split: ``valid`` or ``test``.
        users: ranked users, all of them.
        metrics: recommender -> metric -> value.
        recall10_interval: recommender -> 95% interval of Recall@10.
        illegal_share: share of the codes that GBLA writes without the trie that belong to no item; 0 of SinkRec, which
            scores items.
        beams: beam width, of SinkRec the places of a ranking.
        exclude_seen: whether items of the history were left out.
        by_left_out: of SinkRec, the model's metrics by what is left out of the ranking (``zoo.training.ranking``).
    """

    dataset: str
    split: str
    users: int
    metrics: dict[str, dict[str, float]]
    recall10_interval: dict[str, tuple[float, float]]
    illegal_share: float
    beams: int
    exclude_seen: bool
    by_left_out: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return asdict(self)


def evaluate(
    bundle: Bundle | Path | str,
    *,
    data: Dataset | Path | str,
    split: Literal["valid", "test"] = "test",
    beams: int = 100,
    batch_size: int | None = None,
    exclude_seen: bool = True,
    device: str | None = None,
    progress: bool = True,
) -> EvalReport:
    """Rank the whole catalogue for every user and compare with the two baselines.

    Args:
        bundle: a trained one.
        data: the dataset it was trained on, or its folder.
        split: ``test`` (last event) or ``valid`` (the one before it).
        beams: beam width, at least 50 for Recall@50.
        batch_size: users at a time; default: 64 on a CPU, 512 on a GPU, fewer where histories are long.
        exclude_seen: leave items of the history out of every ranking.
        device: default: the GPU where there is one.
        progress: show a progress bar on standard error.

    Returns:
        The report, also written to reports/eval.json in the bundle; reports/ranks.npy beside it holds the rank of each
        user's target, int32 [U], 0 being first and ``beams`` meaning absent.

    Raises:
        ConfigError: a beam width or split that makes no sense.
        BundleError: the bundle's semantic IDs are not those of the data.
    """
    if beams < max(RECALL_KS):
        raise ConfigError(f"{beams} beams cannot give Recall@{max(RECALL_KS)}; use {max(RECALL_KS)} or more")
    if split not in ("valid", "test"):
        raise ConfigError(f"split is {split!r}; choose valid or test")
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    _check_same_ids(bundle, dataset)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    batch_size = batch_size or (512 if where.type == "cuda" else 64)
    model = load_model(bundle).to(where)
    max_length = bundle.manifest.get("training", {}).get("max_length", 256)
    users = np.arange(dataset.num_users)
    settings: dict[str, Any] = {
        "max_length": max_length, "batch_size": batch_size, "progress": "ranking" if progress else None,
    }  # fmt: skip
    by_left_out: dict[str, dict[str, float]] = {}
    targets = dataset.targets(split)
    if isinstance(model, SinkRec):
        illegal, every = 0.0, target_ranks(model, dataset, users, split, **settings)
        found = every["history" if exclude_seen else "nothing"]
        by_left_out = {name: metrics_of(ranks, RECALL_KS, NDCG_KS) for name, ranks in every.items()}
    else:
        ranked, illegal = rank_users(model, dataset, users, split, beams=beams, exclude_seen=exclude_seen, **settings)
        found = ranks_of(ranked, targets)
    found = np.minimum(found, beams)
    baselines = _baseline_rankings(dataset, split, exclude_seen, batch_size)
    metrics = {
        name: metrics_of(ranks, RECALL_KS, NDCG_KS)
        for name, ranks in (
            (presets.model_name(model.config), found),
            *((name, ranks_of(ranking, targets)) for name, ranking in baselines.items()),
        )
    }
    report = EvalReport(
        dataset=dataset.name,
        split=split,
        users=len(users),
        metrics=metrics,
        recall10_interval={name: interval95(row["Recall@10"], len(users)) for name, row in metrics.items()},
        illegal_share=illegal,
        beams=beams,
        exclude_seen=exclude_seen,
        by_left_out=by_left_out,
    )
    files.write_json(bundle.path / REPORT, report.to_json())
    with files.replacing(bundle.path / RANKS) as temporary, temporary.open("wb") as file:
        np.save(file, found.astype(np.int32))
    bundle.update([REPORT, RANKS], evaluation=report.to_json())
    return report


def _baseline_rankings(
    dataset: Dataset, split: Literal["valid", "test"], exclude_seen: bool, batch_size: int
) -> dict[str, np.ndarray]:
    ends = dataset.history_end(split)
    starts = dataset.user_offsets[:-1]
    last = np.where(ends > starts, dataset.items[np.maximum(ends - 1, 0)], -1)
    rankings: dict[str, np.ndarray] = {}
    for baseline in (Popularity(dataset), LastItem(dataset)):
        rows = []
        for start in range(0, dataset.num_users, batch_size):
            users = np.arange(start, min(start + batch_size, dataset.num_users))
            scores = baseline.scores(last[users])
            seen = seen_items(dataset, users, ends[users]) if exclude_seen else np.zeros_like(scores, bool)
            rows.append(rank(scores, seen, max(RECALL_KS)))
        rankings[baseline.name] = np.concatenate(rows)
    return rankings


def _check_same_ids(bundle: Bundle, dataset: Dataset) -> None:
    own = bundle.file(SEMANTIC_IDS)
    if files.sha256_of(own) != files.sha256_of(dataset.path / SEMANTIC_IDS):
        raise BundleError(
            f"{bundle.path} was trained with other semantic IDs than those of {dataset.path}; "
            f"evaluate it on the dataset it was trained on ({bundle.manifest.get('training', {}).get('dataset')})"
        )
