"""The prepared dataset: a folder that is written whole, and the arrays that training and evaluation slice.

    dataset.json               schema, inputs, checksums, counts, cleaning report, semantic-ID figures; written last
    events.parquet             user int32, item int32, timestamp int64 [s]; sorted by user, then time
    items.parquet              item int32, item_id int64, token, text
    users.parquet              user int32, token
    semantic_ids.safetensors   item <-> code table, codebooks, trie

Leave-one-out by time: a user's last event is the test target, the one before it the valid target, the rest trains.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from zoo.data.cleaning import MIN_EVENTS, CleanEvents
from zoo.data.semantic_ids import SemanticIds
from zoo.errors import ConfigError, DataError
from zoo.files import replacing, sha256_of, write_json

SCHEMA = 1
MANIFEST = "dataset.json"
_TABLES = ("events.parquet", "items.parquet", "users.parquet", "semantic_ids.safetensors")

SplitName = Literal["train", "valid", "test"]
_FROM_END = {"train": 3, "valid": 2, "test": 1}


class Split(NamedTuple):
    """One history and target for each user, as positions in ``Dataset.items``.

    ``start`` int64 [U] and ``end`` int64 [U] (exclusive) bound the history; ``targets`` int32 [U] holds the items at
    ``end``.
    """

    start: np.ndarray
    end: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, eq=False)
class Dataset:
    """Cleaned events of U users over N items, grouped by user and sorted by time.

    ``user_offsets`` int64 [U + 1]; ``items`` int32 [E], dense item indices; ``timestamps`` int64 [E] in seconds;
    ``item_ids`` int64 [N], what a model hashes; ``item_tokens`` [N], what the source calls the items; ``info``, the
    content of dataset.json. Every user has at least three events.
    """

    path: Path
    name: str
    user_offsets: np.ndarray
    items: np.ndarray
    timestamps: np.ndarray
    item_ids: np.ndarray
    item_tokens: list[str]
    semantic_ids: SemanticIds
    info: dict[str, Any]

    @property
    def num_users(self) -> int:
        """U, the number of users."""
        return len(self.user_offsets) - 1

    @property
    def num_items(self) -> int:
        """N, the number of items that occur in events."""
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        """E, the number of events."""
        return len(self.items)

    def train_length(self, user: int) -> int:
        """Return how many events of ``user`` may be trained on: all but the last two."""
        return int(self.user_offsets[user + 1] - self.user_offsets[user]) - 2

    def train_lengths(self, held_out: int = 2) -> np.ndarray:
        """Return how many events of every user are there to train on, int64 [U]: all but the newest ``held_out``."""
        return np.diff(self.user_offsets) - held_out

    def history_end(self, split: SplitName) -> np.ndarray:
        """Return where each user's history ends, int64 [U], exclusive; ``items`` there holds the target.

        A history starts at ``user_offsets[user]``. For "train" it is all training events but the last one, which is the
        target; that history may be empty, those of "valid" and "test" are not.
        """
        if split not in get_args(SplitName):
            raise ConfigError(f'no split is called "{split}"; choose one of {", ".join(get_args(SplitName))}')
        return self.user_offsets[1:] - _FROM_END[split]

    def targets(self, split: SplitName) -> np.ndarray:
        """Return the target of each user, dense item index int32 [U]."""
        return self.items[self.history_end(split)]

    def split(self, name: SplitName) -> Split:
        """Return start, end and target of each user's history under split ``name``."""
        end = self.history_end(name)
        return Split(self.user_offsets[:-1], end, self.items[end])

    def history_and_target(self, user: int, split: SplitName) -> tuple[np.ndarray, int]:
        """Return the history of ``user``, int32 [length] without a copy, and the target's dense item index."""
        end = int(self.history_end(split)[user])
        return self.items[self.user_offsets[user] : end], int(self.items[end])

    def item_texts(self) -> list[str]:
        """Read the text of every item, "" where there is none."""
        return _read_table(self.path / "items.parquet")["text"].to_list()

    def user_tokens(self) -> list[str]:
        """Read what the source calls each user."""
        return _read_table(self.path / "users.parquet")["token"].to_list()


def write_dataset(
    path: Path, name: str, clean: CleanEvents, ids: SemanticIds, *, inputs: dict[str, Any], embedding: dict[str, Any]
) -> None:
    """Write the folder of a dataset, dataset.json last, so that a killed run leaves nothing that loads.

    ``inputs`` is what the dataset depends on; ``embedding`` says how items were embedded.
    """
    import polars as pl

    import zoo

    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    lengths = np.diff(clean.user_offsets)
    users = np.arange(len(lengths), dtype=np.int32)
    items = np.arange(len(clean.item_ids), dtype=np.int32)
    tables: dict[str, dict[str, Any]] = {
        "events.parquet": {
            "user": np.repeat(users, lengths),
            "item": clean.items,
            "timestamp": clean.timestamps,
        },
        "items.parquet": {
            "item": items,
            "item_id": clean.item_ids,
            "token": pl.Series(clean.item_tokens, dtype=pl.String),
            "text": pl.Series(clean.texts, dtype=pl.String),
        },
        "users.parquet": {"user": users, "token": pl.Series(clean.user_tokens, dtype=pl.String)},
    }
    for file, columns in tables.items():
        with replacing(path / file) as temporary:
            pl.DataFrame(columns).write_parquet(temporary)
    ids.save(path / "semantic_ids.safetensors")
    manifest = {
        "schema": SCHEMA,
        "name": name,
        "zoo_version": zoo.__version__,
        "inputs": inputs,
        "files": {file: sha256_of(path / file) for file in _TABLES},
        "counts": {
            "users": len(lengths),
            "items": len(items),
            "events": len(clean.items),
            "events_per_user": {
                "min": int(lengths.min()),
                "median": float(np.median(lengths)),
                "p90": float(np.percentile(lengths, 90)),
                "max": int(lengths.max()),
            },
        },
        "cleaning": asdict(clean.report),
        "embedding": embedding,
        "semantic_ids": {"levels": ids.num_digits - 1, "codebook_size": ids.codebook_size, **ids.figures()},
    }
    write_json(path / MANIFEST, manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read dataset.json in ``path``; raises ``DataError`` where it is missing, damaged or of another schema."""
    if path.is_file():
        raise DataError(
            f"{path} is a file, but the folder of a prepared dataset is wanted; give that folder, or prepare raw files "
            "first with `zoo data FILE`"
        )
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} is no prepared dataset, it has no {MANIFEST}; prepare the data first") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path / MANIFEST} is damaged ({error}); prepare the data again") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema}, but this zoo reads schema {SCHEMA}; prepare the data again")
    return manifest


def load_dataset(path: Path | str) -> Dataset:
    """Open the prepared dataset in the folder ``path``, every file checked against its checksum.

    Raises ``DataError`` where the folder is missing, incomplete, damaged or of another schema.
    """
    if not str(path).strip():
        raise DataError('the dataset is the empty text ""; give the folder that `zoo data` wrote')
    path = Path(path).expanduser()
    manifest = read_manifest(path)
    for file in _TABLES:
        if not (path / file).is_file():
            raise DataError(f"{path} is incomplete, {file} is missing; prepare the data again")
        if sha256_of(path / file) != manifest.get("files", {}).get(file):
            raise DataError(f"{path / file} is damaged, its checksum is not that of {MANIFEST}; prepare the data again")
    events = _read_table(path / "events.parquet")
    items = _read_table(path / "items.parquet")
    ids = SemanticIds.load(path / "semantic_ids.safetensors")
    lengths = np.bincount(events["user"].to_numpy())
    item_ids = items["item_id"].to_numpy().astype(np.int64)
    if lengths.min() < MIN_EVENTS or not np.array_equal(ids.item_ids, item_ids):
        raise DataError(f"the files of {path} do not belong together; prepare the data again")
    return Dataset(
        path=path,
        name=manifest["name"],
        user_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        items=_own(events["item"].to_numpy(), np.int32),
        timestamps=_own(events["timestamp"].to_numpy(), np.int64),
        item_ids=item_ids,
        item_tokens=items["token"].to_list(),
        semantic_ids=ids,
        info=manifest,
    )


def _read_table(path: Path) -> Any:
    import polars as pl

    try:
        return pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); prepare the data again") from error


def _own(array: np.ndarray, dtype: type) -> np.ndarray:
    """Copy out of polars' memory, which is read-only and makes torch.from_numpy warn."""
    return np.array(array, dtype=dtype)
