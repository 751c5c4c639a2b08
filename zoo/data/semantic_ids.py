"""Semantic IDs: each item as a few digits, from coarse to fine, made by residual k-means over its embedding.

Level r clusters what the levels before it left over; its centroid is subtracted and the rest goes on (the GRID protocol
that the GBLA paper follows). Items that agree in all levels are told apart by one more digit.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.settings import check_seed, check_whole
from zoo.data.trie import Trie
from zoo.errors import ConfigError, DataError, ShapeError
from zoo.files import write_bytes

SCHEMA = 1
_WHOLE_KMEANS_ITEMS = 20_000
"""Up to here k-means sees all items in each iteration; above it works on mini-batches."""


@dataclass(frozen=True, eq=False)
class SemanticIds:
    """The table of N items and their M = levels + 1 digits.

    ``codes`` int32 [N, M], each digit in 0 .. codebook_size - 1, each row unique; ``item_ids`` int64 [N], what a model
    hashes; ``codebooks`` float32 [levels, codebook_size, E], zero in rows that no cluster uses; ``level_errors``
    float64 [levels], the mean squared residual after each level relative to the variance of the embeddings.
    """

    codes: np.ndarray
    item_ids: np.ndarray
    codebook_size: int
    codebooks: np.ndarray
    level_errors: np.ndarray

    def __post_init__(self) -> None:
        levels = self.codebooks.shape[0] if self.codebooks.ndim == 3 else -1
        fits = self.codes.shape == (len(self.item_ids), levels + 1) and self.level_errors.shape == (levels,)
        if not fits or self.codebooks.shape[1] != self.codebook_size:
            raise ShapeError(
                f"codes {self.codes.shape}, {len(self.item_ids)} item ids, codebooks {self.codebooks.shape} and a "
                f"codebook size of {self.codebook_size} do not belong together; make them with residual_kmeans"
            )
        check_sizes(levels, self.codebook_size)
        if self.codes.size and not 0 <= self.codes.min() <= self.codes.max() < self.codebook_size:
            raise DataError(
                f"codes run from {self.codes.min()} to {self.codes.max()}, outside 0 to {self.codebook_size - 1}; "
                "make the semantic IDs again"
            )

    @property
    def num_digits(self) -> int:
        """M, the digits of an ID: the levels and the one that tells apart."""
        return self.codes.shape[1]

    @cached_property
    def trie(self) -> Trie:
        """The trie of all codes, built once."""
        return Trie.from_codes(self.codes)

    @cached_property
    def _sorted_keys(self) -> tuple[np.ndarray, np.ndarray]:
        keys = self._keys(self.codes)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _keys(self, codes: np.ndarray) -> np.ndarray:
        powers = np.arange(self.num_digits - 1, -1, -1, dtype=np.int64)
        return np.asarray(codes.astype(np.int64) @ np.int64(self.codebook_size) ** powers)

    def items_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the dense item index int64 [...] of each ID in ``codes`` (integer [..., M]), -1 where there is none.

        Raises ``ShapeError`` when the last axis is not M.
        """
        codes = np.asarray(codes)
        if codes.ndim == 0 or codes.shape[-1] != self.num_digits:
            raise ShapeError(f"codes have the shape {codes.shape}, but IDs here have {self.num_digits} digits")
        in_range = np.asarray(((codes >= 0) & (codes < self.codebook_size)).all(axis=-1))
        wanted = self._keys(np.where(in_range[..., None], codes, 0))
        keys, order = self._sorted_keys
        position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(in_range & (keys[position] == wanted), order[position], -1)

    def figures(self) -> dict[str, Any]:
        """Return how well the codes are used, as plain numbers for JSON.

        For each level: ``code_use`` (distinct codes / codebook size), ``perplexity`` (exp of the entropy of the codes)
        and ``quantisation_error``. ``collision_rate`` is the share of items that share their levels with another one,
        before the last digit; ``largest_collision_group`` and ``groups`` count such items and distinct level codes.
        """
        use, perplexity = [], []
        for level in range(self.num_digits - 1):
            share = np.bincount(self.codes[:, level], minlength=self.codebook_size) / len(self.codes)
            used = share[share > 0]
            use.append(len(used) / self.codebook_size)
            perplexity.append(float(np.exp(-(used * np.log(used)).sum())))
        _, group_sizes = np.unique(self._keys(self.codes) // self.codebook_size, return_counts=True)
        return {
            "code_use": use,
            "perplexity": perplexity,
            "quantisation_error": self.level_errors.tolist(),
            "collision_rate": float(group_sizes[group_sizes > 1].sum() / len(self.codes)),
            "largest_collision_group": int(group_sizes.max()),
            "groups": len(group_sizes),
        }

    def save(self, path: Path | str) -> None:
        """Write the table and the trie arrays as safetensors, whole or not at all; the same table, the same bytes."""
        from safetensors.numpy import save

        tensors = {name: getattr(self, name) for name in ("codes", "item_ids", "codebooks", "level_errors")}
        tensors |= {f"trie.{name}": array for name, array in self.trie.arrays().items()}
        about = {"schema": SCHEMA, "codebook_size": self.codebook_size, "trie_widths": list(self.trie.widths)}
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        write_bytes(path, save(contiguous, metadata={"semantic_ids": json.dumps(about)}))

    @classmethod
    def load(cls, path: Path | str) -> SemanticIds:
        """Read what ``save`` wrote; raises ``DataError`` where the file is missing, damaged or of another schema."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise DataError(f"the semantic IDs {path} do not exist; prepare the data again")
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads((file.metadata() or {}).get("semantic_ids", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(f"the semantic IDs {path} are damaged ({error}); prepare the data again") from error
        if about.get("schema") != SCHEMA:
            raise DataError(
                f"the semantic IDs {path} have schema {about.get('schema')}, but this zoo reads {SCHEMA}; "
                "prepare the data again"
            )
        try:
            named = {name: tensors[name] for name in ("codes", "item_ids", "codebooks", "level_errors")}
            loaded = cls(codebook_size=about["codebook_size"], **named)
            intact = all(np.array_equal(tensors[f"trie.{name}"], a) for name, a in loaded.trie.arrays().items())
        except KeyError as error:
            raise DataError(f"the semantic IDs {path} lack {error}; prepare the data again") from error
        if not intact:
            raise DataError(f"the trie in {path} is not that of its codes; prepare the data again")
        return loaded


def check_sizes(levels: int, codebook_size: int) -> None:
    """Raise ``ConfigError`` unless IDs of ``levels`` + 1 digits below ``codebook_size`` exist and fit 63 bits."""
    check_whole(levels=levels, codebook_size=codebook_size)
    if levels < 1 or codebook_size < 2:
        raise ConfigError(f"{levels} levels of {codebook_size} codes were asked for; at least 1 level of 2 is needed")
    if levels >= 63 or codebook_size ** (levels + 1) >= 2**63:
        raise ConfigError(
            f"{levels} levels of {codebook_size} codes and the last digit do not fit 63 bits; use fewer levels or codes"
        )


def residual_kmeans(
    embeddings: np.ndarray, item_ids: np.ndarray, *, levels: int = 3, codebook_size: int = 256, seed: int = 0
) -> SemanticIds:
    """Give each row of ``embeddings`` (float [N, E]) an ID of ``levels`` digits and one that tells apart.

    The last digit numbers items of equal levels 0, 1, 2, ... in the order of their index. Deterministic for a seed.
    Raises ``ConfigError`` for impossible sizes and seeds, and ``DataError`` for no items, values that are not finite,
    or more equal items than the last digit can tell apart.
    """
    check_sizes(levels, codebook_size)
    check_seed(seed, levels)
    if len(embeddings) == 0 or embeddings.ndim != 2:
        raise DataError(f"embeddings have the shape {embeddings.shape}; at least one item with one value is needed")
    if not np.isfinite(embeddings).all():
        bad = int(np.flatnonzero(~np.isfinite(embeddings).all(axis=1))[0])
        raise DataError(f"the embedding of item {bad} holds NaN or infinity; all values must be finite")
    residual = embeddings.astype(np.float32)
    before = float(np.square(residual - residual.mean(axis=0)).sum(axis=1).mean())
    codes = np.zeros((len(residual), levels + 1), np.int32)
    codebooks = np.zeros((levels, codebook_size, residual.shape[1]), np.float32)
    errors = np.zeros(levels)
    for level in range(levels):
        centres, codes[:, level] = _kmeans(residual, codebook_size, seed + level)
        codebooks[level, : len(centres)] = centres
        residual = residual - centres[codes[:, level]]
        errors[level] = float(np.square(residual).sum(axis=1).mean()) / before if before > 0 else 0.0
    codes[:, levels] = _number_equal_rows(codes[:, :levels])
    largest = int(codes[:, levels].max()) + 1
    if largest > codebook_size:
        raise DataError(
            f"{largest} items share the same {levels} codes, but the last digit tells only {codebook_size} apart; give "
            "items more distinct text, or use more levels, larger codebooks or the embedding tfidf+cooccurrence"
        )
    return SemanticIds(codes, np.asarray(item_ids, np.int64), codebook_size, codebooks, errors)


def _kmeans(points: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most ``size`` centres float32 [k, E] and the nearest one of each point, int32 [N]."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    size = min(size, len(points))
    whole = len(points) <= _WHOLE_KMEANS_ITEMS
    if whole:  # residuals that differ by rounding alone are one point
        size = min(size, len(np.unique(np.round(points, 5), axis=0)))
    model: Any
    if whole:
        model = KMeans(size, n_init=1, max_iter=100, random_state=seed)
    else:
        model = MiniBatchKMeans(size, n_init=1, batch_size=8192, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(limits=1):
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels = model.fit(points).labels_
    return model.cluster_centers_.astype(np.float32), labels.astype(np.int32)


def _number_equal_rows(rows: np.ndarray) -> np.ndarray:
    """Number equal rows 0, 1, 2, ... in the order in which they stand; int32 [N]."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    starts = np.flatnonzero(is_new)
    ranks = np.empty(len(rows), np.int32)
    ranks[order] = np.arange(len(rows)) - starts[np.cumsum(is_new) - 1]
    return ranks
