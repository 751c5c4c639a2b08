"""The attention op alone on a packed projection, forward and backward, against torch.compile of plain bf16 PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import gate, limits, plain, tables, timing
from benchmarks.timing import Candidate
from zoo.kernels import gated_bidirectional_linear_attention
from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout
from zoo.kernels.gated_bidirectional_linear_attention.reference import gated_bidirectional_linear_attention_reference

EPS = 1e-6
OURS, COMPILED = "op", plain.COMPILED
SUMMED = "grad_norm_weight"
"""Summed over all rows, so the reference of two rows says nothing of it: ours is checked on those rows alone."""


def measure(
    batch: int = 8,
    heads: int = 16,
    head_dim: int = 64,
    lengths: str = "2048,8192,32768",
    backward_lengths: str = "2048,8192",
    autotune: str = "",
) -> Iterator[dict[str, Any]]:
    """Yield a row a length and direction: milliseconds in a CUDA graph, bf16, full rows.

    Args:
        batch: B.
        heads: H.
        head_dim: D.
        lengths: of the forward, comma-separated.
        backward_lengths: of forward and backward together, comma-separated.
        autotune: lengths at which torch.compile also tries its mode max-autotune-no-cudagraphs (about a minute each).
    """
    device = timing.require_cuda("gbla_core")
    bandwidth = timing.copy_bandwidth(device)
    autotuned = tables.integers(autotune)
    for backward, chosen in ((False, lengths), (True, backward_lengths)):
        for length in tables.integers(chosen):
            size = limits.MixerSize(batch, length, heads * head_dim, heads, head_dim)
            row = _one_size(size, device, bandwidth, backward=backward, autotune=length in autotuned)
            yield {**row, "copy_tb_s": bandwidth / 1e12}
            torch.cuda.empty_cache()


class _Problem:
    """Input sets of one size, and the two functions of them."""

    def __init__(self, size: limits.MixerSize, device: torch.device, *, backward: bool) -> None:
        torch.manual_seed(0)
        self.layout = PackedLayout(size.num_heads, size.head_dim)
        shape = (size.batch, size.length, self.layout.width)
        sets = timing.input_sets(2 * size.tokens * self.layout.width)
        self.packed = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(backward) for _ in range(sets)
        ]
        self.norm_weight = torch.rand(size.num_heads, size.head_dim, device=device, dtype=torch.bfloat16) + 0.5
        self.norm_weight.requires_grad_(backward)
        self.lengths = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
        self.grad = torch.randn(size.batch, size.length, size.inner, device=device, dtype=torch.bfloat16)
        self.backward = backward

    def op(self, packed: Tensor, norm_weight: Tensor, lengths: Tensor) -> Tensor:
        """Call the registered op."""
        heads, dim = self.layout.num_heads, self.layout.head_dim
        return gated_bidirectional_linear_attention(
            packed, norm_weight, lengths, num_heads=heads, head_dim=dim, eps=EPS
        )

    def reference(self, packed: Tensor, norm_weight: Tensor, lengths: Tensor) -> Tensor:
        """Call the reference; autograd derives its backward."""
        return gated_bidirectional_linear_attention_reference(packed, norm_weight, lengths, self.layout, EPS)

    def plain(self, packed: Tensor, norm_weight: Tensor, lengths: Tensor) -> Tensor:
        """Call the plain bf16 composition, for full rows; autograd derives its backward."""
        return plain.core(packed, norm_weight, self.layout, EPS)

    def run(
        self, function: Any, packed: Tensor, norm_weight: Tensor, lengths: Tensor, grad: Tensor
    ) -> dict[str, Tensor]:
        """Return the output, and the gradients where they are asked for."""
        if not self.backward:
            with torch.no_grad():
                return {"y": function(packed, norm_weight, lengths)}
        y = function(packed, norm_weight, lengths)
        grad_packed, grad_norm_weight = torch.autograd.grad(y, [packed, norm_weight], grad)
        return {"y": y, "grad_packed": grad_packed, SUMMED: grad_norm_weight}

    def on_set(self, function: Any, index: int) -> dict[str, Tensor]:
        """Run on one input set."""
        return self.run(function, self.packed[index], self.norm_weight, self.lengths, self.grad)

    def ends(self, function: Any) -> dict[str, Tensor]:
        """Return what is a row's own, of the first and the last row of a whole set."""
        whole = self.on_set(function, 0)
        return {name: gate.end_rows(x) for name, x in whole.items() if name != SUMMED}

    def on_two_rows(self, function: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Run on the first and the last row of the first set alone, in ``dtype``."""
        packed, weight, grad = (
            x.detach().to(dtype) for x in (gate.end_rows(self.packed[0]), self.norm_weight, gate.end_rows(self.grad))
        )
        packed.requires_grad_(self.backward)
        weight.requires_grad_(self.backward)
        return self.run(function, packed, weight, gate.end_rows(self.lengths), grad)


def _one_size(
    size: limits.MixerSize, device: torch.device, bandwidth: float, *, backward: bool, autotune: bool
) -> dict[str, Any]:
    torch._dynamo.reset()
    problem = _Problem(size, device, backward=backward)
    compiled = plain.compiled_peers(problem.plain, autotune=autotune)
    ref64 = problem.on_two_rows(problem.reference, torch.float64)
    low = problem.on_two_rows(problem.reference, torch.bfloat16)
    found = {**problem.on_two_rows(problem.op, torch.bfloat16), **problem.ends(problem.op)}
    shares = {OURS: gate.admit(OURS, found, ref64, low)}
    ref64.pop(SUMMED, None)
    others, notes = gate.admit_peers({name: partial(problem.ends, peer) for name, peer in compiled.items()}, ref64, low)
    shares |= others
    del found, ref64, low
    torch.cuda.empty_cache()
    functions = {OURS: problem.op, **compiled}
    candidates: dict[str, Candidate] = {name: partial(problem.on_set, functions[name]) for name in shares}
    graph, mode = plain.with_fastest(timing.time_graphs(candidates, len(problem.packed)))
    bytes_moved = size.core_bytes() + (size.core_backward_bytes() if backward else 0)
    floor = limits.milliseconds(bytes_moved, bandwidth)
    compiled_ms = graph[COMPILED].median if COMPILED in graph else None
    return {
        **vars(size),
        "packed_width": problem.layout.width,
        "direction": "forward+backward" if backward else "forward",
        "dtype": "bf16",
        "compile_mode": mode,
        "graph_ms": {name: found._asdict() for name, found in graph.items()},
        "floor_bytes": bytes_moved,
        "floor_ms": floor,
        "share_of_floor": floor / graph[OURS].median,
        "compiled_over_ours": limits.ratio(compiled_ms, graph[OURS].median),
        "tolerance_used": shares,
        "notes": notes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = [
        "direction",
        "L",
        "op ms",
        "torch.compile ms",
        "mode",
        "torch.compile / op",
        "floor ms",
        "share of floor",
    ]
    lines = [
        [
            row["direction"],
            row["length"],
            row["graph_ms"][OURS]["median"],
            tables.median(row["graph_ms"], COMPILED),
            row["compile_mode"],
            tables.times(row["compiled_over_ours"]),
            row["floor_ms"],
            tables.share(row["share_of_floor"]),
        ]
        for row in rows
    ]
    first = rows[0]
    notes = [
        f"B {first['batch']}, H {first['num_heads']}, D {first['head_dim']}, bf16, CUDA graph, median. Floor: each "
        f"tensor moved once at {first['copy_tb_s']:.2f} TB/s (a kernel that copies). torch.compile: the plain bf16 "
        "composition of benchmarks/plain.py, its fastest mode.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)
