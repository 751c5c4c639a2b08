"""One new event of SinkRec after histories of different lengths, against the SASRec twin; on a GPU or a CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import tables, timing
from zoo.errors import ConfigError, ParityError
from zoo.models import presets
from zoo.models.sinkrec import SinkRec, State

OURS, TWIN = "ours", "sasrec"


def measure(
    preset: str = "sinkrec-base",
    items: int = 10_000,
    events: str = "100,1000,10000,30000",
    batch: int = 1,
    calls: int = 200,
    twin: str = TWIN,
) -> Iterator[dict[str, Any]]:
    """Yield a row a history length: milliseconds of one ``step`` of one event a row, and MiB of the state it reads.

    All are timed in turns. On a GPU weights are bfloat16, and steps are called from Python and, where they can be
    captured, from a CUDA graph; on a CPU they are float32. The SASRec twin keeps keys and values of the whole history.

    Args:
        preset: a SinkRec of the zoo.
        items: items of the catalogue.
        events: comma-separated events before the new one.
        batch: users at a time.
        calls: timed calls of each, on a CPU.
        twin: ``sasrec``, or nothing for none.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = tables.integers(events)
    if not counts or min(counts) < 1:
        raise ConfigError(f"events is {events!r}; give whole numbers above 0 with commas between them")
    steps: dict[tuple[str, int], Callable[[int], Any]] = {}
    states: dict[tuple[str, int], State] = {}
    models: dict[tuple[str, int], SinkRec] = {}
    for side in (OURS, twin) if twin else (OURS,):
        for count in counts:
            known = models.get((OURS, counts[0])) if side == OURS else None
            models[side, count] = known or build(preset, side, items, count + 1, device).eval().to(dtype)
            states[side, count], steps[side, count] = _step_after(models[side, count], count, batch, items, device)
    check_steps(build(preset, OURS, items, 1, device).eval())
    eager, graphs, notes = _time(steps, calls, device)
    for count in counts:
        sides = [side for side in (OURS, TWIN) if (side, count) in steps]
        yield {
            "preset": preset, "events": count, "batch": batch, "items": items, "device": device.type,
            "dtype": str(dtype).removeprefix("torch."), "calls": calls,
            "eager_ms": {side: eager[side, count] for side in sides},
            "graph_ms": {side: graphs[side, count] for side in sides if (side, count) in graphs},
            "state_mib": {side: _mib(states[side, count]) for side in sides},
            "notes": notes,
        }  # fmt: skip


def build(preset: str, side: str, items: int, length: int, device: torch.device) -> SinkRec:
    """Return a preset or its SASRec twin, whose window covers ``length`` events, with fresh weights.

    Raises:
        ConfigError: the preset is not a SinkRec.
    """
    twin = None if side == OURS else side
    config = presets.resolve(preset, twin=twin)
    if presets.model_name(config) != "sinkrec":
        raise ConfigError(f"{preset} is no SinkRec; use one of {', '.join(_sinkrecs())}")
    window = {} if twin is None else {"window": length}
    torch.manual_seed(0)
    model: SinkRec = presets.build(
        presets.resolve(preset, twin=twin, overrides={"num_items": items, "dropout": 0.0, **window}), device=device
    )
    return model


def histories(items: int, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random full rows: items and times, int64 [B, L], and lengths int32 [B]."""
    times = 10**9 + torch.randint(1, 10**5, (batch, length), device=device).cumsum(1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    return torch.randint(items, (batch, length), device=device), times, lengths


@torch.no_grad()
def check_steps(model: SinkRec, length: int = 300) -> float:
    """Return the least cosine between users of a prefill and of a shorter one and a step; nothing wrong is timed.

    Raises:
        ParityError: it is below 0.999.
    """
    items, times, lengths = histories(model.config.num_items, 2, length, model.items.weight.device)
    whole, _ = model.prefill(items, times, lengths)
    _, state = model.prefill(items[:, :-1], times[:, :-1], lengths - 1)
    user, _ = model.step(items[:, -1:], times[:, -1:], torch.ones_like(lengths), state)
    cosine = float((whole * user).sum(-1).min())
    if not cosine > 0.999:
        raise ParityError(f"the step is not timed: after {length - 1} events its user has a cosine of {cosine:.4f} to "
                          "that of a prefill of all; 1 is right")  # fmt: skip
    return cosine


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    sides = list(rows[0]["eager_ms"])
    graphs = [side for side in sides if side in rows[0]["graph_ms"]]
    headers = ["events before", *(f"{_label(side)} ms" for side in sides)]
    headers += [f"{_label(side)} graph ms" for side in graphs] + [f"{_label(side)} state MiB" for side in sides]
    lines = [
        [
            f"{row['events']:,}",
            *(row["eager_ms"][side]["median"] for side in sides),
            *(tables.median(row["graph_ms"], side) for side in graphs),
            *(row["state_mib"][side] for side in sides),
        ]
        for row in rows
    ]
    first, ours = rows[0], [row["eager_ms"][OURS]["median"] for row in rows]
    notes = [
        f"{first['preset']}, {first['items']} items, batch {first['batch']}, {first['dtype']} on a {first['device']}; "
        f"medians of calls in turns. After {rows[-1]['events']:,} events a step of ours takes {ours[-1] / ours[0]:.2f} "
        f"times as long as after {rows[0]['events']:,}.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)


@torch.no_grad()
def _step_after(
    model: SinkRec, count: int, batch: int, items: int, device: torch.device
) -> tuple[State, Callable[[int], Any]]:
    """Return the state after ``count`` events and the step of one more a row."""
    _, state = model.prefill(*histories(items, batch, count, device))
    item, time_, one = histories(items, batch, 1, device)
    time_ = state.last_time.unsqueeze(1) + time_ - 10**9

    @torch.no_grad()
    def step(_: int) -> Any:
        return model.step(item, time_, one, state)

    return state, step


def _time(
    steps: Mapping[tuple[str, int], Callable[[int], Any]], calls: int, device: torch.device
) -> tuple[dict[tuple[str, int], Any], dict[tuple[str, int], Any], list[str]]:
    """Return milliseconds eager and from CUDA graphs, and what is to be said about them."""
    names = {f"{side} {count}": (side, count) for side, count in steps}
    candidates = {name: steps[key] for name, key in names.items()}
    if device.type != "cuda":
        return {names[name]: found._asdict() for name, found in _wall(candidates, calls).items()}, {}, []
    eager = {names[name]: found._asdict() for name, found in timing.time_eager(candidates, 1, seconds=0.5).items()}
    graphs: dict[tuple[str, int], Any] = {}
    notes: list[str] = []
    for side in dict.fromkeys(side for side, _ in steps):
        own = {name: candidate for name, candidate in candidates.items() if names[name][0] == side}
        try:
            graphs |= {names[name]: found._asdict() for name, found in timing.time_graphs(own, 1).items()}
        except RuntimeError as error:
            notes.append(f"{_label(side)} is not timed in a CUDA graph: {str(error).splitlines()[0]}.")
    return eager, graphs, notes


def _wall(candidates: Mapping[str, Callable[[int], Any]], calls: int) -> dict[str, timing.Timing]:
    """Time calls on a CPU, one of each a turn in random order: what else the machine does falls on all of them."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for call in range(calls + 3):
        for name in order.sample(list(candidates), len(candidates)):
            started = time.perf_counter()
            candidates[name](0)
            if call >= 3:
                samples[name].append(1e3 * (time.perf_counter() - started))
    return {name: timing.summary(times) for name, times in samples.items()}


def _mib(state: State) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in state) / 2**20


def _label(side: str) -> str:
    return "SinkRec" if side == OURS else "SASRec twin"


def _sinkrecs() -> list[str]:
    return [name for name, (model, _) in presets.PRESETS.items() if model == "sinkrec"]
