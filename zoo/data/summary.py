"""A prepared dataset on one screen: counts, what cleaning did, and how well the semantic IDs use their codes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zoo.data.dataset import Dataset


def describe(dataset: Dataset) -> Group:
    """Return tables of counts, cleaning and semantic-ID figures of ``dataset``, to print with rich."""
    parts: list[RenderableType] = [_counts(dataset), _cleaning(dataset), _semantic_ids(dataset)]
    if dataset.info["embedding"]["note"]:
        parts.append(Text(f"Note: {dataset.info['embedding']['note']}.", style="yellow"))
    parts.append(Text(f"Written to {dataset.path}", style="dim", overflow="fold"))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=len(columns) > 2)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _counts(dataset: Dataset) -> Table:
    counts = dataset.info["counts"]
    per_user = counts["events_per_user"]
    table = _table(dataset.name, "", "")
    for row in ("users", "items", "events"):
        table.add_row(row, f"{counts[row]:,}")
    table.add_row(
        "events per user, min / median / p90 / max",
        " / ".join(f"{per_user[key]:,g}" for key in ("min", "median", "p90", "max")),
    )
    return table


def _cleaning(dataset: Dataset) -> Table:
    """Show every count of the cleaning report; zeros stay, so that the absence of a problem is seen too."""
    table = _table("Cleaning", "", "")
    for field, value in dataset.info["cleaning"].items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(field.replace("_", " "), shown, style=None if value else "dim")
    return table


def _semantic_ids(dataset: Dataset) -> Group:
    figures, embedding = dataset.info["semantic_ids"], dataset.info["embedding"]
    title = f"Semantic IDs ({embedding['method']}, {embedding['dims']} dimensions)"
    table = _table(title, "level", "codes used", "perplexity", "error left")
    size = figures["codebook_size"]
    per_level = zip(figures["code_use"], figures["perplexity"], figures["quantisation_error"], strict=True)
    for level, (use, perplexity, error) in enumerate(per_level, start=1):
        table.add_row(str(level), f"{round(use * size)} of {size}", f"{perplexity:.1f}", f"{error:.3f}")
    collisions = Text(
        f"{figures['collision_rate']:.1%} of items share their levels with another one, at most "
        f"{figures['largest_collision_group']} in a group"
    )
    return Group(table, collisions)
