"""The page of a study: mean and spread over seeds, differences with intervals over users, every run, published numbers.

python -m zoo.training.study_table runs/study > docs/results_ml1m.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.models import presets
from zoo.training.metrics import mrr, ndcg, recall
from zoo.training.published import BASELINES, GBLA_RECALL10

STUDY = "study.json"
RANKS = "ranks.npz"
PAGE = "study.md"

_METRICS: dict[str, Callable[[np.ndarray], float]] = {
    "Recall@10": lambda ranks: recall(ranks, 10),
    "Recall@50": lambda ranks: recall(ranks, 50),
    "NDCG@10": lambda ranks: ndcg(ranks, 10),
    "MRR@10": lambda ranks: mrr(ranks, 10),
}
_RESAMPLES = 2000


def model_of(study: Mapping[str, Any]) -> str:
    """Return which model a study trains, ``gbla`` or ``sinkrec``."""
    return presets.PRESETS[study["preset"]][0]


def key(twin: str, seed: int) -> str:
    """Return the name of a run's ranks in ranks.npz."""
    return f"{twin}/{seed}"


def load(folder: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of study.json and the ranks int16 [U] by ``key`` of a study's folder."""
    with np.load(Path(folder) / RANKS) as stored:
        ranks = {name: stored[name] for name in stored.files}
    return json.loads((Path(folder) / STUDY).read_text()), ranks


def page(study: Mapping[str, Any], ranks: Mapping[str, np.ndarray]) -> str:
    """Return a Markdown page of a study.

    Args:
        study: content of study.json.
        ranks: rank of each user's target, int [U], by ``key``; those of runs that are done.
    """
    done = [row for row in study["runs"] if row["state"] == "done"]
    twins = list(dict.fromkeys(row["twin"] for row in study["runs"]))
    by_twin = {
        twin: {row["seed"]: ranks[key(twin, row["seed"])] for row in done if row["twin"] == twin} for twin in twins
    }
    paper = GBLA_RECALL10 if model_of(study) == "gbla" else {}
    lines = [*_how(study, done), "", *_quality(study, by_twin, done, paper), "", *_differences(by_twin, paper), ""]
    lines += [*_by_left_out(done, twins), *_every_run(done, ranks), *_missing(study), *_legend(study, done)]
    return "\n".join(lines) + "\n"


def difference(
    ours: Mapping[int, np.ndarray], base: Mapping[int, np.ndarray], k: int = 10
) -> tuple[float, float, float] | None:
    """Return the difference of Recall@k to ``base`` over the common seeds, and its 95% interval over users.

    Both hold ranks int [U] by seed, of the same users. The interval is a paired bootstrap over users of hits averaged
    over seeds; it does not hold what other seeds would give. ``None`` where no seed is common.
    """
    seeds = sorted(set(ours) & set(base))
    if not seeds:
        return None
    change_U = np.mean([(ours[s] < k).astype(float) - (base[s] < k) for s in seeds], axis=0)
    draw = np.random.default_rng(0)
    means = [change_U[draw.integers(len(change_U), size=len(change_U))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(change_U.mean()), float(low), float(high)


def _how(study: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> list[str]:
    machine, recipe = study["machine"], study["recipe"]
    gpus = machine["gpus"]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    settings = ", ".join(f"{name} {value}" for name, value in recipe.items())
    how = f"{study['beams']} beams" if model_of(study) == "gbla" else "by score"
    seconds = np.median([row["training_seconds"] for row in done]) if done else float("nan")
    return [
        f"`{study['preset']}` and its twins on {study['data']}, {study['date']}, on {where}, "
        f"{machine['processors']} processors, torch {machine['torch']}, {study['processes_per_gpu']} runs side by side "
        f"on each device; {len(done)} of {len(study['runs'])} runs in {study['seconds']:.0f} s; a training took "
        f"{seconds:.0f} s (median).",
        "",
        f"Recipe, the same for all: {settings}. {_overrides(study)}Evaluation: test split, full ranking, {how}, items "
        "of the history left out; Recall@k is HR@k, with one target a user.",
        "",
        "```console",
        study["command"],
        "```",
    ]


def _overrides(study: Mapping[str, Any]) -> str:
    changed = ", ".join(f"{name} {value}" for name, value in study.get("overrides", {}).items())
    return f"Model fields changed: {changed}. " if changed else ""


def _quality(
    study: Mapping[str, Any],
    by_twin: Mapping[str, Mapping[int, np.ndarray]],
    done: Sequence[Mapping[str, Any]],
    paper: Mapping[str, float],
) -> list[str]:
    headers = ["model", "seeds", *_METRICS, "best step, median", *(["the paper's Recall@10"] if paper else [])]
    lines = [_row(headers), "|---" * len(headers) + "|"]
    for twin, runs in by_twin.items():
        cells = [_mean_and_spread([metric(ranks) for ranks in runs.values()]) for metric in _METRICS.values()]
        steps = [row["best_step"] for row in done if row["twin"] == twin]
        step = f"{np.median(steps):.0f}" if steps else "-"
        theirs = [f"{paper[twin]:.4f}" if twin in paper else "-"] if paper else []
        lines.append(_row([_label(twin, study), len(runs), *cells, step, *theirs]))
    others = [*done[0]["metrics"].items()][1:] if done else []
    published = BASELINES.get((model_of(study), study["data"]))
    others += [(f"{name}, published", values) for name, values in published.rows] if published else []
    for name, values in others:
        cells = [f"{values[metric]:.4f}" if metric in values else "-" for metric in _METRICS]
        lines.append(_row([f"*{name}*", "-", *cells, "-", *(["-"] if paper else [])]))
    return lines


def _differences(by_twin: Mapping[str, Mapping[int, np.ndarray]], paper: Mapping[str, float]) -> list[str]:
    base = by_twin.get("base", {})
    headers = ["Recall@10 minus that of `base`", "here", "95% over users", "seed by seed"]
    headers += ["the paper"] if paper else []
    lines = [_row(headers), "|---" * len(headers) + "|"]
    for twin, runs in by_twin.items():
        found = difference(runs, base) if twin != "base" else None
        if found is None:
            continue
        each = ", ".join(f"{recall(runs[s], 10) - recall(base[s], 10):+.4f}" for s in sorted(set(runs) & set(base)))
        theirs = [f"{paper[twin] - paper['base']:+.4f}" if twin in paper else "-"] if paper else []
        lines.append(_row([twin, f"{found[0]:+.4f}", f"{found[1]:+.4f} to {found[2]:+.4f}", each, *theirs]))
    return lines if len(lines) > 2 else ["No twin shares a seed with `base` yet."]


def _by_left_out(done: Sequence[Mapping[str, Any]], twins: Sequence[str]) -> list[str]:
    """Return a table of what leaving seen items out of the ranking changes, where the runs say it."""
    rows = [row for row in done if row.get("by_left_out")]
    if not rows:
        return []
    policies = list(rows[0]["by_left_out"])
    headers = ["Recall@10, NDCG@10", *(f"left out: {policy}" for policy in policies)]
    lines = [_row(headers), "|---" * len(headers) + "|"]
    for twin in twins:
        found = [row["by_left_out"] for row in rows if row["twin"] == twin]
        cells = [
            ", ".join(_mean_and_spread([run[policy][name] for run in found]) for name in ("Recall@10", "NDCG@10"))
            for policy in policies
        ]
        lines += [_row([twin, *cells])] if found else []
    told = "Left out of the ranking: all items of the history, those among the newest events that are read, or nothing."
    return [*lines, "", told, ""]


def _every_run(done: Sequence[Mapping[str, Any]], ranks: Mapping[str, np.ndarray]) -> list[str]:
    if not done:
        return []
    headers = ["run", "seed", *_METRICS, "best valid Recall@10", "best step", "training s", "training and evaluation s"]
    lines = [_row(headers), "|---" * len(headers) + "|"]
    for row in done:
        cells = [f"{metric(ranks[key(row['twin'], row['seed'])]):.4f}" for metric in _METRICS.values()]
        valid = row["best_valid_recall@10"]
        times = [f"{row['training_seconds']:.0f}", f"{row['seconds']:.0f}"]
        lines.append(
            _row([row["twin"], row["seed"], *cells, "-" if valid is None else f"{valid:.4f}", row["best_step"], *times])
        )
    return [*lines, ""]


def _missing(study: Mapping[str, Any]) -> list[str]:
    missing = [row for row in study["runs"] if row["state"] != "done"]
    if not missing:
        return []
    lines = ["Missing:", ""]
    for row in missing:
        reason = f": {row['reason']}" if "reason" in row else ""
        lines.append(f"- {row['twin']} seed {row['seed']}, {row['state']}{reason}")
    return [*lines, ""]


def _legend(study: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> list[str]:
    if not done:
        return []
    published = BASELINES.get((model_of(study), study["data"]))
    theirs = [published.source] if published else []
    if model_of(study) == "gbla":
        theirs = ["The paper's numbers are of its own data, so compare signs and sizes of differences, not levels."]
    users = done[0]["users"]
    noise = f"{1.96 * np.sqrt(0.25 * 0.75 / users):.4f} at a recall of 0.25"
    return [
        f"Mean ± standard deviation over seeds. Half of a 95% interval over the {users} users is {noise}; differences "
        "between two models on the same users are paired and narrower: the second table gives them. These intervals "
        + " ".join(
            [
                "are over users, for the seeds that were run: a difference no larger than the spread over seeds is "
                "not one.",
                *theirs,
            ]
        )
    ]


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _label(twin: str, study: Mapping[str, Any]) -> str:
    return f"**{study['preset']}** (`base`)" if twin == "base" else twin


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def main(arguments: Sequence[str]) -> int:
    """Print the page of the study in the folder that is named."""
    if len(arguments) != 1 or not (Path(arguments[0]) / STUDY).exists():
        print("usage: python -m zoo.training.study_table FOLDER, the --out of a study", file=sys.stderr)
        return 2
    print(page(*load(arguments[0])), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
