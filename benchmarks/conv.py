"""The short causal convolution, alone and behind RMSNorm, against a copying kernel, torch.compile, unfused peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gate, limits, tables, timing
from benchmarks.timing import Candidate
from zoo.kernels import causal_short_conv, rms_norm_short_conv
from zoo.kernels.causal_short_conv.reference import causal_short_conv_reference
from zoo.kernels.rms_norm_short_conv.reference import rms_norm_short_conv_reference

OURS, COMPILED, UNFUSED = "op", "torch_compile_reference", "unfused"
PER_ROW = ("y", "grad_x")
EPS = 1e-6

Function = Callable[..., Tensor]
"""x [B, L, C], lengths [B], weights -> [B, L, C]."""


@dataclass(frozen=True)
class Case:
    """One op with its peers; ``dtype`` is that of x and the weights, the result is bfloat16."""

    op: Function
    reference: Function
    unfused: Function
    norm: bool
    dtype: torch.dtype


def conv1d(x_BLC: Tensor, lengths_B: Tensor, weight_CW: Tensor) -> Tensor:
    """Convolve with torch's depthwise conv1d, which wants [B, C, L]; full rows."""
    channels, width = weight_CW.shape
    z_BCL = F.conv1d(x_BLC.transpose(1, 2), weight_CW.unsqueeze(1), padding=width - 1, groups=channels)
    return z_BCL[..., : x_BLC.shape[1]].transpose(1, 2).contiguous()


def _conv(x: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    return causal_short_conv(x, weight, lengths)


def _conv_reference(x: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    return causal_short_conv_reference(x, weight, lengths, "none")


def _norm_conv(x: Tensor, lengths: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
    return rms_norm_short_conv(x, norm_weight, weight, lengths, eps=EPS, out_dtype=torch.bfloat16)


def _norm_conv_reference(x: Tensor, lengths: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
    out_dtype = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
    return rms_norm_short_conv_reference(x, norm_weight, weight, lengths, EPS, out_dtype)[0]


def _norm_then_conv(x: Tensor, lengths: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
    n = F.rms_norm(x, norm_weight.shape, norm_weight, EPS)
    return causal_short_conv(n, weight, lengths).to(torch.bfloat16)


CASES = {
    "conv bf16": Case(_conv, _conv_reference, conv1d, norm=False, dtype=torch.bfloat16),
    "norm+conv bf16": Case(_norm_conv, _norm_conv_reference, _norm_then_conv, norm=True, dtype=torch.bfloat16),
    "norm+conv fp32 in": Case(_norm_conv, _norm_conv_reference, _norm_then_conv, norm=True, dtype=torch.float32),
}
"""The last is what training under autocast does: the residual stream is float32, the next projection bfloat16."""


def measure(
    batch: int = 8,
    channels: int = 1024,
    width: int = 4,
    lengths: str = "2048,8192,32768",
    cases: str = ",".join(CASES),
    compiled_lengths: str = "8192",
) -> Iterator[dict[str, Any]]:
    """Yield a row a case, length and direction: milliseconds in a CUDA graph, full rows.

    Args:
        batch: B.
        channels: C.
        width: taps W.
        lengths: comma-separated.
        cases: comma-separated names of ``CASES``.
        compiled_lengths: lengths at which torch.compile of the reference is timed too; it compiles for seconds.
    """
    device = timing.require_cuda("conv")
    bandwidth = timing.copy_bandwidth(device)
    with_compiled = tables.integers(compiled_lengths)
    for name in cases.split(","):
        for length in tables.integers(lengths):
            for backward in (False, True):
                size = limits.MixerSize(batch, length, channels, 1, channels)
                compiled = length in with_compiled
                row = _one_size(CASES[name], size, width, device, bandwidth, backward=backward, compiled=compiled)
                yield {"case": name, **row, "copy_tb_s": bandwidth / 1e12}
                torch.cuda.empty_cache()


def _one_size(
    case: Case,
    size: limits.MixerSize,
    width: int,
    device: torch.device,
    bandwidth: float,
    *,
    backward: bool,
    compiled: bool,
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    shape = (size.batch, size.length, size.d_model)
    sets = timing.input_sets(case.dtype.itemsize * size.tokens * size.d_model)
    inputs = [torch.randn(shape, device=device, dtype=case.dtype) for _ in range(sets)]
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(size.d_model, width, device=device, dtype=case.dtype)]
    if case.norm:
        weights.append(torch.rand(size.d_model, device=device, dtype=case.dtype) + 0.5)
    lengths = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
    functions: dict[str, Function] = {OURS: case.op, UNFUSED: case.unfused}
    if compiled:
        functions[COMPILED] = torch.compile(case.reference, dynamic=False)
    shares, notes = _admit(case, functions, inputs[0], lengths, weights, grad, backward=backward)
    candidates: dict[str, Candidate] = {
        name: partial(_on_set, function, inputs, lengths, weights, grad, backward)
        for name, function in functions.items()
        if name in shares
    }
    graph = timing.time_graphs(candidates, sets)
    bytes_moved = size.conv_bytes(case.dtype.itemsize)
    if backward:
        bytes_moved += size.conv_backward_bytes(case.dtype.itemsize)
    floor = limits.milliseconds(bytes_moved, bandwidth)
    return {
        **vars(size),
        "width": width,
        "direction": "forward+backward" if backward else "forward",
        "graph_ms": {name: found._asdict() for name, found in graph.items()},
        "floor_bytes": bytes_moved,
        "floor_ms": floor,
        "share_of_copy": floor / graph[OURS].median,
        "tolerance_used": shares,
        "notes": notes,
    }


def _admit(
    case: Case,
    functions: Mapping[str, Function],
    x: Tensor,
    lengths: Tensor,
    weights: list[Tensor],
    grad: Tensor,
    *,
    backward: bool,
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Check the op on the first and the last row; of its peers, which run on all rows, what belongs to those two."""
    ends: list[Any] = [gate.end_rows(x), gate.end_rows(lengths), weights, gate.end_rows(grad)]
    wide: list[Any] = [
        gate.end_rows(x).double(),
        ends[1],
        [weight.double() for weight in weights],
        gate.end_rows(grad).double(),
    ]
    ref64, low = (_run(case.reference, *inputs, backward=backward) for inputs in (wide, ends))
    shares = {OURS: gate.admit(OURS, _run(case.op, *ends, backward=backward), ref64, low)}

    def per_row(name: str) -> dict[str, Tensor]:
        found = _run(functions[name], x, lengths, weights, grad, backward=backward)
        return {key: gate.end_rows(found[key]) for key in PER_ROW if key in found}

    ref64 = {key: ref64[key] for key in PER_ROW if key in ref64}
    others, notes = gate.admit_peers({name: partial(per_row, name) for name in functions if name != OURS}, ref64, low)
    return {**shares, **others}, notes


def _run(
    function: Function, x: Tensor, lengths: Tensor, weights: list[Tensor], grad: Tensor, *, backward: bool
) -> dict[str, Tensor]:
    if not backward:
        with torch.no_grad():
            return {"y": function(x, lengths, *weights)}
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
    y = function(leaves[0], lengths, *leaves[1:])
    grads = torch.autograd.grad(y, leaves, grad)
    return {"y": y, **dict(zip(("grad_x", "grad_weight", "grad_norm_weight"), grads, strict=False))}


def _on_set(
    function: Function,
    inputs: list[Tensor],
    lengths: Tensor,
    weights: list[Tensor],
    grad: Tensor,
    backward: bool,
    index: int,
) -> dict[str, Tensor]:
    return _run(function, inputs[index], lengths, weights, grad, backward=backward)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = [
        "case",
        "direction",
        "L",
        "op ms",
        "compiled reference ms",
        "unfused ms",
        "floor ms",
        "share of copy speed",
    ]
    lines = [
        [
            row["case"],
            row["direction"],
            row["length"],
            *(tables.median(row["graph_ms"], name) for name in (OURS, COMPILED, UNFUSED)),
            row["floor_ms"],
            tables.share(row["share_of_copy"]),
        ]
        for row in rows
    ]
    first = rows[0]
    notes = [
        f"B {first['batch']}, C {first['d_model']}, W {first['width']}, CUDA graph, median. Floor: each tensor moved "
        f"once at {first['copy_tb_s']:.2f} TB/s (a kernel that copies). Unfused: conv1d, or rms_norm and then our "
        "convolution.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)
