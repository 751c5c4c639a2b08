"""The user's files, read as they are: RecBole atomic files or Parquet, interactions and optional item text.

Atomic files are tab-separated UTF-8 text whose header names each column as ``name:type`` (``user_id:token``,
``timestamp:float``). Nothing is dropped here; zoo.data.cleaning does that, and counts it.

Item identity follows from what the file says. Integers (an integer Parquet column, or atomic tokens that are all
canonical non-negative integers) are themselves the ids that a model hashes; strings are numbered by zoo.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from zoo.errors import ConfigError, DataError

ITEM_ID_LIMIT = 2**31
USER_COLUMNS = ("user_id", "user")
ITEM_COLUMNS = ("item_id", "item")
TIME_COLUMNS = ("timestamp",)

_CANONICAL = r"^(0|[1-9][0-9]{0,37})$"  # 38 digits fit Int128
_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)


@dataclass(frozen=True)
class Columns:
    """Column names chosen by the user; None looks for the usual ones (user_id or user, item_id or item, timestamp)."""

    user: str | None = None
    item: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class SourcePaths:
    """Where a data set lies: the interactions file and, where there is one, the file with the items' text."""

    events: Path
    items: Path | None


@dataclass(frozen=True)
class Interactions:
    """Raw interactions.

    ``events`` has the columns user and item (Int64 or String each) and time (Int64 or Float64), nulls where the file
    has none. ``texts`` has the columns token and text (String), or is None where no item file was given. ``time_unit``
    is "ms", "us" or "ns" where the file states it (a Parquet date or time), else None: seconds or finer, to be found
    from the values.
    """

    events: pl.DataFrame
    texts: pl.DataFrame | None
    time_unit: str | None

    @property
    def integer_items(self) -> bool:
        """Whether item tokens are integers and so are themselves the ids that a model hashes."""
        return self.events["item"].dtype == pl.Int64


def find_source(source: Path | str, items: Path | str | None = None) -> SourcePaths:
    """Find the interactions and item files of ``source``: a folder, or the path of an .inter or .parquet file.

    A folder holds one .inter file and optionally its .item, or one Parquet file and optionally items.parquet. ``items``
    names the item file where it lies elsewhere. Raises ``DataError`` where there is no, or no single, such file.
    """
    if not str(source).strip():
        raise DataError('the source is the empty text ""; give a public name such as ml-100k, a folder or a file')
    source = Path(source).expanduser()
    if not source.exists():
        raise DataError(f"the data {source} does not exist; give a public name such as ml-100k, a folder or a file")
    events, found = _in_folder(source) if source.is_dir() else (source, source.with_suffix(".item"))
    if events.suffix not in (".inter", ".parquet"):
        raise DataError(f'{events} ends in "{events.suffix}"; interactions are read from .inter and .parquet files')
    if items is None:
        return SourcePaths(events, found if found.is_file() and found != events else None)
    items = Path(items).expanduser()
    if not items.is_file():
        raise DataError(f"the item file {items} does not exist; give an .item or .parquet file, or leave it out")
    if items.suffix not in (".item", ".parquet"):
        raise DataError(f'{items} ends in "{items.suffix}"; item text is read from .item and .parquet files')
    return SourcePaths(events, items)


def read_interactions(paths: SourcePaths, columns: Columns | None = None) -> Interactions:
    """Read the files of ``paths``.

    Raises ``DataError`` for unreadable, truncated or empty files, missing columns, values of the wrong kind, times that
    are not numbers, and integer item ids outside 0 <= id < 2^31; ``ConfigError`` where one column is named for two.
    """
    columns = columns or Columns()
    path = paths.events
    atomic = path.suffix == ".inter"
    table = _read_atomic(path) if atomic else _read_parquet(path)
    names = {
        "user": _column(path, table, "user", columns.user, USER_COLUMNS),
        "item": _column(path, table, "item", columns.item, ITEM_COLUMNS),
        "timestamp": _column(path, table, "timestamp", columns.timestamp, TIME_COLUMNS),
    }
    _refuse_one_column_for_two(path, names)
    if table.height == 0:
        raise DataError(f"{path} holds a header but no events; give a file with at least one user of three events")
    time, unit = _times(path, table[names["timestamp"]])
    user = _keys(path, table[names["user"]], atomic)
    item = _keys(path, table[names["item"]], atomic)
    _check_item_ids(path, item, atomic)
    events = pl.DataFrame({"user": _narrow(user), "item": _narrow(item), "time": time})
    return Interactions(events, None if paths.items is None else _read_texts(paths.items, columns.item), unit)


def _in_folder(folder: Path) -> tuple[Path, Path]:
    if (folder / "dataset.json").exists():
        raise DataError(f"{folder} is a prepared dataset already; load it, or give the folder of the original files")
    items = folder / "items.parquet"
    atomic = _files(folder, "*.inter")
    found = atomic or [path for path in _files(folder, "*.parquet") if path != items]
    if len(found) != 1:
        listed = ", ".join(path.name for path in found) or "none"
        raise DataError(
            f"{folder} should hold one .inter or .parquet file of interactions, found {listed}; name the file"
        )
    if not atomic:
        return found[0], items
    texts = _files(folder, "*.item")
    return found[0], texts[0] if len(texts) == 1 else found[0].with_suffix(".item")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def _read_atomic(path: Path) -> pl.DataFrame:
    """Read every column of an atomic file as String, named without the types."""
    _refuse_empty(path)
    try:
        _check_header(path)
        table = pl.read_csv(path, separator="\t", quote_char=None, infer_schema=False)
        return table.rename({name: name.partition(":")[0] or name for name in table.columns})
    except _UNREADABLE as error:
        raise DataError(_unreadable(path, "a tab-separated UTF-8 atomic file", error)) from error


def _check_header(path: Path) -> None:
    """Refuse what is no text at all, and a header that names a column twice."""
    header = _header(path)
    if any(unicodedata.category(letter) in ("Cc", "Cs") for part in header for letter in part):
        example = "user_id:token" if path.suffix == ".inter" else "item_id:token"
        raise DataError(
            f"{path} is not UTF-8 text with a header such as {example}; "
            "write it again as tab-separated UTF-8 text, or name it .parquet where it is Parquet"
        )
    names = [part.partition(":")[0] for part in header]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f'{path} names the column "{_printable(twice[:40])}" {names.count(twice)} times, but each one may occur '
            "once; rename or remove the others"
        )


def _read_parquet(path: Path) -> pl.DataFrame:
    _refuse_empty(path)
    try:
        return pl.read_parquet(path, glob=False)
    except _UNREADABLE as error:
        raise DataError(_unreadable(path, "a whole Parquet file", error)) from error


def _refuse_empty(path: Path) -> None:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is an empty file of 0 bytes; write it again")


def _unreadable(path: Path, wanted: str, error: BaseException) -> str:
    reason = _printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
    return f"{path} cannot be read as {wanted} ({reason}); it is damaged, cut off or of another kind: write it again"


def _printable(text: str) -> str:
    """Return ``text`` with what a terminal cannot show, or would obey, replaced."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _column(path: Path, table: pl.DataFrame, role: str, chosen: str | None, usual: tuple[str, ...]) -> str:
    wanted = usual if chosen is None else (chosen,)
    for name in wanted:
        if name in table.columns:
            return name
    listed = ", ".join(_printable(name[:40]) for name in table.columns[:12])
    listed += ", ..." if len(table.columns) > 12 else ""
    asked = " or ".join(f'"{name}"' for name in wanted)
    raise DataError(
        f"{path} has no {role} column {asked}, it has {listed}; name the right one with --{role}-column NAME"
    )


def _refuse_one_column_for_two(path: Path, names: dict[str, str]) -> None:
    for name in names.values():
        roles = [role for role, other in names.items() if other == name]
        if len(roles) > 1:
            raise ConfigError(
                f'the column "{name}" of {path} is taken as the {" and the ".join(roles)}, but each is a column of its '
                f"own; name another one with {' or '.join(f'--{role}-column NAME' for role in roles)}"
            )


def _keys(path: Path, column: pl.Series, atomic: bool) -> pl.Series:
    """Return user or item keys as an integer or String column; empty strings become null."""
    name, dtype = column.name, column.dtype
    if dtype.is_integer():
        return column
    if dtype.is_float():  # a nullable integer column as pandas writes it
        whole = column.fill_nan(None)
        if (whole.drop_nulls() != whole.drop_nulls().floor()).any():
            raise DataError(f'column "{name}" of {path} holds fractions; it should hold integers or strings: cast it')
        return whole.cast(pl.Int64, strict=False)
    if dtype not in (pl.String, pl.Categorical, pl.Enum):
        raise DataError(f'column "{name}" of {path} is of type {dtype}; it should hold integers or strings: cast it')
    keys = column.cast(pl.String)
    keys = keys.set(keys == "", None)
    if atomic:
        tokens = keys.drop_nulls().unique()
        if len(tokens) and tokens.str.contains(_CANONICAL).all():
            return keys.cast(pl.Int128)
    return keys


def _narrow(keys: pl.Series) -> pl.Series:
    """Return integer keys as Int64, or as String where they do not fit."""
    if keys.dtype == pl.String:
        return keys
    narrow = keys.cast(pl.Int64, strict=False)
    return narrow if narrow.null_count() == keys.null_count() else keys.cast(pl.String)


def _check_item_ids(path: Path, item: pl.Series, atomic: bool) -> None:
    if item.dtype == pl.String:
        return
    value = item.cast(pl.Int64, strict=False)
    outside = item.filter(item.is_not_null() & (value.is_null() | (value < 0) | (value >= ITEM_ID_LIMIT)))
    if len(outside):
        way_out = "write them with a letter in front (i123)" if atomic else "store the column as strings"
        raise DataError(
            f"{outside.n_unique()} item ids of {path} are outside 0 <= id < 2^31, the first one is {outside[0]}; "
            f"{way_out}, and zoo numbers the items itself"
        )


def _times(path: Path, column: pl.Series) -> tuple[pl.Series, str | None]:
    """Return times as Int64 or Float64, null where missing or not finite, and their unit where the type states it."""
    name, dtype = column.name, column.dtype
    if dtype == pl.Date:
        return column.cast(pl.Datetime("ms")).to_physical(), "ms"
    if isinstance(dtype, pl.Datetime):  # as fine as the file has it, for what differs by less than 1 ms is no duplicate
        return column.to_physical(), dtype.time_unit
    if dtype.is_integer():
        return column.cast(pl.Int64, strict=False), None
    if dtype == pl.String:
        text = column.str.strip_chars()
        text = text.set(text == "", None)
        whole = text.cast(pl.Int64, strict=False)
        if whole.null_count() == text.null_count():
            return whole, None
        number = text.cast(pl.Float64, strict=False)
        wrong = text.filter(number.is_null() & text.is_not_null())
        if len(wrong):
            raise DataError(
                f'{len(wrong)} of {len(text)} times in column "{name}" of {path} are not numbers, the first one is '
                f'"{_printable(wrong[0][:40])}"; write times as seconds since 1970'
            )
    elif dtype.is_float():
        number = column.cast(pl.Float64)
    else:
        raise DataError(f'column "{name}" of {path} is of type {dtype}; write times as seconds since 1970')
    return number.set(~number.is_finite(), None), None


def _read_texts(path: Path, item_column: str | None) -> pl.DataFrame:
    """Read item text: every textual column joined by spaces, the year with them where it is a number or a date."""
    atomic = path.suffix == ".item"
    table = _read_atomic(path) if atomic else _read_parquet(path)
    key = _column(path, table, "item", item_column if item_column in table.columns else None, ITEM_COLUMNS)
    token = _keys(path, table[key], atomic)
    if atomic:
        kinds = dict(part.partition(":")[::2] for part in _header(path))
        textual = [name for name in table.columns if kinds.get(name, "token") != "float" or "year" in name.lower()]
    else:
        lists = [name for name, dtype in table.schema.items() if dtype == pl.List(pl.String)]
        table = table.with_columns(pl.col(lists).list.join(" ")) if lists else table
        textual = [
            name
            for name, dtype in table.schema.items()
            if dtype in (pl.String, pl.Categorical, pl.Enum)
            or ("year" in name.lower() and (dtype.is_numeric() or dtype.is_temporal()))
        ]
    parts = [pl.col(name).cast(pl.String) for name in textual if name != key]
    joined = pl.concat_str(parts, separator=" ", ignore_nulls=True) if parts else pl.lit("")
    texts = table.select(token=token.cast(pl.String), text=joined.fill_null(""))
    return texts.filter(pl.col("token").is_not_null())


def _header(path: Path) -> list[str]:
    with path.open("rb") as file:
        line = file.readline(1 << 20)
        while line in (b"\n", b"\r\n"):  # polars skips them too
            line = file.readline(1 << 20)
        return line.decode("utf-8-sig", "surrogateescape").rstrip("\r\n").split("\t")
