"""The launch of the kernels that write the gradients of queries, keys and gates from what the walks have found."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from zoo.kernels.gated_delta_rule.parameters import (
    CHUNK,
    FEWEST_COLUMNS,
    MOST_REGISTERS,
    GradientsConfig,
    GradientsRing,
    dot_precision,
    gradients_config,
    gradients_ring,
)
from zoo.kernels.gated_delta_rule.walks import Walk, ring_descriptors
from zoo.kernels.launch import capability, multiprocessors, on_device


class Found(NamedTuple):
    """What the walks have found."""

    grad_o: Tensor
    """[B, T, H, V], contiguous"""
    dv: Tensor
    """[B, T, H, V], contiguous"""
    states: Tensor
    """[B, H, N, V, K] before each chunk"""
    grad_states: Tensor
    """[B, H, N, V, K], gradient of the state after each chunk"""


class Written(NamedTuple):
    """What is written: dq, dk [B, T, H, K] in the dtype of k, dlog_decay and dbeta [B, T, H] float32."""

    dq: Tensor
    dk: Tensor
    dlog_decay: Tensor
    dbeta: Tensor


def write_gradients(
    walk: Walk, beta: Tensor, found: Found, written: Written, scale: float, config: GradientsConfig | None
) -> None:
    """Write the gradients; unless a ``config`` is given, by the warp-specialised kernel where there is one."""
    if not written.dlog_decay.numel():
        return
    sizes = walk.key_dim, walk.value_dim, walk.q.dtype, capability(walk.q.device)
    ring = gradients_ring(*sizes) if config is None else None
    if ring is not None and _specialized(walk, beta, found, written, scale, ring):
        return
    from zoo.kernels.gated_delta_rule.triton_backward import gradients_kernel

    config = config or gradients_config(*sizes)
    q, k, v = walk.q, walk.k, walk.v
    with on_device(q):
        gradients_kernel[(walk.batch * walk.heads * walk.chunks,)](
            q, k, v, beta, found.grad_o, found.dv, *walk.solved[:3], found.states, found.grad_states, walk.lengths,
            *written, walk.length, walk.heads, walk.chunks, *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            *beta.stride(), scale,
            K=walk.key_dim, K_PADDED=max(walk.key_dim, FEWEST_COLUMNS), V=walk.value_dim, BLOCK_V=config.block_v,
            NORMALIZE=walk.normalize, PRECISION=dot_precision(q.dtype), num_warps=config.num_warps,
            maxnreg=MOST_REGISTERS,
        )  # fmt: skip


def _specialized(walk: Walk, beta: Tensor, found: Found, written: Written, scale: float, ring: GradientsRing) -> bool:
    """Write with the warp-specialised kernel; return False, having done nothing, if tensors cannot be described."""
    key_dim, block_v = walk.key_dim, min(walk.value_dim, CHUNK)
    states, grad_states = (x.view(1, -1, 1, key_dim) for x in (found.states, found.grad_states))
    tiles: list[Any] = [(walk.q, key_dim), (walk.k, key_dim), (walk.v, block_v), (found.grad_o, block_v)]
    tiles += [(found.dv, block_v), (walk.solved.rows(), CHUNK), (states, key_dim, block_v)]
    tiles += [(grad_states, key_dim, block_v), (written.dq, key_dim), (written.dk, key_dim)]
    descriptors = ring_descriptors(tiles)
    if descriptors is None:
        return False
    from zoo.kernels.gated_delta_rule.gluon_gradients import specialized_gradients_kernel

    programs = min(multiprocessors(walk.q.device), walk.batch * walk.heads * walk.chunks)
    with on_device(walk.q):
        specialized_gradients_kernel[(programs,)](
            *descriptors, walk.solved.gates, walk.solved.norms, beta, walk.lengths, *written,
            walk.batch, walk.length, walk.heads, walk.chunks, walk.q.stride(2), walk.k.stride(2), walk.v.stride(2),
            *beta.stride(), scale,
            K=key_dim, V=walk.value_dim, BLOCK_V=block_v, NORMALIZE=walk.normalize, CHUNKS=ring.num_chunks,
            BLOCKS=ring.num_blocks, SHARED=ring.shared, VALUES_REGISTERS=ring.values_registers,
            LOADER_REGISTERS=ring.loader_registers, num_warps=4,
        )  # fmt: skip
    return True
