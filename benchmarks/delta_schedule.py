"""The schedule of the gated delta rule: whole rows against rows cut into segments, over B x H and T."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import gated_delta, limits, tables, timing
from zoo.errors import ConfigError, DataError
from zoo.kernels.gated_delta_rule import launch
from zoo.kernels.gated_delta_rule.parameters import CHUNK, Segments
from zoo.kernels.gated_delta_rule.walks import schedule, schedule_of
from zoo.kernels.launch import capability, multiprocessors

USUAL, NONE = "usual", "none"
PAIRS = "1,2,4,8,16,32,64,128"
LENGTHS = "1024,2048,4096,8192,16384,32768,65536"
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_POSITIONS = 2**22
"""Of all rows and heads together: beyond it the device is full whatever the schedule."""


def measure(
    dims: str = "64,128", pairs: str = PAIRS, lengths: str = LENGTHS, decay: str = USUAL
) -> Iterator[dict[str, Any]]:
    """Yield a row a width, number of rows and heads, and length: milliseconds of a forward by number of segments.

    Args:
        dims: comma-separated, of keys and values alike.
        pairs: comma-separated B x H.
        lengths: comma-separated T.
        decay: usual, about exp(-2) a chunk, so that of long segments a part is left out; or none, so that nothing is.
    """
    device = timing.require_cuda("delta_schedule")
    if decay not in (USUAL, NONE):
        raise ConfigError(f"delta_schedule has no decay {decay!r}; use {USUAL} or {NONE}")
    generator = torch.Generator(device).manual_seed(0)
    for dim, pair, length in itertools.product(*map(tables.integers, (dims, pairs, lengths))):
        if pair * length <= MOST_POSITIONS:
            yield _one(limits.DeltaRuleSize(1, length, pair, dim), decay, device, generator)
            torch.cuda.empty_cache()


def _one(size: limits.DeltaRuleSize, decay: str, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    sets = [gated_delta.draw(size, generator) for _ in range(timing.input_sets(size.forward_bytes(), most=4))]
    if decay == NONE:
        sets = [inputs._replace(log_decay=torch.zeros_like(inputs.log_decay)) for inputs in sets]
    lengths = torch.full((1,), size.length, dtype=torch.int32, device=device)
    chunks = -(-size.length // CHUNK)
    ruled = schedule(sets[0])
    cuts = {ruled.number: ruled}
    for number in NUMBERS:
        each = -(-chunks // number)
        cuts.setdefault(-(-chunks // each), Segments(-(-chunks // each), each))

    def run(cut: Segments, index: int) -> Any:
        return launch.forward(sets[index], lengths, 1.0, True, cut=cut)

    candidates = {str(number): partial(run, cut) for number, cut in sorted(cuts.items())}
    found = timing.time_graphs(candidates, len(sets), rounds=2, seconds=0.01)
    return {
        **vars(size),
        "dtype": "bf16",
        "decay": decay,
        "capability": capability(device),
        "multiprocessors": multiprocessors(device),
        "chosen": ruled.number,
        "graph_ms": {number: taken._asdict() for number, taken in found.items()},
    }


def best(row: dict[str, Any]) -> tuple[int, float]:
    """Return the fastest number of segments of a row, and its milliseconds."""
    number, taken = min(row["graph_ms"].items(), key=lambda item: float(item[1]["median"]))
    return int(number), float(taken["median"])


def chosen(row: dict[str, Any]) -> tuple[int, float]:
    """Return the number of segments that the rule of now makes of a row, and the milliseconds that it took.

    The rule may have changed since the row was measured: what it cuts now must be among the cuts tried then.
    """
    figures = row.get("capability", 90), row.get("multiprocessors", 132)  # before 2026-12-01: not said, an H200
    dim = row["head_dim"]
    number = schedule_of(row["num_heads"], row["length"], dim, dim, torch.bfloat16, *figures).number
    if str(number) not in row["graph_ms"]:
        raise DataError(f"{number} segments of {row['length']} positions were not measured; run delta_schedule again")
    return number, float(row["graph_ms"][str(number)]["median"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = ["D", "B x H", "T", "whole rows ms", "segments", "ms", "gain", "best", "best ms", "lost to best"]
    lines = []
    for row in rows:
        whole = row["graph_ms"]["1"]["median"]
        (cut, mine), (number, least) = chosen(row), best(row)
        lines.append(
            [
                row["head_dim"], row["num_heads"], row["length"], whole, cut, mine,
                tables.times(whole / mine), number, least, tables.share(mine / least - 1),
            ]
        )  # fmt: skip
    notes = [
        "bf16, forward in a CUDA graph, median. Segments: as `parameters.segments` cuts a row now; best: of all tried."
    ]
    return tables.render(headers, lines, notes)
