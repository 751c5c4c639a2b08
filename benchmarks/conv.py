"""The short causal convolution, forward and backward, against device copy, torch.compile and conv1d."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gate, limits, tables, timing
from benchmarks.timing import Candidate
from zoo.kernels import causal_short_conv
from zoo.kernels.causal_short_conv.reference import causal_short_conv_reference

OURS, COMPILED, CONV1D = "op", "torch_compile_reference", "conv1d"


def measure(
    batch: int = 8, channels: int = 1024, width: int = 4, lengths: str = "2048,8192,32768", seconds: float = 0.1
) -> list[dict[str, Any]]:
    """Return a row a length and direction: milliseconds in a CUDA graph, bf16, full rows.

    Args:
        batch: B.
        channels: C.
        width: taps W.
        lengths: comma-separated.
        seconds: of each candidate in each of three rounds.
    """
    device = timing.require_cuda("conv")
    bandwidth = timing.copy_bandwidth(device)
    rows = []
    for length in map(int, lengths.split(",")):
        for backward in (False, True):
            size = limits.MixerSize(batch, length, channels, 1, channels)
            row = _one_size(size, width, device, bandwidth, backward=backward, seconds=seconds)
            rows.append({**row, "copy_tb_s": bandwidth / 1e12})
            torch.cuda.empty_cache()
    return rows


def conv1d(x_BLC: Tensor, weight_CW: Tensor, lengths_B: Tensor) -> Tensor:
    """Convolve with torch's depthwise conv1d, which wants [B, C, L]; full rows."""
    channels, width = weight_CW.shape
    z_BCL = F.conv1d(x_BLC.transpose(1, 2), weight_CW.unsqueeze(1), padding=width - 1, groups=channels)
    return z_BCL[..., : x_BLC.shape[1]].transpose(1, 2).contiguous()


def _reference(x_BLC: Tensor, weight_CW: Tensor, lengths_B: Tensor) -> Tensor:
    return causal_short_conv_reference(x_BLC, weight_CW, lengths_B, "none")


def _run(
    function: Any, x: Tensor, weight: Tensor, lengths: Tensor, grad: Tensor, *, backward: bool
) -> dict[str, Tensor]:
    if not backward:
        with torch.no_grad():
            return {"y": function(x, weight, lengths)}
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, lengths)
    grad_x, grad_weight = torch.autograd.grad(y, [x, weight], grad)
    return {"y": y, "grad_x": grad_x, "grad_weight": grad_weight}


def _one_size(
    size: limits.MixerSize, width: int, device: torch.device, bandwidth: float, *, backward: bool, seconds: float
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    shape = (size.batch, size.length, size.d_model)
    inputs = [
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for _ in range(timing.input_sets(2 * size.tokens * size.d_model))
    ]
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)
    weight = torch.randn(size.d_model, width, device=device, dtype=torch.bfloat16)
    lengths = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
    functions = {
        OURS: causal_short_conv,
        COMPILED: torch.compile(_reference, dynamic=False),
        CONV1D: conv1d,
    }

    two = [gate.end_rows(inputs[0]), weight, gate.end_rows(lengths), gate.end_rows(grad)]
    ref64 = _run(_reference, *(x if x.dtype == torch.int32 else x.double() for x in two), backward=backward)
    low = _run(_reference, *two, backward=backward)
    shares = {OURS: gate.admit(OURS, _run(causal_short_conv, *two, backward=backward), ref64, low)}
    rivals = {name: partial(_run, functions[name], *two, backward=backward) for name in (COMPILED, CONV1D)}
    others, notes = gate.admit_peers(rivals, ref64, low)
    shares |= others
    del ref64, low
    candidates: dict[str, Candidate] = {
        name: partial(_on_set, function, inputs, weight, lengths, grad, backward)
        for name, function in functions.items()
        if name in shares
    }
    graph = timing.time_graphs(candidates, len(inputs), seconds=seconds)
    bytes_moved = size.conv_bytes() + (size.conv_backward_bytes() if backward else 0)
    floor = limits.milliseconds(bytes_moved, bandwidth)
    return {
        **vars(size),
        "width": width,
        "direction": "forward+backward" if backward else "forward",
        "dtype": "bf16",
        "graph_ms": {name: found._asdict() for name, found in graph.items()},
        "floor_bytes": bytes_moved,
        "floor_ms": floor,
        "share_of_copy": floor / graph[OURS].median,
        "tolerance_used": shares,
        "notes": notes,
    }


def _on_set(
    function: Any, inputs: list[Tensor], weight: Tensor, lengths: Tensor, grad: Tensor, backward: bool, index: int
) -> dict[str, Tensor]:
    return _run(function, inputs[index], weight, lengths, grad, backward=backward)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = ["direction", "L", "op ms", "compiled reference ms", "conv1d ms", "floor ms", "share of copy speed"]
    lines = [
        [
            row["direction"],
            row["length"],
            *(tables.median(row["graph_ms"], name) for name in (OURS, COMPILED, CONV1D)),
            row["floor_ms"],
            tables.share(row["share_of_copy"]),
        ]
        for row in rows
    ]
    first = rows[0]
    notes = [
        f"B {first['batch']}, C {first['d_model']}, W {first['width']}, bf16, CUDA graph, median. Floor: each tensor "
        f"moved once at {first['copy_tb_s']:.2f} TB/s (device copy).",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)
