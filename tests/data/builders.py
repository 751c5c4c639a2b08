"""Data that the data tests build on."""

import pytest

from zoo.data.sources import SOURCES, PublicSource, SourceFile


def small_events(users: int = 6, items: int = 8, length: int = 5) -> list[tuple[int, int, int]]:
    """Every user consumes ``length`` items, one a minute, starting at another one."""
    return [(u, (u + step) % items, 1_000_000 + 60 * step) for u in range(users) for step in range(length)]


def fake_source(monkeypatch: pytest.MonkeyPatch, contents: dict[str, bytes], known: dict[str, str]) -> None:
    """Make "ml-100k" a data set whose files are ``contents`` and whose checksums are ``known``."""
    files = tuple(SourceFile(f"pkg/data/{name}", known[name]) for name in contents)
    monkeypatch.setitem(SOURCES, "ml-100k", PublicSource("pkg==1.0", files))
