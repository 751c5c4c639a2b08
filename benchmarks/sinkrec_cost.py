"""Time and memory of training and prefill of SinkRec over history length, against the SASRec twin, equal tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import limits, tables, timing
from benchmarks.sinkrec_step import OURS, TWIN, build, check_steps, histories

WORK = ("training", "prefill")


def measure(
    preset: str = "sinkrec-base",
    items: int = 10_000,
    lengths: str = "1024,2048,4096,8192,16384,32768",
    tokens: int = 32_768,
    steps: int = 5,
    most_seconds: float = 10.0,
    twin: str = TWIN,
) -> Iterator[dict[str, Any]]:
    """Yield a row a history length: milliseconds and peak GiB of a training step and of a prefill, ours and the twin's.

    A training step is forward, backward and fused AdamW, in bf16 autocast over float32 weights, no dropout; a prefill
    leaves users and states, in bfloat16. Rows have equal tokens, so a cost that is linear in the length is the same in
    all.

    Args:
        preset: a SinkRec of the zoo.
        items: items of the catalogue, all in the softmax.
        lengths: comma-separated L, in rising order.
        tokens: B x L; where L is more, one row.
        steps: timed steps.
        most_seconds: a side whose step takes longer is not run at greater lengths.
        twin: ``sasrec``, or nothing for none.
    """
    device = timing.require_cuda("sinkrec_cost")
    cosine = check_steps(build(preset, OURS, items, 1, device).eval())
    stopped: dict[tuple[str, str], str] = {}
    for length in tables.integers(lengths):
        batch = max(1, tokens // length)
        row: dict[str, Any] = {
            "preset": preset, "items": items, "length": length, "batch": batch, "cosine_of_a_step": cosine, "notes": [],
        }  # fmt: skip
        for side in (OURS, twin) if twin else (OURS,):
            row[side] = {}
            for work in WORK:
                if (side, work) not in stopped:
                    row[side][work] = found = _run(work, preset, side, items, batch, length, steps, device)
                    if "ms" not in found:
                        stopped[side, work] = f"{side} {work} {found['failed']} at L {length}"
                    elif found["ms"]["median"] > 1e3 * most_seconds:
                        stopped[side, work] = f"{side} {work} takes over {most_seconds:g} s at L {length}"
                row["notes"] += [stopped[side, work]] if (side, work) in stopped else []
        row["twin_over_ours"] = {
            work: limits.ratio(_median(row, twin, work), _median(row, OURS, work)) for work in WORK
        }
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = ["L", "B"]
    for work in WORK:
        headers += [f"{work} ms", "SASRec", "SASRec / ours", f"{work} GiB", "SASRec"]
    lines = []
    for row in rows:
        cells: list[Any] = [row["length"], row["batch"]]
        for work in WORK:
            cells += [_median(row, OURS, work), _median(row, TWIN, work), tables.times(row["twin_over_ours"][work])]
            cells += [_peak(row, OURS, work), _peak(row, TWIN, work)]
        lines.append(cells)
    first = rows[0]
    notes = [
        f"{first['preset']} and its SASRec twin (8 layers of softmax attention over the whole history), "
        f"{first['items']:,} items, equal tokens in every row. Training: forward, backward and fused AdamW, bf16 "
        "autocast, softmax over all items. Prefill: users and states, bfloat16. Called from Python.",
        *(f"{note}." for note in tables.distinct(rows)),
    ]
    return tables.render(headers, lines, notes)


def _run(
    work: str, preset: str, side: str, items: int, batch: int, length: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """Return time and peak memory of one side, or why there is none."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        model = build(preset, side, items, length, device)
        inputs = [histories(items, batch, length, device) for _ in range(2)]
        step = _training(model, inputs) if work == "training" else _prefill(model, inputs)
        found, peak = timing.time_steps(step, steps, warm_up=2)
    except torch.OutOfMemoryError:
        return {"failed": "runs out of memory"}
    return {"ms": found._asdict(), "peak_gib": peak}


def _training(model: Any, inputs: list[Any]) -> Callable[[int], Any]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(inputs[0][0].device.type, torch.bfloat16):
            total = model(*inputs[index % 2]).total
        total.backward()
        optimizer.step()

    return step


def _prefill(model: Any, inputs: list[Any]) -> Callable[[int], Any]:
    model.eval().to(torch.bfloat16)

    @torch.no_grad()
    def step(index: int) -> Any:
        return model.prefill(*inputs[index % 2])

    return step


def _median(row: dict[str, Any], side: str, work: str) -> float | None:
    found = row.get(side, {}).get(work, {})
    return found["ms"]["median"] if "ms" in found else None


def _peak(row: dict[str, Any], side: str, work: str) -> float | None:
    found = row.get(side, {}).get(work, {})
    return found.get("peak_gib")
