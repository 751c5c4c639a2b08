"""One GBLA mixer layer against softmax layers with the same projections, and against what the machine allows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import gate, limits, peers, tables, timing
from benchmarks.timing import Candidate
from zoo.layers import GatedBidirectionalLinearAttention

OURS, FA3, CUDNN, FLASH, COMPILED = "gbla", "fa3", "cudnn", "torch_flash", "torch_compile_gbla"
LONGEST_PLAIN_ATTENTION = 1024
"""Softmax peers are checked at this length at most: the float64 reference forms the weights [B, H, L, L]."""


def measure(
    batch: int = 8,
    d_model: int = 1024,
    heads: int = 16,
    head_dim: int = 64,
    lengths: str = "512,1024,2048,4096,8192,32768",
    seconds: float = 0.1,
) -> list[dict[str, Any]]:
    """Return a row a length: milliseconds in a CUDA graph and eager, bf16, forward only, full rows.

    Args:
        batch: B.
        d_model: width of the layer.
        heads: H.
        head_dim: D.
        lengths: comma-separated.
        seconds: of each candidate in each of three rounds.
    """
    device = timing.require_cuda("gbla_layer")
    bandwidth, rate = timing.copy_bandwidth(device), timing.matmul_rate(device)
    rows = []
    for length in map(int, lengths.split(",")):
        size = limits.MixerSize(batch, length, d_model, heads, head_dim)
        row = _one_length(size, device, bandwidth, seconds)
        rows.append({**row, "copy_tb_s": bandwidth / 1e12, "matmul_tflop_s": rate / 1e12})
        torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def _one_length(size: limits.MixerSize, device: torch.device, bandwidth: float, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sets = timing.input_sets(2 * size.tokens * size.d_model)
    inputs = [
        torch.randn(size.batch, size.length, size.d_model, device=device, dtype=torch.bfloat16) for _ in range(sets)
    ]
    lengths_B = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
    layer = GatedBidirectionalLinearAttention(size.d_model, size.num_heads, size.head_dim).to(device, torch.bfloat16)
    compiled = torch.compile(partial(peers.reference_mixer, layer), dynamic=False)
    softmax, notes = _softmax_peers(size, layer)
    shares, wrong = _admit_linear(layer, compiled, inputs[0], lengths_B)
    softmax_shares, wrong_softmax = _admit_softmax(softmax, inputs[0])
    shares |= softmax_shares
    notes += wrong + wrong_softmax

    candidates: dict[str, Candidate] = {OURS: lambda index: layer(inputs[index], lengths_B)}
    for name, peer in softmax.items():
        if name in shares:
            candidates[name] = partial(_call, peer, inputs)
    if COMPILED in shares:
        candidates[COMPILED] = lambda index: compiled(inputs[index], lengths_B)
    graph = timing.time_graphs(candidates, sets, seconds=seconds)
    eager = timing.time_eager(candidates, sets, seconds=seconds)

    shapes = [(size.d_model, layer.layout.width), (size.inner, size.d_model)]
    projections = timing.time_projections(size.tokens, shapes, device).median
    limit = projections + limits.milliseconds(size.layer_bytes(), bandwidth)
    fa3 = graph[FA3].median if FA3 in graph else None
    return {
        **vars(size),
        "dtype": "bf16",
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
    size: limits.MixerSize, layer: GatedBidirectionalLinearAttention
) -> tuple[dict[str, peers.SoftmaxLayer], list[str]]:
    """Return the softmax layers by name, with weights of the linear layer: its first 3 * H * D columns are q, k, v."""
    fa3, note = peers.flash_attention_3()
    attentions: dict[str, peers.Attention] = {
        **({FA3: fa3} if fa3 else {}),
        CUDNN: peers.cudnn_attention,
        FLASH: peers.torch_flash_attention,
    }
    qkv, out = layer.projection.weight[: 3 * size.inner], layer.out.weight
    made = {
        name: peers.SoftmaxLayer(size.d_model, size.num_heads, size.head_dim, attention).with_weights(qkv, out)
        for name, attention in attentions.items()
    }
    return made, [note, peers.FLA_NOTE]


def _call(peer: peers.SoftmaxLayer, inputs: list[Tensor], index: int) -> Tensor:
    return peer(inputs[index])


def _outputs(peer: peers.SoftmaxLayer, x_BLC: Tensor) -> dict[str, Tensor]:
    return {"y": peer(x_BLC)}


def _admit_linear(
    layer: GatedBidirectionalLinearAttention, compiled: Any, x_BLC: Tensor, lengths_B: Tensor
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Check the layer and the compiled reference at the timed size, on the first and the last row."""
    x, lengths = gate.end_rows(x_BLC), gate.end_rows(lengths_B)
    wide = copy.deepcopy(layer).double()
    ref64 = {"y": peers.reference_mixer(wide, x.double(), lengths)}
    low = {"y": peers.reference_mixer(layer, x, lengths)}
    ours = gate.admit(OURS, {"y": gate.end_rows(layer(x_BLC, lengths_B))}, ref64, low)
    others, notes = gate.admit_peers({COMPILED: lambda: {"y": gate.end_rows(compiled(x_BLC, lengths_B))}}, ref64, low)
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
    columns = {OURS: "GBLA", FA3: "FA3", CUDNN: "cuDNN", FLASH: "torch flash", COMPILED: "compiled GBLA"}
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
        "Limit: both projections, timed, and each other tensor moved once at the speed of a device copy, "
        f"{first['copy_tb_s']:.2f} TB/s.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)
