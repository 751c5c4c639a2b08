"""The functions that launch the Triton kernels, and what they need to know of the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.gated_delta_rule.parameters import (
    CHUNK,
    FEWEST_COLUMNS,
    HEAD_DIMS,
    GradientsConfig,
    SolveConfig,
    WalkConfig,
    dot_precision,
    gradients_config,
    solve_config,
    solve_precision,
    walk_back_config,
    walk_config,
)
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import Choice, capability, choose_triton, on_device

_LARGEST_INT32 = 2**31 - 1
_TMA_ALIGNMENT = 16


class Solved(NamedTuple):
    """What a chunk needs before its state is known; the names are those of ``triton_solve``."""

    inverse: Tensor
    """T diag(b) [B, H, N, C, C] in the dtype of k"""
    gates: Tensor
    """[B, H, N, C] float32: log a in float32, sums of log a from the chunk's start in 16 bits"""
    norms: Tensor
    """[B, H, N, C] float32: 1 / sqrt(|k|^2 + eps); not written unless keys are normalised"""


def choose(inputs: Inputs) -> Choice:
    """Return whether the Triton kernels take these inputs, and why."""
    return choose_for(inputs.q.device, inputs.q.dtype, inputs.q.shape[3], inputs.v.shape[3])


def choose_for(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> Choice:
    """Return whether the Triton kernels take this device, dtype and these widths, and why."""
    choice = choose_triton(device, dtype)
    for name, dim in (("key", key_dim), ("value", value_dim)):
        if choice.ok and dim not in HEAD_DIMS:
            return Choice(False, f"{name} width {dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    return choice


def solve(inputs: Inputs, lengths: Tensor, normalize: bool, config: SolveConfig | None = None) -> Solved:
    """Return T diag(b), gates and norms of all chunks; what is wholly padding is not written."""
    from zoo.kernels.gated_delta_rule.triton_solve import solve_kernel

    k, log_decay, beta = _rows_together(inputs.k), inputs.log_decay, inputs.beta
    batch, length, heads, key_dim = k.shape
    chunks = -(-length // CHUNK)
    config = config or solve_config(key_dim, k.dtype, capability(k.device))
    gates = torch.empty(batch, heads, chunks, CHUNK, dtype=torch.float32, device=k.device)
    solved = Solved(
        torch.empty(batch, heads, chunks, CHUNK, CHUNK, dtype=k.dtype, device=k.device),
        gates,
        torch.empty_like(gates) if normalize else gates,
    )
    if gates.numel():
        with on_device(k):
            solve_kernel[(batch * heads * chunks,)](
                k, log_decay, beta, lengths, *solved, length, heads, chunks,
                *k.stride()[:3], *log_decay.stride(), *beta.stride(),
                K=key_dim, NORMALIZE=normalize, DOT_PRECISION=dot_precision(k.dtype),
                PRECISION=solve_precision(k.dtype), num_warps=config.num_warps,
            )  # fmt: skip
    return solved


def forward(
    inputs: Inputs,
    lengths: Tensor,
    scale: float,
    normalize: bool,
    solve_with: SolveConfig | None = None,
    walk_with: WalkConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the final state [B, H, K, V]."""
    batch, length, heads, key_dim = inputs.q.shape
    value_dim = inputs.v.shape[3]
    o = torch.empty(batch, length, heads, value_dim, dtype=inputs.q.dtype, device=inputs.q.device)
    final = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=inputs.q.device)
    if batch:
        solved = solve(inputs, lengths, normalize, solve_with)
        _walk(inputs, lengths, solved, o, final, final, scale, normalize, True, walk_with)
    return o, final


def chunk_states(
    inputs: Inputs, lengths: Tensor, solved: Solved, normalize: bool, config: WalkConfig | None = None
) -> Tensor:
    """Return the state before each chunk, transposed, [B, H, N, V, K] in the dtype of k."""
    batch, length, heads, key_dim = inputs.q.shape
    shape = batch, heads, -(-length // CHUNK), inputs.v.shape[3], key_dim
    states = torch.empty(shape, dtype=inputs.q.dtype, device=inputs.q.device)
    if states.numel():
        _walk(inputs, lengths, solved, states, states, states, 1.0, normalize, False, config)
    return states


def backward(
    grad_o: Tensor,
    grad_state: Tensor | None,
    inputs: Inputs,
    lengths: Tensor,
    scale: float,
    normalize: bool,
    solve_with: SolveConfig | None = None,
    walk_with: WalkConfig | None = None,
    walk_back_with: WalkConfig | None = None,
    gradients_with: GradientsConfig | None = None,
) -> Inputs:
    """Return the gradients of all inputs, that of the initial state even where it was None; deterministic.

    Args:
        grad_o: [B, T, H, V], gradient of o.
        grad_state: [B, H, K, V], gradient of the final state; None for zeros.
        inputs: as in the forward.
        lengths: as in the forward.
        scale: as in the forward.
        normalize: as in the forward.
        solve_with: parameters of the inverse; default: the table's, as those of the other kernels.
        walk_with: parameters of the walk that writes the states.
        walk_back_with: parameters of the walk back.
        gradients_with: parameters of the kernel that writes the other gradients.
    """
    from zoo.kernels.gated_delta_rule.triton_backward import gradients_kernel, walk_back_kernel

    q, k, v = (_rows_together(x) for x in inputs[:3])
    batch, length, heads, key_dim = q.shape
    value_dim, device, dtype = v.shape[3], q.device, q.dtype
    grad_o = grad_o.to(dtype).contiguous()
    grad_initial = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=device)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=device) for x in inputs[:3])
    dlog_decay, dbeta = (torch.empty(batch, length, heads, dtype=torch.float32, device=device) for _ in range(2))
    if batch:
        solved = solve(inputs, lengths, normalize, solve_with)
        chunks = solved.gates.shape[2]
        states = chunk_states(inputs, lengths, solved, normalize, walk_with)
        grad_states = torch.empty_like(states)
        config = walk_back_with or walk_back_config(key_dim, value_dim, dtype, capability(device))
        inverse_rows = solved.inverse.view(1, -1, 1, CHUNK)
        tiles = [(q, key_dim), (k, key_dim), (grad_o, config.block_v), (inverse_rows, CHUNK), (dv, config.block_v)]
        (q_desc, k_desc, grad_o_desc, inverse_desc, dv_desc), tma = _descriptors(tiles, config.tma)
        final = grad_initial if grad_state is None else grad_state.to(torch.float32).contiguous()
        sizes = {"K": key_dim, "V": value_dim, "NORMALIZE": normalize, "PRECISION": dot_precision(dtype)}
        with on_device(q):
            walk_back_kernel[(batch * heads * (value_dim // config.block_v),)](
                q, q_desc, k, k_desc, grad_o, grad_o_desc, solved.inverse, inverse_desc, solved.gates, solved.norms,
                final, lengths, dv, dv_desc, grad_initial, grad_states,
                length, heads, chunks, *q.stride()[:3], *k.stride()[:3], scale,
                **sizes, BLOCK_V=config.block_v, FINAL=grad_state is not None, TMA=tma, STAGES=config.num_stages,
                num_warps=config.num_warps,
            )  # fmt: skip
            if length:
                parallel = gradients_with or gradients_config(key_dim, value_dim, dtype, capability(device))
                gradients_kernel[(batch * heads * chunks,)](
                    q, k, v, grad_o, dv, *solved, states, grad_states, lengths, dq, dk, dlog_decay, dbeta,
                    length, heads, chunks, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
                    **sizes, K_PADDED=max(key_dim, FEWEST_COLUMNS), BLOCK_V=parallel.block_v,
                    num_warps=parallel.num_warps, **parallel.limit(),
                )  # fmt: skip
    gates = dlog_decay.to(inputs.log_decay.dtype), dbeta.to(inputs.beta.dtype)
    return Inputs(dq, dk, dv, *gates, grad_initial)


def _walk(
    inputs: Inputs,
    lengths: Tensor,
    solved: Solved,
    o: Tensor,
    final: Tensor,
    states: Tensor,
    scale: float,
    normalize: bool,
    output: bool,
    config: WalkConfig | None,
) -> None:
    from zoo.kernels.gated_delta_rule.triton_walk import walk_kernel

    q, k, v = (_rows_together(x) for x in inputs[:3])
    batch, length, heads, key_dim = q.shape
    value_dim = v.shape[3]
    config = config or walk_config(key_dim, value_dim, q.dtype, capability(q.device))
    initial = final if inputs.initial_state is None else inputs.initial_state.contiguous()
    block_v = config.block_v
    inverse_rows = solved.inverse.view(1, -1, 1, CHUNK)
    tiles = [(q, key_dim), (k, key_dim), (v, block_v), (inverse_rows, CHUNK)] + ([(o, block_v)] if output else [])
    descriptors, tma = _descriptors(tiles, config.tma)
    q_desc, k_desc, v_desc, inverse_desc, o_desc = (*descriptors, o)[:5]
    with on_device(q):
        walk_kernel[(batch * heads * (value_dim // block_v),)](
            q, q_desc, k, k_desc, v, v_desc, solved.inverse, inverse_desc, solved.gates, solved.norms, initial, lengths,
            o, o_desc, final, states,
            length, heads, solved.gates.shape[2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
            K=key_dim, V=value_dim, BLOCK_V=block_v, NORMALIZE=normalize,
            INITIAL=inputs.initial_state is not None, OUTPUT=output, TMA=tma, PRECISION=dot_precision(q.dtype),
            STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip


def _descriptors(tiles: list[tuple[Tensor, int]], wanted: bool) -> tuple[list[Any], bool]:
    """Return tensor-memory descriptors of [B, T, H, W] tensors as [B * T, H * W], and whether they could be had.

    A tile is a chunk of positions times the given columns. Where one of the tensors cannot be described, the tensors
    themselves take the descriptors' places.
    """
    tensors = [x for x, _ in tiles]
    if not (wanted and all(_is_describable(x) for x in tensors)):
        return list(tensors), False
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        TensorDescriptor(
            x, [x.shape[0] * x.shape[1], (x.shape[2] - 1) * x.stride(2) + x.shape[3]], [x.stride(1), 1], [CHUNK, width]
        )
        for x, width in tiles
    ], True


def _is_describable(x: Tensor) -> bool:
    batch, length, heads, width = x.shape
    return (
        (batch == 1 or x.stride(0) == length * x.stride(1))
        and x.stride(2) >= width
        and x.stride(1) >= (heads - 1) * x.stride(2) + width
        and x.data_ptr() % _TMA_ALIGNMENT == 0
        and x.stride(1) * x.element_size() % _TMA_ALIGNMENT == 0
        and 0 < batch * length <= _LARGEST_INT32
    )


def _rows_together(x: Tensor) -> Tensor:
    """Return ``x`` [B, T, H, W] with the values of a head adjacent; other strides are free, 32-bit within a chunk."""
    return x if x.stride(3) == 1 and x.stride(1) < _LARGEST_INT32 // CHUNK else x.contiguous()
