"""The ranking of the whole catalogue for users of a dataset: by constrained beam search, or by score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from zoo.data import Dataset
from zoo.models.gbla import GBLA
from zoo.models.sinkrec import SinkRec
from zoo.retrieval import Beams, beam_search
from zoo.training.batches import histories, timed_histories

_FREE_BEAMS = 20
"""Codes a user that are looked at for the share of illegal ones."""
_MOST_TOKENS = 2**17
"""Tokens encoded at a time, padding included: bounds memory where histories are long."""


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


def seen_items(dataset: Dataset, users: np.ndarray, ends: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
    """Return bool [B, N]: which items each of ``users`` had before offset ``ends`` int64 [B], from ``starts`` on."""
    starts = dataset.user_offsets[users] if starts is None else starts
    counts = ends - starts
    seen = np.zeros((len(users), dataset.num_items), bool)
    rows = np.repeat(np.arange(len(users)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    seen[rows, dataset.items[np.repeat(starts, counts) + np.arange(len(rows)) - first]] = True
    return seen


LeftOut = Literal["history", "read", "nothing"]
LEFT_OUT: tuple[LeftOut, ...] = ("history", "read", "nothing")
"""What a ranking leaves out: every item of the history, those among the newest events that the model reads (as the
evaluation of the published HSTU code does), or nothing."""


def rank_users_by_score(
    model: SinkRec,
    dataset: Dataset,
    users: np.ndarray,
    split: Literal["valid", "test"],
    *,
    max_length: int,
    most: int,
    batch_size: int = 128,
    exclude_seen: bool = True,
    progress: str | None = None,
) -> np.ndarray:
    """Return the ranking int64 [U, most] of ``users``, -1 where no item is left."""
    ends = dataset.history_end(split)
    rows = np.full((len(users), most), -1, np.int64)
    kept = min(most, dataset.num_items)
    for places, scores in _scores(model, dataset, users, ends, max_length, batch_size, progress):
        if exclude_seen:
            chosen = users[places]
            scores[torch.from_numpy(seen_items(dataset, chosen, ends[chosen])).to(scores.device)] = -torch.inf
        found = scores.topk(kept, dim=1)
        rows[places, :kept] = found.indices.masked_fill(found.values == -torch.inf, -1).cpu().numpy()
    return rows


def target_ranks(
    model: SinkRec,
    dataset: Dataset,
    users: np.ndarray,
    split: Literal["valid", "test"],
    *,
    max_length: int,
    batch_size: int = 128,
    progress: str | None = None,
) -> dict[LeftOut, np.ndarray]:
    """Return the rank of each user's target among all items, int64 [U], 0 being first, for each way of leaving out.

    An item with the target's score counts as before it. A target that is left out itself has rank ``num_items``.
    """
    ends = dataset.history_end(split)
    targets = torch.from_numpy(dataset.targets(split)[users].astype(np.int64))
    ranks = {policy: np.zeros(len(users), np.int64) for policy in LEFT_OUT}
    for places, scores in _scores(model, dataset, users, ends, max_length, batch_size, progress):
        chosen, target = users[places], targets[places].to(scores.device).unsqueeze(1)
        before = ~(scores < scores.gather(1, target))
        first = dataset.user_offsets[chosen]
        for policy in LEFT_OUT:
            starts = np.maximum(first, ends[chosen] - max_length) if policy == "read" else first
            seen = torch.from_numpy(seen_items(dataset, chosen, ends[chosen], starts)).to(scores.device)
            seen &= policy != "nothing"
            rank = (before & ~seen).sum(1) - 1
            rank = rank.masked_fill(seen.gather(1, target).squeeze(1), dataset.num_items)
            ranks[policy][places] = rank.cpu().numpy()
    return ranks


def _scores(
    model: SinkRec,
    dataset: Dataset,
    users: np.ndarray,
    ends: np.ndarray,
    max_length: int,
    batch_size: int,
    progress: str | None,
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield places in ``users`` int64 [B] and their scores of every item, float32 [B, N]."""
    device = next(model.parameters()).device
    batches = _like_lengths(ends[users] - dataset.user_offsets[users], max_length, batch_size)
    shown = track(batches, progress or "", console=Console(stderr=True), transient=True, disable=progress is None)
    with _evaluating(model), torch.no_grad():
        for places in shown:
            chosen = users[places]
            histories = (t.to(device) for t in timed_histories(dataset, chosen, ends[chosen], max_length))
            yield places, model.score(model.users(*histories).float())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
