"""Items as vectors: TF-IDF of their text with truncated SVD, or of who consumed them, for semantic IDs.

Every row has unit length, so that k-means compares directions (latent semantic analysis: Deerwester et al. 1990). The
result depends on the inputs and the seed only: BLAS is held to one thread, whatever the machine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from zoo.data.settings import check_seed, check_whole
from zoo.errors import ConfigError

Embedding = Literal["tfidf", "cooccurrence", "tfidf+cooccurrence"]


@dataclass(frozen=True)
class ItemEmbeddings:
    """``values`` float32 [N, E] with rows of length 1, the method that made them, and a note where it had to change."""

    values: np.ndarray
    method: Embedding
    note: str = ""


def embed_items(
    texts: list[str], interactions: Any, *, method: Embedding = "tfidf+cooccurrence", dims: int = 64, seed: int = 0
) -> ItemEmbeddings:
    """Embed N items by their ``texts`` [N], by ``interactions``, or by both side by side.

    ``interactions`` is a sparse [U, N] matrix of ones, one for every user and item of the *training* events. ``dims``
    is the width of each part, less where the data has less to say. An item without text takes the mean vector of the
    users who consumed it; where no item has text, co-occurrence is used for all and the note says so.

    Raises ``ConfigError`` for an unknown method, ``dims`` below 1 or an impossible seed.
    """
    check_embedding(method, dims)
    check_seed(seed)
    import sklearn.decomposition
    import sklearn.feature_extraction.text  # noqa: F401  (threadpool_limits reaches only libraries that are loaded)
    from threadpoolctl import threadpool_limits

    random = np.random.default_rng(seed)
    with threadpool_limits(limits=1):
        if method == "cooccurrence":
            return ItemEmbeddings(_cooccurrence(interactions, dims, seed, random), method)
        by_text = _tfidf(texts, interactions, dims, seed, random)
        if by_text is None:
            note = f'no item has text, so "cooccurrence" of the training events was used in place of "{method}"'
            return ItemEmbeddings(_cooccurrence(interactions, dims, seed, random), "cooccurrence", note)
        if method == "tfidf":
            return ItemEmbeddings(by_text, method)
        both = np.concatenate([by_text, _cooccurrence(interactions, dims, seed, random)], axis=1)
        return ItemEmbeddings(both / np.float32(np.sqrt(2)), method)


def check_embedding(method: str, dims: int) -> None:
    """Raise ``ConfigError`` for an unknown embedding or a width below 1."""
    if method not in get_args(Embedding):
        raise ConfigError(f'no embedding is called "{method}"; choose one of {", ".join(get_args(Embedding))}')
    check_whole(dims=dims)
    if dims < 1:
        raise ConfigError(f"embeddings of {dims} dimensions were asked for; at least 1 is needed")


def _tfidf(texts: list[str], interactions: Any, dims: int, seed: int, random: np.random.Generator) -> np.ndarray | None:
    """Return text embeddings float32 [N, E], or None where no text holds a single word."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    # One-letter words count: "M" and "Z" are films.
    vectorizer = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", sublinear_tf=True, dtype=np.float32)
    try:
        weights = vectorizer.fit_transform(texts)
    except ValueError:  # an empty vocabulary
        return None
    values = _svd(weights, dims, seed)
    silent = np.flatnonzero(np.diff(weights.indptr) == 0)
    if len(silent):
        of_users = interactions @ values / np.maximum(interactions.sum(axis=1), 1).reshape(-1, 1)
        values[silent] = interactions.T.tocsr()[silent] @ of_users
    return _unit_rows(values, random)


def _cooccurrence(interactions: Any, dims: int, seed: int, random: np.random.Generator) -> np.ndarray:
    """Embed items by their users, each user weighing 1/sqrt(events) so that the busiest ones do not decide alone."""
    from scipy import sparse

    weight = 1 / np.sqrt(np.maximum(np.asarray(interactions.sum(axis=1)).ravel(), 1))
    weighted = (sparse.diags_array(weight) @ interactions).T.tocsr().astype(np.float32)
    return _unit_rows(_svd(weighted, dims, seed), random)


def _svd(rows: Any, dims: int, seed: int) -> np.ndarray:
    """Return the rows of a sparse matrix in their ``dims`` main directions, or as they are where there are fewer."""
    if min(rows.shape) <= dims:
        if rows.shape[1] <= dims:
            return rows.toarray().astype(np.float32)
        dims = min(rows.shape)
    from sklearn.decomposition import TruncatedSVD

    return TruncatedSVD(dims, random_state=seed).fit_transform(rows).astype(np.float32)


def _unit_rows(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Scale rows to length 1; a row of zeros, an item nothing is known about, gets a random direction."""
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    unknown = np.flatnonzero(lengths.ravel() < 1e-6)
    values[unknown] = random.standard_normal((len(unknown), values.shape[1]))
    lengths[unknown] = np.linalg.norm(values[unknown], axis=1, keepdims=True)
    return (values / np.maximum(lengths, 1e-30)).astype(np.float32)
