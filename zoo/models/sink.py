"""The semantic state sink, made visible: how much each write of a recurrent memory still adds to each readout.

With S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T the readout is linear in the values that were written:

    o_t = scale sum_j P_tj v_j        P = (Q K^T . D) (I + A)^-1 diag(b)

with D and A as in ``zoo.kernels.gated_delta_rule``. So what the write at j still adds at t, through all later decays
and erasures, is P_tj v_j; its norm is the influence of j on t.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.errors import ConfigError
from zoo.kernels.ragged import valid_positions
from zoo.models.sinkrec import SinkRec
from zoo.models.sinkrec_layers import TDGD, Events, Writes

MOST_POSITIONS = 8192
"""A matrix of L x L a head is made."""


class Sink(NamedTuple):
    """What a history's writes do.

    Attributes:
        influence: float64 [L], of the write at each position on all later readouts, over all heads, layers and loops.
        codes: int64 [L], the first-level memory code of each position.
        code: the most frequent one.
        ratio: share of the total influence that falls on writes of that code.
    """

    influence: Tensor
    codes: Tensor
    code: int
    ratio: float


def influence(writes: Writes, v: Tensor, lengths: Tensor) -> Tensor:
    """Return the influence of each write on each readout, float64 [B, H, L (readout), L (write)].

    Args:
        writes: what a recurrence is run on.
        v: [B, L, H, V].
        lengths: int32 [B]; later positions neither write nor read.

    Raises:
        ConfigError: L is above 8,192.
    """
    _, length, _, key_dim = writes.q.shape
    if length > MOST_POSITIONS:
        raise ConfigError(f"the influence of {length} events needs matrices of that size; {MOST_POSITIONS} is the most")
    valid = valid_positions(lengths, length)
    q, k, values = (
        x.double().masked_fill(~valid[:, :, None, None], 0).transpose(1, 2) for x in (writes.q, writes.k, v)
    )
    log_decay, beta = (
        x.double().masked_fill(~valid.unsqueeze(-1), 0).transpose(1, 2) for x in (writes.log_decay, writes.beta)
    )
    sums = log_decay.cumsum(-1)
    places = torch.arange(length, device=q.device)
    inside = places[:, None] >= places
    decay = torch.exp((sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~inside, -torch.inf))
    erased = (k @ k.mT * decay * beta.unsqueeze(-1)).tril(-1)
    read = q @ k.mT * decay * key_dim**-0.5
    # read (I + A)^-1, row by row of a triangular system.
    share = torch.linalg.solve_triangular(erased, read, upper=False, left=False, unitriangular=True)
    return (share * beta.unsqueeze(-2)).abs() * values.norm(dim=-1).unsqueeze(-2)


@torch.no_grad()
def sink(model: SinkRec, items: Tensor, times: Tensor, codes: Tensor) -> Sink:
    """Measure one history.

    Args:
        model: in evaluation mode.
        items: int64 [L].
        times: int64 [L].
        codes: int64 [L], first-level memory codes: of this model's memory, or, for a model without, of another's.
    """
    lengths = torch.tensor([len(items)], dtype=torch.int32, device=items.device)
    found = torch.zeros(len(items), dtype=torch.float64, device=items.device)

    def add(module: TDGD, arguments: tuple[Tensor, Events, None]) -> None:
        x, events, _ = arguments
        q, k, v, _ = module.convolved(x, events, None)
        writes = module.writes(x, events, q, k)
        for head in range(v.shape[2]):  # one at a time: each takes several matrices of L x L
            own = Writes(*(y[:, :, head : head + 1] for y in writes))
            found.add_(influence(own, v[:, :, head : head + 1], events.lengths).sum((0, 1, 2)))

    hooks = [module.register_forward_pre_hook(add) for module in model.modules() if isinstance(module, TDGD)]
    try:
        model.prefill(items.unsqueeze(0), times.unsqueeze(0), lengths)
    finally:
        for hook in hooks:
            hook.remove()
    code = int(codes.mode().values) if len(codes) else -1
    total = float(found.sum())
    return Sink(found, codes, code, float(found[codes == code].sum()) / total if total else 0.0)
