"""``python -m benchmarks.run NAME [--option value ...]``: one registry, a table on stdout, raw JSON in results/.

Rows are written as they come, to NAME.partial.json, which becomes NAME.json at the end: a run that is cut off keeps
what it measured, and never takes the place of a whole one.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    conv,
    delta_schedule,
    export_build,
    gated_delta,
    gbla_core,
    gbla_layer,
    planted_repetition,
    profile_layer,
    sinkrec_cost,
    sinkrec_step,
    train_step,
)
from benchmarks.machine import describe_machine
from zoo import files
from zoo.errors import ZooError

RESULTS = Path(__file__).parent / "results"

REGISTRY: dict[str, tuple[Callable[..., Iterable[dict[str, Any]]], Callable[[list[dict[str, Any]]], str]]] = {
    "conv": (conv.measure, conv.table),
    "delta_schedule": (delta_schedule.measure, delta_schedule.table),
    "export_build": (export_build.measure, export_build.table),
    "gated_delta": (gated_delta.measure, gated_delta.table),
    "gbla_core": (gbla_core.measure, gbla_core.table),
    "gbla_layer": (gbla_layer.measure, gbla_layer.table),
    "layer_profile": (profile_layer.measure, profile_layer.table),
    "planted_repetition": (planted_repetition.measure, planted_repetition.table),
    "sinkrec_cost": (sinkrec_cost.measure, sinkrec_cost.table),
    "sinkrec_step": (sinkrec_step.measure, sinkrec_step.table),
    "train_step": (train_step.measure, train_step.table),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; its keyword arguments are the options."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    verbs = parser.add_subparsers(dest="name", required=True)
    for name, (measure, _) in REGISTRY.items():
        options = verbs.add_parser(name, help=(inspect.getdoc(sys.modules[measure.__module__]) or "").split("\n")[0])
        options.add_argument("--save", default=name, help="name of the result file")
        options.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
        for parameter in inspect.signature(measure).parameters.values():
            kind = type(parameter.default)
            options.add_argument(f"--{parameter.name}", type=kind, default=parameter.default, help="%(default)s")
    chosen = vars(parser.parse_args(arguments))
    name, save, folder = (chosen.pop(key) for key in ("name", "save", "folder"))
    measure, table = REGISTRY[name]
    partial, whole = (folder / f"{save}{suffix}" for suffix in (".partial.json", ".json"))
    result: dict[str, Any] = {"benchmark": name, "machine": describe_machine(), "rows": []}
    started = time.perf_counter()
    try:
        for row in measure(**chosen):
            result["rows"].append(row)
            files.write_json(partial, result)
            print(f"row {len(result['rows'])} after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    except ZooError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not result["rows"]:
        print(f"{name} measured nothing with these options", file=sys.stderr)
        return 2
    partial.replace(whole)
    print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
