"""What the command line needs besides its verbs: consoles, progress, and the reading of option values.

Results go to ``out``, progress and errors to ``err``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zoo.errors import ConfigError

out = Console(width=None if sys.stdout.isatty() else 120)  # a pipe or file has no width of its own
err = Console(stderr=True)


@contextmanager
def phases() -> Iterator[Any]:
    """Yield a function that shows a phrase beside a spinner; a log line each where standard error is no terminal."""
    if not err.is_terminal:
        yield lambda phrase, *rest: err.print(f"  {phrase}", style="dim", highlight=False, markup=False)
        return
    with err.status("starting") as status:
        yield lambda phrase, *rest: status.update(escape(phrase))


@contextmanager
def counted(title: str) -> Iterator[Any]:
    """Yield a function of a phrase, things done and things in all, which moves a progress bar."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def count(phrase: str, done: int, total: int) -> None:
            progress.update(task, description=escape(phrase), completed=done, total=total)

        yield count


def jsonable(value: Any) -> Any:
    """Return the JSON form of a result."""
    if hasattr(value, "to_json"):
        return value.to_json()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    print(json.dumps(value, indent=2, default=str))


def words(option: str, text: str | None) -> tuple[str, ...] | None:
    """Read comma-separated words; None where the option was not given."""
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ConfigError(f"{option} is {text!r}; give at least one value, or leave the option out")
    return words


def integers(option: str, text: str) -> tuple[int, ...]:
    """Read comma-separated whole numbers."""
    try:
        return tuple(int(word) for word in words(option, text) or ())
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; give whole numbers with commas between, such as 64,128,256") from None


def overrides(assignments: Sequence[str] | None, option: str = "--set") -> dict[str, Any]:
    """Read ``field=value`` words: numbers, true/false, else text."""
    overrides: dict[str, Any] = {}
    for assignment in assignments or ():
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise ConfigError(f"{option} {assignment!r} is not FIELD=VALUE, such as num_layers=6")
        try:
            overrides[name] = json.loads(text)
        except ValueError:
            overrides[name] = text
    return overrides
