"""Seconds, peak memory and sizes of exporting and building a preset with random weights, a process for each verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zoo.errors import ZooError


def measure(
    preset: str = "gbla-yandex",
    length: int = 8192,
    dtype: str = "fp16",
    batch: str = "1,1,8",
    targets: str = "sm89",
    overrides: str = "",
) -> list[dict[str, Any]]:
    """Run ``zoo init``, ``export`` and ``build`` and return a row for each.

    Args:
        preset: of the zoo.
        length: history length of the engines.
        dtype: of graphs and engines.
        batch: smallest, usual and largest.
        targets: comma-separated.
        overrides: comma-separated FIELD=VALUE.
    """
    settings = [word for assignment in overrides.split(",") if assignment for word in ("--set", assignment)]
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(Path(folder) / "bundle")
        build = ["build", bundle, "--dtype", dtype, "--lengths", str(length), "--batch", batch, "--targets", targets]
        rows = [
            _run("init", preset, bundle, *settings),
            _run("export", bundle, "--dtypes", dtype),
            _run(*build),
        ]
        rows[0]["files"] = _sizes(Path(bundle), "*.safetensors")
        rows[1]["files"] = _sizes(Path(bundle), "onnx/*")
        rows[2]["files"] = _sizes(Path(bundle), "engines/*/*/*.engine")
    return [
        {"preset": preset, "length": length, "dtype": dtype, "batch": batch, "overrides": overrides, **row}
        for row in rows
    ]


def _run(*words: str) -> dict[str, Any]:
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "zoo.cli", *words, "--json"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ZooError(f"zoo {' '.join(words)} exited with {process.returncode}")
    return {
        "verb": words[0],
        "seconds": round(time.perf_counter() - started, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "result": json.loads(output),
    }


def _sizes(folder: Path, pattern: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob(pattern))}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'verb':8} {'seconds':>8} {'peak GiB':>9}  files (MB)"]
    for row in rows:
        files = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in row["files"].items())
        lines.append(f"{row['verb']:8} {row['seconds']:8.1f} {row['peak_gib']:9.2f}  {files}")
    return "\n".join(lines)
