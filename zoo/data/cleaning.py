"""From raw interactions to dense, sorted events, with every row that was dropped or changed counted.

The order: rows without a user, item or time; exact duplicates; users with too few events; stable sort by time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from zoo.data.reading import Interactions
from zoo.errors import DataError

MIN_EVENTS = 3
"""Events a user needs: one each to train on, to validate with and to test with."""

MAX_BAD_SHARE = 0.05
_LATEST_SECOND = 1e11
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class CleaningReport:
    """What cleaning saw, dropped and changed; every field is a count except the time unit of the file."""

    rows_read: int
    rows_without_user: int
    rows_without_item: int
    rows_without_time: int
    rows_dropped_incomplete: int
    rows_dropped_duplicate: int
    users_dropped_one_event: int
    users_dropped_too_short: int
    events_dropped_with_users: int
    events_out_of_order: int
    time_unit: str
    items_without_text: int
    catalogue_items_without_events: int
    catalogue_rows_duplicate: int


@dataclass(frozen=True)
class CleanEvents:
    """Dense events, sorted by user and then time.

    ``user_offsets`` int64 [U+1], ``items`` int32 [E], ``timestamps`` int64 [E] in seconds, ``user_tokens`` [U],
    ``item_tokens`` [N], ``item_ids`` int64 [N] (what a model hashes), ``texts`` [N] ("" where there is none).
    """

    user_offsets: np.ndarray
    items: np.ndarray
    timestamps: np.ndarray
    user_tokens: list[str]
    item_tokens: list[str]
    item_ids: np.ndarray
    texts: list[str]
    report: CleaningReport


def clean(interactions: Interactions) -> CleanEvents:
    """Clean, number and sort ``interactions``.

    Users and items are numbered in the sorted order of their tokens (by value where tokens are integers). Raises
    ``DataError`` when more than 5% of the rows are incomplete, times mix units, or no user has three events.
    """
    raw = interactions.events
    events = _complete_rows(raw)
    complete = events.height
    events = events.unique(maintain_order=True, keep="first")
    duplicates = complete - events.height
    unit = interactions.time_unit or _time_unit(events["time"])

    lengths = events.group_by("user").len()
    short = lengths.filter(pl.col("len") < MIN_EVENTS)
    if short.height == lengths.height:
        raise DataError(
            f"all {lengths.height} users have fewer than {MIN_EVENTS} events, so nothing is left to train, validate "
            "and test with; give longer histories"
        )
    events = events.join(short, on="user", how="anti", maintain_order="left")
    backwards = events.select((pl.col("time") < pl.col("time").shift(1).over("user")).sum()).item()

    users = events.select(pl.col("user").unique().sort()).with_row_index("user_index")
    items = events.select(pl.col("item").unique().sort()).with_row_index("item_index")
    events = events.join(users, on="user", maintain_order="left").join(items, on="item", maintain_order="left")
    events = events.sort("user_index", "time", maintain_order=True)
    texts, text_counts = _texts(items, interactions.texts)

    counts = np.bincount(events["user_index"].to_numpy(), minlength=users.height)
    report = CleaningReport(
        rows_read=raw.height,
        rows_without_user=raw["user"].null_count(),
        rows_without_item=raw["item"].null_count(),
        rows_without_time=raw["time"].null_count(),
        rows_dropped_incomplete=raw.height - complete,
        rows_dropped_duplicate=duplicates,
        users_dropped_one_event=short.filter(pl.col("len") == 1).height,
        users_dropped_too_short=short.height,
        events_dropped_with_users=int(short["len"].sum()),
        events_out_of_order=int(backwards or 0),
        time_unit=unit,
        **text_counts,
    )
    return CleanEvents(
        user_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        items=events["item_index"].to_numpy().astype(np.int32),
        timestamps=np.floor_divide(events["time"].to_numpy(), _PER_SECOND[unit]).astype(np.int64),
        user_tokens=users["user"].cast(pl.String).to_list(),
        item_tokens=items["item"].cast(pl.String).to_list(),
        item_ids=items["item" if interactions.integer_items else "item_index"].to_numpy().astype(np.int64),
        texts=texts,
        report=report,
    )


def _complete_rows(raw: pl.DataFrame) -> pl.DataFrame:
    events = raw.drop_nulls()
    bad = raw.height - events.height
    if bad > MAX_BAD_SHARE * raw.height:
        kinds = ", ".join(f"{raw[name].null_count()} without a {name}" for name in ("user", "item", "time"))
        raise DataError(
            f"{bad} of {raw.height} rows ({bad / raw.height:.1%}) are incomplete ({kinds}), but at most "
            f"{MAX_BAD_SHARE:.0%} may be dropped; repair the file or remove those rows yourself"
        )
    return events


def _time_unit(times: pl.Series) -> str:
    """Find the unit from the size of the values: as seconds, all dates up to the year 5138 are below 1e11."""
    typical = float(np.median(np.abs(times.to_numpy())))
    unit = next((unit for unit in ("ns", "us", "ms") if typical > _LATEST_SECOND * _PER_SECOND[unit] / 1000), "s")
    largest = float(np.abs(times.to_numpy()).max())
    if largest > _LATEST_SECOND * _PER_SECOND[unit]:
        raise DataError(
            f"most times are of the size of {unit} since 1970, but the largest one is {largest:.6g}; the column mixes "
            "units or holds wrong values: write all times in seconds"
        )
    return unit


def _texts(
    items: pl.DataFrame, texts: pl.DataFrame | None
) -> tuple[
    list[str],
    dict[Literal["items_without_text", "catalogue_items_without_events", "catalogue_rows_duplicate"], int],
]:
    tokens = items.select(token=pl.col("item").cast(pl.String))
    if texts is None:
        texts = pl.DataFrame(schema={"token": pl.String, "text": pl.String})
    first = texts.unique("token", keep="first", maintain_order=True)
    joined = tokens.join(first, on="token", how="left", maintain_order="left")["text"].fill_null("").str.strip_chars()
    return joined.to_list(), {
        "items_without_text": int((joined == "").sum()),
        "catalogue_items_without_events": first.join(tokens, on="token", how="anti").height,
        "catalogue_rows_duplicate": texts.height - first.height,
    }
