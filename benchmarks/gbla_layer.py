"""One GBLA mixer layer against softmax layers with the same projections, and against what the machine allows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import gate, limits, peers, plain, tables, timing
from benchmarks.timing import Candidate
from zoo.layers import GatedBidirectionalLinearAttention

OURS, FA3, CUDNN, FLASH, COMPILED = "gbla", "fa3", "cudnn", "torch_flash", plain.COMPILED
LONGEST_PLAIN_ATTENTION = 1024
"""Softmax peers are checked at this length at most: the float64 reference forms the weights [B, H, L, L]."""


def measure(
    batch: int = 8,
    d_model: int = 1024,
    heads: int = 16,
    head_dim: int = 64,
    lengths: str = "512,1024,2048,4096,8192,32768",
    flash_lengths: str = "4096",
    autotune: str = "",
) -> Iterator[dict[str, Any]]:
    """Yield a row a length: milliseconds in a CUDA graph and eager, bf16, forward only, full rows.

    Args:
        batch: B.
        d_model: width of the layer.
        heads: H.
        head_dim: D.
        lengths: comma-separated.
        flash_lengths: lengths at which torch's own FlashAttention-2 is timed too; cuDNN is faster.
        autotune: lengths at which torch.compile also tries its mode max-autotune-no-cudagraphs (minutes each).
    """
    device = timing.require_cuda("gbla_layer")
    bandwidth, rate = timing.copy_bandwidth(device), timing.matmul_rate(device)
    with_flash, autotuned = tables.integers(flash_lengths), tables.integers(autotune)
    for length in tables.integers(lengths):
        size = limits.MixerSize(batch, length, d_model, heads, head_dim)
        row = _one_length(size, device, bandwidth, flash=length in with_flash, autotune=length in autotuned)
        yield {**row, "copy_tb_s": bandwidth / 1e12, "matmul_tflop_s": rate / 1e12}
        torch.cuda.empty_cache()


@torch.no_grad()
def _one_length(
    size: limits.MixerSize, device: torch.device, bandwidth: float, *, flash: bool, autotune: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sets = timing.input_sets(2 * size.tokens * size.d_model)
    inputs = [
        torch.randn(size.batch, size.length, size.d_model, device=device, dtype=torch.bfloat16) for _ in range(sets)
    ]
    lengths_B = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
    layer = GatedBidirectionalLinearAttention(size.d_model, size.num_heads, size.head_dim).to(device, torch.bfloat16)
    compiled = plain.compiled_peers(partial(plain.layer, layer), autotune=autotune)
    softmax, notes = _softmax_peers(size, layer, flash=flash)
    shares, wrong = _admit_linear(layer, compiled, inputs[0], lengths_B)
    softmax_shares, wrong_softmax = _admit_softmax(softmax, inputs[0])
    shares |= softmax_shares
    notes += wrong + wrong_softmax

    candidates: dict[str, Candidate] = {OURS: lambda index: layer(inputs[index], lengths_B)}
    others: dict[str, Callable[[Tensor], Tensor]] = {**softmax, **compiled}
    for name, peer in others.items():
        if name in shares:
            candidates[name] = partial(_call, peer, inputs)
    graph, mode = plain.with_fastest(timing.time_graphs(candidates, sets))
    eager = timing.time_eager({name: candidates[name] for name in (OURS, FA3) if name in candidates}, sets)

    shapes = [(size.d_model, layer.layout.width), (size.inner, size.d_model)]
    projections = timing.time_projections(size.tokens, shapes, device).median
    limit = projections + limits.milliseconds(size.layer_bytes(), bandwidth)
    fa3 = graph[FA3].median if FA3 in graph else None
    return {
        **vars(size),
        "packed_width": layer.layout.width,
        "dtype": "bf16",
        "compile_mode": mode,
        "input_sets": sets,
        "graph_ms": {name: found._asdict() for name, found in graph.items()},
        "eager_ms": {name: found._asdict() for name, found in eager.items()},
        "projections_ms": projections,
        "bytes_besides": size.layer_bytes(),
        "limit_ms": limit,
        "fa3_over_ours": limits.ratio(fa3, graph[OURS].median),
        "fa3_over_limit": limits.ratio(fa3, limit),
        "share_of_limit": limit / graph[OURS].median,
        "tolerance_used": shares,
        "notes": notes,
    }


def _softmax_peers(
    size: limits.MixerSize, layer: GatedBidirectionalLinearAttention, *, flash: bool
) -> tuple[dict[str, peers.SoftmaxLayer], list[str]]:
    """Return the softmax layers by name, with weights of the linear layer: its first 3 * H * D columns are q, k, v."""
    fa3, note = peers.flash_attention_3()
    attentions: dict[str, peers.Attention] = {
        **({FA3: fa3} if fa3 else {}),
        CUDNN: peers.cudnn_attention,
        **({FLASH: peers.torch_flash_attention} if flash else {}),
    }
    qkv, out = layer.projection.weight[: 3 * size.inner], layer.out.weight
    made = {
        name: peers.SoftmaxLayer(size.d_model, size.num_heads, size.head_dim, attention).with_weights(qkv, out)
        for name, attention in attentions.items()
    }
    return made, [note, peers.FLA_NOTE]


def _call(peer: Callable[[Tensor], Tensor], inputs: list[Tensor], index: int) -> Tensor:
    return peer(inputs[index])


def _end_rows(peer: Callable[[Tensor], Tensor], x_BLC: Tensor) -> dict[str, Tensor]:
    return {"y": gate.end_rows(peer(x_BLC))}


def _outputs(peer: peers.SoftmaxLayer, x_BLC: Tensor) -> dict[str, Tensor]:
    return {"y": peer(x_BLC)}


def _admit_linear(
    layer: GatedBidirectionalLinearAttention,
    compiled: Mapping[str, Callable[[Tensor], Tensor]],
    x_BLC: Tensor,
    lengths_B: Tensor,
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Check the layer and its compiled peers at the timed size, on the first and the last row."""
    x, lengths = gate.end_rows(x_BLC), gate.end_rows(lengths_B)
    wide = copy.deepcopy(layer).double()
    ref64 = {"y": peers.reference_mixer(wide, x.double(), lengths)}
    low = {"y": peers.reference_mixer(layer, x, lengths)}
    ours = gate.admit(OURS, {"y": gate.end_rows(layer(x_BLC, lengths_B))}, ref64, low)
    runs = {name: partial(_end_rows, peer, x_BLC) for name, peer in compiled.items()}
    others, notes = gate.admit_peers(runs, ref64, low)
    return {OURS: ours, **others}, notes


def _admit_softmax(
    softmax: dict[str, peers.SoftmaxLayer], x_BLC: Tensor
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Check the softmax layers, which share their weights, on the first and the last row, cut short."""
    x = gate.end_rows(x_BLC)[:, :LONGEST_PLAIN_ATTENTION].contiguous()
    first = next(iter(softmax.values()))
    plain = peers.SoftmaxLayer(x.shape[-1], *first.heads[1:], peers.plain_attention)
    ref64 = {"y": plain.with_weights(first.qkv.double(), first.out.double())(x.double())}
    low = {"y": plain.with_weights(first.qkv, first.out)(x)}
    return gate.admit_peers({name: partial(_outputs, peer, x) for name, peer in softmax.items()}, ref64, low)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, ratios beside the limit's."""
    columns = {OURS: "GBLA", FA3: "FA3", CUDNN: "cuDNN", FLASH: "torch flash", COMPILED: "torch.compile GBLA"}
    headers = ["L", *(f"{title} ms" for title in columns.values()), "GBLA eager", "FA3 eager"]
    headers += ["FA3 / GBLA", "limit ms", "FA3 / limit", "share of limit"]
    lines = []
    for row in rows:
        graph = [tables.median(row["graph_ms"], name) for name in columns]
        eager = [tables.median(row["eager_ms"], name) for name in (OURS, FA3)]
        ratios = [tables.times(row["fa3_over_ours"]), row["limit_ms"], tables.times(row["fa3_over_limit"])]
        lines.append([row["length"], *graph, *eager, *ratios, tables.share(row["share_of_limit"])])
    first = rows[0]
    notes = [
        f"B {first['batch']}, d {first['d_model']}, H {first['num_heads']}, D {first['head_dim']}, bf16, forward; "
        "milliseconds in a CUDA graph where not said otherwise, median.",
        f"Limit: both projections, timed at their widths of {first['packed_width']} and {first['d_model']} columns, "
        f"and each other tensor moved once at the speed of a kernel that copies, {first['copy_tb_s']:.2f} TB/s.",
        "torch.compile GBLA: the plain bf16 layer of benchmarks/plain.py, full rows, the fastest mode of "
        f"{', '.join(tables.modes(rows)) or 'none'}.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)


def short_table(rows: list[dict[str, Any]]) -> str:
    """Return length, milliseconds of ours and of the two peers that matter, and how far ahead ours is and could be."""
    headers = ["history length", "GBLA, ms", "softmax, FlashAttention-3, ms", "softmax, cuDNN, ms"]
    headers += ["GBLA, torch.compile, ms", "FlashAttention-3 / GBLA", "the same at the estimated limit"]
    lines = []
    for row in rows:
        graph = [tables.median(row["graph_ms"], name) for name in (OURS, FA3, CUDNN, COMPILED)]
        ahead = [tables.times(row["fa3_over_ours"]), tables.times(row["fa3_over_limit"])]
        lines.append([f"{row['length']:,}", *graph, *ahead])
    first = rows[0]
    note = (
        f"One mixer layer, B {first['batch']}, d {first['d_model']}, {first['num_heads']} heads of {first['head_dim']}"
        ", bf16, forward, in a CUDA graph. Estimated limit: the projections timed alone, each other tensor moved once."
    )
    return tables.render(headers, lines, [note])
