"""Beam search over semantic IDs, constrained by the trie of the catalogue.

The search calls two functions, so the same code ranks with PyTorch, ONNX Runtime or an engine behind it.
Shape suffixes: B batch, K beams, W children, M digits, V codes, N items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.data.trie import Trie
from zoo.errors import ConfigError

Encode = Callable[[Tensor, Tensor], Any]
"""(item_ids [B, L], lengths [B]) -> whatever the decoder needs."""

DecodeStep = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(encoded, lengths [B], codes [B, K, M], digit [1]) -> logits [B, K, V]."""


class Beams(NamedTuple):
    """The result of a search, best first.

    Attributes:
        items: int64 [B, K], dense item index; -1 for a place that no legal item fills (and without a trie).
        codes: int64 [B, K, M].
        scores: float32 [B, K], log-probability; -inf where there is no item.
    """

    items: Tensor
    codes: Tensor
    scores: Tensor


@torch.no_grad()
def beam_search(
    encode: Encode,
    decode_step: DecodeStep,
    item_ids: Tensor,
    lengths: Tensor,
    *,
    num_digits: int,
    codebook_size: int,
    beams: int,
    trie: Trie | None,
    seen: Tensor | None = None,
) -> Beams:
    """Find the most probable semantic IDs after each history.

    Args:
        encode: reads the histories once.
        decode_step: scores the next digit of every beam.
        item_ids: int64 [B, L].
        lengths: int32 [B].
        num_digits: M.
        codebook_size: V.
        beams: K, kept after every digit.
        trie: of the catalogue; only its codes are written. None lets the model write any code.
        seen: bool [B, N], items that are left out (at the last digit); needs a trie.

    Returns:
        Beams of K places. With K at least the number of prefixes of every depth the search is exact.

    Raises:
        ConfigError: ``beams`` below 1, or ``seen`` without a trie.
    """
    if beams < 1:
        raise ConfigError(f"{beams} beams were asked for; at least 1 is needed")
    if seen is not None and trie is None:
        raise ConfigError("seen items can be left out only with a trie; give one, or leave seen out")
    batch, device = item_ids.shape[0], item_ids.device
    encoded = encode(item_ids, lengths)
    nodes_BK = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    scores_BK = torch.zeros(batch, 1, device=device)
    codes_BKM = torch.zeros(batch, 1, num_digits, dtype=torch.int64, device=device)
    every_code = torch.arange(codebook_size, device=device)
    for digit in range(num_digits):
        logits_BKV = decode_step(encoded, lengths, codes_BKM, torch.tensor([digit], device=device))
        log_probability = torch.log_softmax(logits_BKV.float(), dim=-1)
        if trie is None:
            codes_BKW = every_code.expand(batch, nodes_BK.shape[1], -1)
            next_BKW, valid_BKW = torch.zeros_like(codes_BKW), torch.ones_like(codes_BKW, dtype=torch.bool)
        else:
            codes_BKW, next_BKW, valid_BKW = trie.children(nodes_BK, trie.widths[digit])
            if seen is not None and digit == num_digits - 1:
                items_BKW = next_BKW.clamp(max=seen.shape[1] - 1)  # a dead beam's children are nodes, not items
                known = seen.gather(1, items_BKW.flatten(1)).view(next_BKW.shape)
                valid_BKW = valid_BKW & ~known
        candidates_BKW = scores_BK.unsqueeze(-1) + log_probability.gather(-1, codes_BKW)
        candidates_BKW = candidates_BKW.masked_fill(~valid_BKW, -torch.inf)
        kept = min(beams, candidates_BKW[0].numel()) if batch else 1
        scores_BK, flat_BK = candidates_BKW.flatten(1).topk(kept, dim=1)
        parent_BK = flat_BK // codes_BKW.shape[-1]
        codes_BKM = codes_BKM.gather(1, parent_BK.unsqueeze(-1).expand(-1, -1, num_digits)).clone()
        codes_BKM[..., digit] = codes_BKW.flatten(1).gather(1, flat_BK)
        # A dead beam goes on from the root: legal to look up, and its score stays -inf.
        nodes_BK = next_BKW.flatten(1).gather(1, flat_BK).masked_fill(scores_BK == -torch.inf, 0)
    items_BK = nodes_BK if trie is not None else torch.zeros_like(nodes_BK)
    dead_BK = (scores_BK == -torch.inf) if trie is not None else torch.ones_like(scores_BK, dtype=torch.bool)
    return _padded(Beams(items_BK.masked_fill(dead_BK, -1), codes_BKM, scores_BK), beams)


def _padded(found: Beams, beams: int) -> Beams:
    """Fill up to ``beams`` places with none."""
    missing = beams - found.items.shape[1]
    if missing <= 0:
        return found
    pad = torch.nn.functional.pad
    return Beams(
        pad(found.items, (0, missing), value=-1),
        pad(found.codes, (0, 0, 0, missing)),
        pad(found.scores, (0, missing), value=-torch.inf),
    )
