"""``python -m benchmarks.plot NAME``: the figure of one result, from results/NAME.json to docs/images/NAME.png."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import delta_schedule, gbla_layer, planted_repetition, sinkrec_cost
from zoo import files, sink_view
from zoo.errors import DataError, ZooError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
INK = "#7d8590"
"""A grey that reads on white and on black, since the background is transparent."""

LINES = {
    gbla_layer.FA3: ("softmax, FlashAttention-3", "#e07a3f", "s", "-"),
    gbla_layer.CUDNN: ("softmax, cuDNN", "#b98a2f", "^", "-"),
    gbla_layer.COMPILED: ("GBLA, torch.compile", "#8f7ad1", "D", "-"),
    gbla_layer.OURS: ("GBLA, our kernels", "#2f9e77", "o", "-"),
}


class Plot(NamedTuple):
    """How a result is drawn: inches, the columns that its rows need, and what puts them on a figure."""

    size: tuple[float, float]
    columns: frozenset[str]
    put: Callable[[Figure, Mapping[str, Any]], None]


def draw(name: str, result: Path, image: Path) -> Path:
    """Draw the figure of a benchmark as PNG and return its path.

    Raises:
        DataError: the result is missing or is not one of this benchmark.
    """
    # Imported here: the registry must not need matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plot = PLOTS[name]
    content = _read(name, result, plot.columns)
    style: dict[str, Any] = {"font.size": 11, "savefig.transparent": True}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    with plt.rc_context(style):  # type: ignore[arg-type]
        figure = plt.figure(figsize=plot.size, layout="constrained")
        plot.put(figure, content)
        image.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(image) as path:
            figure.savefig(path, dpi=160, format="png")
        plt.close(figure)
    return image


def _read(name: str, result: Path, columns: frozenset[str]) -> dict[str, Any]:
    command = f"python -m benchmarks.run {name}"
    try:
        content = json.loads(result.read_text())
        complete = all(set(row) >= columns for row in content["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{result} is no result of {name} ({error}); run `{command}`") from error
    if not complete or not content["rows"]:
        raise DataError(f"{result} holds no rows of {name}; run `{command}`")
    return content


def _layer(figure: Figure, content: Mapping[str, Any]) -> None:
    """Latency of one layer against history length."""
    rows = sorted(content["rows"], key=lambda row: row["length"])
    axes = figure.subplots()
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
    row = rows[0]
    sizes = f"B {row['batch']}, d {row['d_model']}, H {row['num_heads']}, D {row['head_dim']}, {row['dtype']}"
    axes.set_title(f"{_gpu(content)}, {sizes}, forward in a CUDA graph", fontsize=10)
    axes.grid(True, which="major", color=INK, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9.5)


def _schedule(figure: Figure, content: Mapping[str, Any]) -> None:
    """What cutting rows into segments gains over B x H and T, a panel a head width."""
    rows = content["rows"]
    dims, lengths, pairs = (sorted({row[name] for row in rows}) for name in ("head_dim", "length", "num_heads"))
    panels = figure.subplots(1, len(dims), squeeze=False, sharey=True)[0]
    for axes, dim in zip(panels, dims, strict=True):
        gains = [[float("nan")] * len(lengths) for _ in pairs]
        for row in (row for row in rows if row["head_dim"] == dim):
            y, x = pairs.index(row["num_heads"]), lengths.index(row["length"])
            (chosen, took), (best, least) = delta_schedule.chosen(row), delta_schedule.best(row)
            gains[y][x] = row["graph_ms"]["1"]["median"] / took
            lost = f"\n({best}: {took / least - 1:+.0%})" if took > 1.03 * least else ""
            ink = "white" if gains[y][x] > 3 else "black"
            axes.text(x, y, f"{chosen}{lost}", ha="center", va="center", fontsize=7.5, color=ink)
        shown = axes.imshow(gains, origin="lower", aspect="auto", cmap="YlGn", vmin=1, vmax=4)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=35)
        axes.set_yticks(range(len(pairs)), [str(pair) for pair in pairs])
        axes.set_xlabel("T")
        axes.set_title(f"D {dim}", fontsize=10)
    panels[0].set_ylabel("B x H")
    figure.colorbar(shown, ax=list(panels), label="time of whole rows / time of the rule's cut")
    told = "numbers: segments by the rule; in brackets the best and what the rule loses, where over 3%"
    figure.suptitle(f"{_gpu(content)}, bf16, forward in a CUDA graph; {told}", fontsize=9)


def _cost(figure: Figure, content: Mapping[str, Any]) -> None:
    """Milliseconds and peak memory of training and prefill against history length, at equal tokens."""
    rows = sorted(content["rows"], key=lambda row: row["length"])
    sides = {
        sinkrec_cost.OURS: ("SinkRec", "#2f9e77", "o"),
        sinkrec_cost.TWIN: ("SASRec twin", "#e07a3f", "s"),
    }
    values = {
        "milliseconds": lambda found: found["ms"]["median"],
        "peak GiB": lambda found: found["peak_gib"],
    }
    panels = figure.subplots(1, len(values))
    for axes, (unit, value) in zip(panels, values.items(), strict=True):
        for side, (label, colour, marker) in sides.items():
            for work, line in zip(sinkrec_cost.WORK, ("-", "--"), strict=True):
                found = [(row["length"], row.get(side, {}).get(work, {})) for row in rows]
                points = [(length, value(one)) for length, one in found if "ms" in one]
                if points:
                    told = f"{label}, {work}"
                    axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, label=told, linewidth=2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["length"] for row in rows], [f"{row['length']:,}" for row in rows], rotation=35)
        axes.set_xlabel("history length")
        axes.set_ylabel(unit)
        axes.grid(True, which="major", color=INK, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9.5)
    row = rows[0]
    told = f"{row['preset']}, {row['batch'] * row['length']:,} tokens at every length"
    figure.suptitle(f"{_gpu(content)}, {told}", fontsize=10)


def _planted(figure: Figure, content: Mapping[str, Any]) -> None:
    """What the writes of one history of the first seed do, plain above SinkRec."""
    row = content["rows"][0]
    panels = [planted_repetition.panel(name, row["models"][name]) for name in reversed(row["models"])]
    first, last = 2 * row["pairs"], 2 * row["pairs"] + row["gap"]
    title = f"{row['pairs']} pairs, {row['distractors']} items that repeat (between the lines), the pairs again"
    sink_view.put(figure, panels, title=title)
    for axes in figure.axes:
        for place in (first, last):
            axes.axvline(place + 0.5, color=INK, linestyle="--", linewidth=1)


def _gpu(content: Mapping[str, Any]) -> str:
    return str((content.get("machine", {}).get("gpu") or "unknown GPU").split(",")[0])


PLOTS = {
    "gbla_layer": Plot(
        (7.2, 4.4),
        frozenset({"length", "graph_ms", "limit_ms", "batch", "d_model", "num_heads", "head_dim", "dtype"}),
        _layer,
    ),
    "sinkrec_cost": Plot((9.5, 4.4), frozenset({"length", "batch", "preset", sinkrec_cost.OURS}), _cost),
    "planted_repetition": Plot((9, 5.6), frozenset({"models", "pairs", "gap", "distractors"}), _planted),
    "delta_schedule": Plot((11, 4.4), frozenset({"length", "graph_ms", "num_heads", "head_dim", "chosen"}), _schedule),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("name", choices=PLOTS, help="the benchmark")
    parser.add_argument("--result", type=Path, help="default: benchmarks/results/NAME.json")
    parser.add_argument("--out", type=Path, help="default: docs/images/NAME.png")
    chosen = parser.parse_args(arguments)
    result = chosen.result or RESULTS / f"{chosen.name}.json"
    try:
        print(draw(chosen.name, result, chosen.out or IMAGES / f"{chosen.name}.png"))
    except ZooError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
