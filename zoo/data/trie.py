"""The tree of all legal semantic IDs, in the form that constrained beam search reads: three flat arrays.

Nodes are numbered level by level, node 0 is the root; the edges of node n are child_offsets[n] .. child_offsets[n + 1],
sorted by code. The edges of the last digit lead to items in place of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from zoo.errors import DataError, ShapeError


@dataclass(frozen=True, eq=False)
class Trie:
    """A trie over codes [N, M] in compressed sparse rows, on one device.

    ``child_offsets`` int64 [nodes + 1], ``child_codes`` int32 [edges], ``child_nodes`` int32 [edges] (the dense item
    index at the last digit). ``widths`` [M] is the largest number of children of any node at each depth.
    """

    child_offsets: torch.Tensor
    child_codes: torch.Tensor
    child_nodes: torch.Tensor
    widths: tuple[int, ...]

    @classmethod
    def from_codes(cls, codes: np.ndarray) -> Trie:
        """Build the trie of ``codes`` [N, M], any integer type, one distinct row for each item.

        Sorts once; a million items take a few seconds. Raises ``ShapeError`` for another shape and ``DataError`` for
        no items, or two that share a row.
        """
        if codes.ndim != 2 or codes.shape[1] == 0:
            raise ShapeError(f"codes have the shape {codes.shape}, but a trie is built from [items, digits]")
        if len(codes) == 0:
            raise DataError("a trie needs at least one item, got none; prepare the semantic IDs first")
        order = np.lexsort(codes.T[::-1])
        ordered = codes[order]
        digits = codes.shape[1]
        differs = ordered[1:] != ordered[:-1]
        is_new = np.concatenate([np.ones((1, digits), bool), np.logical_or.accumulate(differs, axis=1)])
        if not is_new[:, -1].all():
            first, second = sorted(order[np.flatnonzero(~is_new[:, -1])[0] + np.array([-1, 0])].tolist())
            raise DataError(f"items {first} and {second} share the codes {codes[first].tolist()}; IDs must be unique")

        # Depth d holds one node for each distinct prefix of d digits; its rows start where that prefix changes.
        starts = [np.zeros(1, np.int64)] + [np.flatnonzero(is_new[:, digit]) for digit in range(digits)]
        first_nodes = np.cumsum([0] + [len(start) for start in starts])
        counts, edge_codes, edge_nodes, widths = [], [], [], []
        for depth in range(digits):
            parents = np.searchsorted(starts[depth], starts[depth + 1], side="right") - 1
            children = np.bincount(parents, minlength=len(starts[depth]))
            counts.append(children)
            widths.append(int(children.max()))
            edge_codes.append(ordered[starts[depth + 1], depth])
            last = depth == digits - 1
            edge_nodes.append(order if last else first_nodes[depth + 1] + np.arange(len(starts[depth + 1])))
        return cls(
            child_offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)),
            child_codes=torch.from_numpy(np.concatenate(edge_codes).astype(np.int32)),
            child_nodes=torch.from_numpy(np.concatenate(edge_nodes).astype(np.int32)),
            widths=tuple(widths),
        )

    @property
    def num_nodes(self) -> int:
        """Number of inner nodes, the root among them."""
        return self.child_offsets.shape[0] - 1

    @property
    def max_children(self) -> int:
        """Largest number of children of any node: the width that is right at every depth."""
        return max(self.widths)

    def to(self, device: torch.device | str) -> Trie:
        """Return the trie with its arrays on ``device``."""
        return Trie(
            self.child_offsets.to(device), self.child_codes.to(device), self.child_nodes.to(device), self.widths
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the three arrays as numpy, named as they are stored beside the codes."""
        names = ("child_offsets", "child_codes", "child_nodes")
        return {name: getattr(self, name).cpu().numpy() for name in names}

    def children(
        self, nodes: torch.Tensor, width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the children of ``nodes`` (integer [...], each in 0 .. num_nodes - 1), padded to one static width.

        The result is codes int64 [..., width], next nodes int64 [..., width] (item indices at the last digit) and
        valid bool [..., width]; codes and nodes are 0 where not valid. ``width`` defaults to ``max_children``; at a
        known depth ``widths[depth]`` loses nothing and may be smaller. A narrower one cuts children off.

        Raises ``ShapeError`` for a width outside 1 .. max_children.
        """
        width = self.max_children if width is None else width
        if not 1 <= width <= self.max_children:
            raise ShapeError(f"a width of {width} children was asked for, but this trie takes 1 to {self.max_children}")
        nodes = nodes.long()
        first = self.child_offsets[nodes].unsqueeze(-1)
        end = self.child_offsets[nodes + 1].unsqueeze(-1)
        edges = first + torch.arange(width, device=nodes.device)
        valid = edges < end
        edges = torch.where(valid, edges, 0)
        codes = torch.where(valid, self.child_codes[edges], 0).long()
        return codes, torch.where(valid, self.child_nodes[edges], 0).long(), valid
