"""Full-ranking evaluation by constrained beam search, with two baselines under the same rules.

Leave-one-out: the history is everything before the target. Items that the user has had already are left out of every
ranking, the model's and the baselines' alike, as the published HSTU evaluation does; in data where users come back to
items that rule can be switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from zoo import files
from zoo.bundle import SEMANTIC_IDS, Bundle
from zoo.data import Dataset, load_dataset
from zoo.errors import BundleError, ConfigError
from zoo.models.gbla import GBLA
from zoo.models.loading import load_model
from zoo.retrieval import Beams, beam_search
from zoo.training.baselines import LastItem, Popularity, rank
from zoo.training.batches import histories
from zoo.training.metrics import interval95, metrics_of, ranks_of

REPORT = "reports/eval.json"
RANKS = "reports/ranks.npy"
RECALL_KS = (5, 10, 50)
NDCG_KS = (5, 10)
_FREE_BEAMS = 20
"""Codes a user that are looked at for the share of illegal ones."""
_MOST_TOKENS = 2**17
"""Tokens encoded at a time, padding included: bounds memory where histories are long."""


@dataclass(frozen=True)
class EvalReport:
    """Metrics of one split.

    Attributes:
        dataset: name of the data.
        split: ``valid`` or ``test``.
        users: ranked users, all of them.
        metrics: recommender -> metric -> value.
        recall10_interval: recommender -> 95% interval of Recall@10.
        illegal_share: share of the codes that the model writes without the trie that belong to no item.
        beams: beam width.
        exclude_seen: whether items of the history were left out.
    """

    dataset: str
    split: str
    users: int
    metrics: dict[str, dict[str, float]]
    recall10_interval: dict[str, tuple[float, float]]
    illegal_share: float
    beams: int
    exclude_seen: bool

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
    ranked, illegal = rank_users(
        model, dataset, users, split, max_length=max_length, beams=beams, batch_size=batch_size,
        exclude_seen=exclude_seen, progress="ranking" if progress else None,
    )  # fmt: skip
    targets = dataset.targets(split)
    rankings = {"gbla": ranked, **_baseline_rankings(dataset, split, exclude_seen, batch_size)}
    metrics = {name: metrics_of(ranking, targets, RECALL_KS, NDCG_KS) for name, ranking in rankings.items()}
    report = EvalReport(
        dataset=dataset.name,
        split=split,
        users=len(users),
        metrics=metrics,
        recall10_interval={name: interval95(row["Recall@10"], len(users)) for name, row in metrics.items()},
        illegal_share=illegal,
        beams=beams,
        exclude_seen=exclude_seen,
    )
    files.write_json(bundle.path / REPORT, report.to_json())
    with files.replacing(bundle.path / RANKS) as temporary, temporary.open("wb") as file:
        np.save(file, ranks_of(ranked, targets).astype(np.int32))
    bundle.update([REPORT, RANKS], evaluation=report.to_json())
    return report


def rank_users(
    model: GBLA,
    dataset: Dataset,
    users: np.ndarray,
    split: Literal["valid", "test"],
    *,
    max_length: int,
    beams: int,
    batch_size: int = 64,
    exclude_seen: bool = True,
    count_illegal: bool = True,
    progress: str | None = None,
) -> tuple[np.ndarray, float]:
    """Return the ranking int64 [U, beams] of ``users`` and the share of illegal codes without the trie.

    Users of like history length share a batch, so little padding is computed.
    """
    device = next(model.parameters()).device
    trie = dataset.semantic_ids.trie.to(device)
    ends = dataset.history_end(split)
    rows = np.full((len(users), beams), -1, np.int64)
    illegal = []
    batches = _like_lengths(ends[users] - dataset.user_offsets[users], max_length, batch_size)
    console = Console(stderr=True)
    shown = track(batches, progress or "", console=console, transient=True, disable=progress is None)
    with _evaluating(model):
        for places in shown:
            chosen = users[places]
            ids, lengths = (t.to(device) for t in histories(dataset, chosen, ends[chosen], max_length))
            seen = torch.from_numpy(seen_items(dataset, chosen, ends[chosen])).to(device) if exclude_seen else None

            def search(**settings: Any) -> Beams:
                return beam_search(
                    model.encode, model.decode_step, ids, lengths,  # noqa: B023
                    num_digits=model.config.num_digits, codebook_size=model.config.codebook_size, **settings,
                )  # fmt: skip

            rows[places] = search(trie=trie, seen=seen, beams=beams).items.cpu().numpy()
            if count_illegal:
                free = search(trie=None, beams=_FREE_BEAMS).codes.cpu().numpy()
                illegal.append(float((dataset.semantic_ids.items_of(free) < 0).mean()) * len(chosen))
    return rows, sum(illegal) / max(1, len(users))


def _like_lengths(lengths: np.ndarray, max_length: int, batch_size: int) -> list[np.ndarray]:
    """Split positions of ``lengths`` int [U] into batches of like length, the longest first (it needs most memory)."""
    order, batches = np.argsort(-lengths, kind="stable"), []
    while len(order):
        longest = max(1, min(max_length, int(lengths[order[0]])))
        size = max(1, min(batch_size, _MOST_TOKENS // longest))
        batches.append(order[:size])
        order = order[size:]
    return batches


def seen_items(dataset: Dataset, users: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return bool [B, N]: which items each of ``users`` had before offset ``ends`` int64 [B]."""
    starts = dataset.user_offsets[users]
    counts = ends - starts
    seen = np.zeros((len(users), dataset.num_items), bool)
    rows = np.repeat(np.arange(len(users)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    seen[rows, dataset.items[np.repeat(starts, counts) + np.arange(len(rows)) - first]] = True
    return seen


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


@contextmanager
def _evaluating(model: GBLA) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
