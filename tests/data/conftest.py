"""Small real files for the data tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Row = Sequence[object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRT_ZOO_CACHE", str(folder))
    return folder


@pytest.fixture
def write_atomic(tmp_path: Path) -> Callable[..., Path]:
    """Write an atomic file and return its path; None becomes an empty field."""

    def write(rows: Sequence[Row], header: str = "user_id:token item_id:token timestamp:float", name: str = "d.inter"):
        lines = ["\t".join(header.split(" "))]
        lines += ["\t".join("" if value is None else str(value) for value in row) for row in rows]
        path = tmp_path / "source" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
