"""What an exported graph says about itself: operator sets and custom nodes. Weights outside the file are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from zoo.plugins import DOMAIN


@dataclass(frozen=True)
class GraphFacts:
    """The opset of the standard domain and the number of ``zoo`` nodes of each op."""

    opset: int
    plugins: dict[str, int]


def read_graph(path: Path) -> GraphFacts:
    """Read an ONNX file without its external data."""
    model = onnx.load(path, load_external_data=False)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    count = Counter(node.op_type for node in _nodes(model.graph.node) if node.domain == DOMAIN)
    return GraphFacts(opset, dict(sorted(count.items())))


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, those of subgraphs included; bodies of functions are not part of the graph."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)
