"""Tables of a result as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plain import COMPILED


def render(headers: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> str:
    """Return a Markdown table with aligned columns, and notes under it. ``None`` was not measured and shows as -."""
    cells = [list(headers), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:], *([""] if notes else []), *notes])


def times(value: float | None) -> str | None:
    """Return a ratio as text, ``3.9x``."""
    return None if value is None else f"{value:.2f}x"


def share(value: float | None) -> str | None:
    """Return a share as text, ``85%``."""
    return None if value is None else f"{100 * value:.0f}%"


def median(found: Mapping[str, Any], name: str) -> float | None:
    """Return the median of a timing in a result, or None where the candidate was not timed."""
    return found[name]["median"] if name in found else None


def integers(text: str) -> list[int]:
    """Read comma-separated whole numbers; none of an empty text."""
    return [int(word) for word in text.split(",") if word.strip()]


def modes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the modes of torch.compile that were timed in any row, in order."""
    names = (name for row in rows for name in row["graph_ms"] if name.startswith(f"{COMPILED} "))
    return list(dict.fromkeys(name.removeprefix(f"{COMPILED} ") for name in names))


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the notes of all rows, each once, in order."""
    return list(dict.fromkeys(note for row in rows for note in row["notes"]))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
