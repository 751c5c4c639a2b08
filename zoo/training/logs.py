"""The log of a run: a CSV file that survives kills, and the loss curve."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from zoo import files

LOG = "training/log.csv"
CURVE = "training/loss.png"
FIELDS = (
    "step", "epoch", "loss", "learning_rate", "grad_norm", "examples_per_second", "valid_recall@10",
    "codebook_perplexity", "dead_codes", "commitment",
)  # fmt: skip
"""The last three only of models with codebooks, a row a validation."""


class Log:
    """Rows of one run, one a step (and one a validation), appended to a CSV file.

    Opening it at a step drops the rows of later steps: a resumed run writes them again.
    """

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_log(path) if int(row["step"]) <= step] if path.exists() and step else []
        with files.replacing(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(kept)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, FIELDS)

    def write(self, **row: Any) -> None:
        """Append one row; fields that are not given stay empty."""
        self._writer.writerow({name: _short(value) for name, value in row.items()})

    def flush(self) -> None:
        """Hand the rows to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, str]]:
    """Return the whole rows of a log; a last line that a kill cut short is left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row.get(name) is not None for name in FIELDS) and row["step"].isdigit()]


def draw_curve(log: Path, path: Path, title: str, unit: str = "nats per semantic ID") -> None:
    """Draw loss (raw and smoothed) and validation Recall@10 over the steps, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_log(log)
    losses = np.array([[int(row["step"]), float(row["loss"])] for row in rows if row["loss"]]).reshape(-1, 2)
    valid = np.array(
        [[int(row["step"]), float(row["valid_recall@10"])] for row in rows if row["valid_recall@10"]]
    ).reshape(-1, 2)
    figure, axis = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axis.plot(losses[:, 0], losses[:, 1], color="tab:blue", alpha=0.25, linewidth=0.8)
    axis.plot(losses[:, 0], _smooth(losses[:, 1]), color="tab:blue", label=f"training loss ({unit})")
    axis.set_xlabel("optimiser step")
    axis.set_ylabel(f"loss ({unit})")
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    if len(valid):
        right = axis.twinx()
        (line,) = right.plot(valid[:, 0], valid[:, 1], "o-", color="tab:orange", label="validation Recall@10")
        right.set_ylabel("Recall@10")
        right.set_ylim(bottom=0)
        handles, labels = [*handles, line], [*labels, line.get_label()]
    axis.set_title(title, pad=28)
    axis.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.tight_layout()
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return a running mean over a fiftieth of the run, shorter at the start."""
    width = max(1, len(values) // 50)
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - width)
    return (total[end] - total[start]) / (end - start)


def _short(value: Any) -> Any:
    return f"{value:.9g}" if isinstance(value, float) else value
