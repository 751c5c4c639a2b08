"""``python -m benchmarks.plot``: latency of one layer against history length, from results/gbla_layer.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gbla_layer
from zoo import files
from zoo.errors import DataError, ZooError

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gbla_layer.json"
IMAGE = ROOT / "docs" / "images" / "gbla_layer.png"
INK = "#7d8590"
"""A grey that reads on white and on black, since the background is transparent."""

LINES = {
    gbla_layer.FA3: ("softmax, FlashAttention-3", "#e07a3f", "s", "-"),
    gbla_layer.CUDNN: ("softmax, cuDNN", "#b98a2f", "^", "-"),
    gbla_layer.COMPILED: ("GBLA, torch.compile", "#8f7ad1", "D", "-"),
    gbla_layer.OURS: ("GBLA, our kernels", "#2f9e77", "o", "-"),
}


_COLUMNS = {"length", "graph_ms", "limit_ms", "batch", "d_model", "num_heads", "head_dim", "dtype"}


def draw(result: Path, image: Path) -> Path:
    """Draw the figure as PNG and return its path.

    Raises:
        DataError: the result is missing or is not one of gbla_layer.
    """
    # Imported here: the registry must not need matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    content = _read(result)
    rows = sorted(content["rows"], key=lambda row: row["length"])
    style: dict[str, Any] = {"font.size": 11, "savefig.transparent": True}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    with plt.rc_context(style):  # type: ignore[arg-type]
        figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
        for name, (label, colour, marker, line) in LINES.items():
            points = [(row["length"], row["graph_ms"][name]["median"]) for row in rows if name in row["graph_ms"]]
            if points:
                axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, label=label, linewidth=2)
        limit = [(row["length"], row["limit_ms"]) for row in rows]
        axes.plot(*zip(*limit, strict=True), "--", color=INK, label="limit: projections, each tensor moved once")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["length"] for row in rows], [f"{row['length']:,}" for row in rows])
        axes.set_xlabel("history length")
        axes.set_ylabel("milliseconds a layer")
        axes.set_title(_title(content), fontsize=10)
        axes.grid(True, which="major", color=INK, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9.5)
        image.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(image) as path:
            figure.savefig(path, dpi=160, format="png")
        plt.close(figure)
    return image


def _read(result: Path) -> dict[str, Any]:
    try:
        content = json.loads(result.read_text())
        complete = all(set(row) >= _COLUMNS for row in content["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{result} is no result of gbla_layer ({error}); run `python -m benchmarks.run gbla_layer`"
        ) from error
    if not complete or not content["rows"]:
        raise DataError(f"{result} holds no rows of gbla_layer; run `python -m benchmarks.run gbla_layer`")
    return content


def _title(content: dict[str, Any]) -> str:
    row, machine = content["rows"][0], content.get("machine", {})
    gpu = (machine.get("gpu") or "unknown GPU").split(",")[0]
    sizes = f"B {row['batch']}, d {row['d_model']}, H {row['num_heads']}, D {row['head_dim']}, {row['dtype']}"
    return f"{gpu}, {sizes}, forward in a CUDA graph"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("--result", type=Path, default=RESULT, help="%(default)s")
    parser.add_argument("--out", type=Path, default=IMAGE, help="%(default)s")
    chosen = parser.parse_args(arguments)
    try:
        print(draw(chosen.result, chosen.out))
    except ZooError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
