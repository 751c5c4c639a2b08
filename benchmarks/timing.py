"""Times on one CUDA device: CUDA graphs and eager calls, copy bandwidth, matrix products.

A candidate is a function of the number of an input set. Input sets take turns and are together larger than the L2
cache, so no call finds its input there. Candidates that are compared are timed in turns too, so that a clock that
drifts drifts for all of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from zoo.errors import ConfigError

Candidate = Callable[[int], Any]
"""Runs once on the input set with this number."""

ROTATED_BYTES = 256 * 2**20
"""Input sets are together at least this large: four times the L2 cache of an H200."""

SECONDS = 0.05
"""Of each candidate in a round."""


class Timing(NamedTuple):
    """Milliseconds a call: median, tenth and ninetieth percentile of ``samples`` measurements."""

    median: float
    low: float
    high: float
    samples: int


def require_cuda(benchmark: str) -> torch.device:
    """Return the CUDA device.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"{benchmark} times kernels of a CUDA device and found none; run it on a machine with a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def input_sets(bytes_of_one: int, *, most: int = 16) -> int:
    """Return how many input sets of this size to take turns with, 2 to ``most``."""
    return max(2, min(most, math.ceil(ROTATED_BYTES / max(bytes_of_one, 1))))


def summary(samples: list[float]) -> Timing:
    """Return the timing of samples in milliseconds."""
    ordered = sorted(samples)
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.1, 0.9))
    return Timing(statistics.median(ordered), low, high, len(ordered))


def time_graphs(
    candidates: Mapping[str, Candidate], sets: int, *, rounds: int = 3, seconds: float = SECONDS
) -> dict[str, Timing]:
    """Time candidates as CUDA graphs of one call an input set.

    Args:
        candidates: by name.
        sets: number of input sets.
        rounds: how often the candidates take turns.
        seconds: of a candidate in a round; at least three replays are made.
    """
    graphs = {name: _capture(run, sets) for name, run in candidates.items()}
    timings = _in_turns({name: graph.replay for name, graph in graphs.items()}, sets, rounds, seconds)
    del graphs
    torch.cuda.empty_cache()
    return timings


def time_eager(
    candidates: Mapping[str, Candidate], sets: int, *, rounds: int = 3, seconds: float = SECONDS
) -> dict[str, Timing]:
    """Time candidates called from Python one after the other, launch overhead included."""

    def calls(run: Candidate) -> Callable[[], None]:
        def call_on_every_set() -> None:
            for index in range(sets):
                run(index)

        return call_on_every_set

    return _in_turns({name: calls(run) for name, run in candidates.items()}, sets, rounds, seconds)


def time_steps(step: Candidate, steps: int, *, warm_up: int = 3) -> tuple[Timing, float]:
    """Time whole training steps, called from Python; return their milliseconds and the peak of allocated GiB."""
    for index in range(warm_up):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    numbers = itertools.count(warm_up)
    samples = _milliseconds(lambda: step(next(numbers)), steps)
    return summary(samples), torch.cuda.max_memory_allocated() / 2**30


def copy_bandwidth(device: torch.device, bytes_moved: int = 2**32) -> float:
    """Return bytes a second that a kernel copies, read and written both counted: a negation, bfloat16 to bfloat16.

    Not ``copy_``: in a captured graph that is a memcpy node, which the copy engine carries out: 2.76 TB/s on an H200
    where a kernel reaches 4.2 (2026-11-30).
    """
    source = torch.empty(bytes_moved // 4, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    timing = time_graphs({"negation": lambda _: torch.neg(source, out=target)}, 2)["negation"]
    return bytes_moved / (timing.median * 1e-3)


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """Return floating-point operations a second of a square bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    timing = time_graphs({"matmul": lambda _: a @ b}, 2)["matmul"]
    return 2 * size**3 / (timing.median * 1e-3)


def time_projections(tokens: int, shapes: list[tuple[int, int]], device: torch.device) -> Timing:
    """Time bf16 linear layers of these (inputs, outputs) over ``tokens`` rows, one after the other in one graph."""
    sets = input_sets(2 * tokens * shapes[0][0])
    inputs = {width: _rows(sets, tokens, width, device) for width, _ in shapes}
    weights = [torch.randn(out, width, device=device, dtype=torch.bfloat16) / width**0.5 for width, out in shapes]

    def run(index: int) -> None:
        for (width, _), weight in zip(shapes, weights, strict=True):
            F.linear(inputs[width][index], weight)

    return time_graphs({"projections": run}, sets)["projections"]


def _rows(sets: int, tokens: int, width: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for _ in range(sets)]


def _capture(run: Candidate, sets: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(min(sets, 3)):
            run(index)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            run(index)
    return graph


def _in_turns(replays: Mapping[str, Callable[[], None]], calls: int, rounds: int, seconds: float) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            replay()
            first = _milliseconds(replay, 1)[0]
            count = max(3, min(200, int(seconds * 1e3 / max(first, 1e-3))))
            samples[name] += [time / calls for time in _milliseconds(replay, count)]
    return {name: summary(times) for name, times in samples.items()}


def _milliseconds(replay: Callable[[], Any], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
