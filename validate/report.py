"""What validation found: checks, their figures, JSON and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Attributes:
        kind: ``parity``, ``weights``, ``engine`` or ``file``.
        part: the part that was looked at.
        dtype: of the graph.
        subject: what exactly: a length, a file.
        ok: the answer.
        detail: one sentence, most of all when the answer is no.
        figures: numbers behind the answer.
    """

    kind: str
    part: str
    dtype: str
    subject: str
    ok: bool
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All checks of one bundle."""

    bundle: str
    checks: tuple[Check, ...]
    not_run: tuple[str, ...]
    environment: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there was something to check and every check passed."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"ok": self.ok, **asdict(self)}

    def table(self) -> Table:
        """Return a table, one line a part, dtype and kind, with the worst figures; failures line by line."""
        table = Table(title=f"Parity of {self.bundle}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
        for column in ("part", "dtype", "check", "tried", "worst error (rms / max)", "of the allowance", "result"):
            table.add_column(column, justify="right" if column in ("tried", "of the allowance") else "left")
        for (part, dtype, kind), group in self._grouped().items():
            failed = [check for check in group if not check.ok]
            rms, maximum, share = _worst(group)
            result = "[green]ok[/]" if not failed else f"[red]{len(failed)} failed[/]"
            table.add_row(part, dtype, kind, str(len(group)), f"{rms} / {maximum}" if rms else "", share, result)
            for check in failed:
                table.add_row("", "", "", "", f"[red]{check.subject}[/]", "", check.detail)
        return table

    def _grouped(self) -> dict[tuple[str, str, str], list[Check]]:
        groups: dict[tuple[str, str, str], list[Check]] = {}
        for check in self.checks:
            groups.setdefault((check.part, check.dtype, check.kind), []).append(check)
        return groups


def _worst(checks: Sequence[Check]) -> tuple[str, str, str]:
    figures = [check.figures for check in checks if "rms" in check.figures]
    if not figures:
        return "", "", ""
    worst = [max(row[key] for row in figures) for key in ("rms", "max", "share")]
    return f"{worst[0]:.1e}", f"{worst[1]:.1e}", f"{worst[2]:.0%}"
