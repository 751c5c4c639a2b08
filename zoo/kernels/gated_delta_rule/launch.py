"""The functions that launch the Triton kernels, and what they need to know of the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.gated_delta_rule import parameters
from zoo.kernels.gated_delta_rule.gradients import Found, Written, write_gradients
from zoo.kernels.gated_delta_rule.parameters import (
    CHUNK,
    HEAD_DIMS,
    LONGEST_STEP,
    GradientsConfig,
    Segments,
    SolveConfig,
    WalkConfig,
    dot_precision,
    solve_config,
    solve_registers,
    step_config,
)
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.gated_delta_rule.walks import Solved, Walk, WalkBack, addressed, rows_together
from zoo.kernels.launch import Choice, capability, choose_triton, on_device


def choose(inputs: Inputs) -> Choice:
    """Return whether the Triton kernels take these inputs, and why."""
    return choose_for(inputs.q.device, inputs.q.dtype, inputs.q.shape[3], inputs.v.shape[3])


def choose_for(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> Choice:
    """Return whether the Triton kernels take this device, dtype and these widths, and why."""
    choice = choose_triton(device, dtype)
    for name, dim in (("key", key_dim), ("value", value_dim)):
        if choice.ok and dim not in HEAD_DIMS:
            return Choice(False, f"{name} width {dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if choice.ok and not parameters.has_kernels(key_dim, dtype, capability(device)):
        return Choice(False, f"{key_dim} keys in {dtype} would not fit the shared memory of this GPU")
    return choice


def choose_backward(inputs: Inputs) -> Choice:
    """Return whether the Triton kernels of the gradients take these inputs, and why."""
    choice = choose(inputs)
    if choice.ok and not parameters.has_gradients(inputs.q.shape[3], inputs.q.dtype):
        return Choice(
            False, f"the gradients of {inputs.q.shape[3]} keys in {inputs.q.dtype} would not fit shared memory"
        )
    return choice


def empty_solved(k: Tensor, normalize: bool) -> Solved:
    """Return tensors for what ``solve`` writes for keys [B, T, H, K], flat."""
    inverse, gates, norms, bounds = (
        torch.empty(math.prod(shape), dtype=dtype, device=k.device)
        for shape, dtype in zip(_solved_shapes(k), (k.dtype, *3 * (torch.float32,)), strict=True)
    )
    return Solved(inverse, gates, norms if normalize else gates, bounds)


def shaped_solved(flat: Iterable[Tensor], k: Tensor) -> Solved:
    """Return what ``solve`` writes for these keys in its shape."""
    return Solved(*(part.view(shape) for part, shape in zip(flat, _solved_shapes(k), strict=True)))


def _solved_shapes(k: Tensor) -> tuple[tuple[int, ...], ...]:
    batch, length, heads, _ = k.shape
    gates = batch, heads, -(-length // CHUNK), CHUNK
    return (*gates, CHUNK), gates, gates, gates[:3]


def solve(inputs: Inputs, lengths: Tensor, normalize: bool, config: SolveConfig | None = None) -> Solved:
    """Return T diag(b), gates and norms of all chunks; what is wholly padding is not written."""
    k, log_decay, beta = rows_together(inputs.k), addressed(inputs.log_decay), addressed(inputs.beta)
    batch, length, heads, key_dim = k.shape
    chunks = -(-length // CHUNK)
    solved = shaped_solved(empty_solved(k, normalize), k)
    if not solved.gates.numel():
        return solved
    arguments = k, log_decay, beta, lengths, *solved, length, heads, chunks
    strides = *k.stride()[:3], *log_decay.stride(), *beta.stride()
    options: dict[str, Any] = {"K": key_dim, "NORMALIZE": normalize}
    registers = solve_registers(key_dim, k.dtype, capability(k.device)) if config is None else None
    if registers is not None:
        from zoo.kernels.gated_delta_rule.gluon_solve import specialized_solve_kernel as kernel

        config = SolveConfig(1, registers)
    else:
        from zoo.kernels.gated_delta_rule.triton_solve import solve_kernel as kernel

        config = config or solve_config(key_dim, k.dtype, capability(k.device))
        options["PRECISION"] = dot_precision(k.dtype)
    options |= {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    with on_device(k):
        kernel[(batch * heads * chunks,)](*arguments, *strides, **options)
    return solved


def forward(
    inputs: Inputs,
    lengths: Tensor,
    scale: float,
    normalize: bool,
    solve_with: SolveConfig | None = None,
    walk_with: WalkConfig | None = None,
    cut: Segments | None = None,
    solved: Solved | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the final state [B, H, K, V].

    Args:
        inputs: of the op.
        lengths: int32 [B].
        scale: factor on o.
        normalize: whether queries and keys are normalised.
        solve_with: parameters of the inverse; default: the table's.
        walk_with: parameters of the walk; default: the table's.
        cut: segments of the walk; default: by the rule.
        solved: what ``solve`` returns, if it is there already.
    """
    batch, length, heads, key_dim = inputs.q.shape
    value_dim = inputs.v.shape[3]
    o = torch.empty(batch, length, heads, value_dim, dtype=inputs.q.dtype, device=inputs.q.device)
    final = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=inputs.q.device)
    if batch and length <= LONGEST_STEP and solve_with is walk_with is cut is None:
        _step(inputs, lengths, o, final, scale, normalize)
    elif batch:
        solved = solved or solve(inputs, lengths, normalize, solve_with)
        walk = Walk(inputs, lengths, solved, normalize, walk_with, cut)
        walk("output", walk.initial_states(), o=o, final=final, scale=scale)
    return o, final


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
    cut: Segments | None = None,
    solved: Solved | None = None,
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
        cut: segments of both walks; default: by the rule.
        solved: what ``solve`` returned in the forward, if it was kept.
    """
    batch, length, heads, key_dim = inputs.q.shape
    value_dim, device, dtype = inputs.v.shape[3], inputs.q.device, inputs.q.dtype
    grad_o = grad_o.to(dtype).contiguous()
    grad_initial = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=device)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=device) for x in inputs[:3])
    dlog_decay, dbeta = (torch.empty(batch, length, heads, dtype=torch.float32, device=device) for _ in range(2))
    if batch:
        solved = solved or solve(inputs, lengths, normalize, solve_with)
        walk = Walk(inputs, lengths, solved, normalize, walk_with, cut)
        states = torch.empty(batch, heads, walk.chunks, value_dim, key_dim, dtype=dtype, device=device)
        grad_states = torch.empty_like(states)
        walk("states", walk.initial_states(), states=states)
        back = WalkBack(walk, grad_o, scale, walk_back_with)
        back(back.final_gradients(grad_state), dv=dv, grad_initial=grad_initial, grad_states=grad_states)
        found, written = Found(grad_o, dv, states, grad_states), Written(dq, dk, dlog_decay, dbeta)
        write_gradients(walk, addressed(inputs.beta), found, written, scale, gradients_with)
    gates = dlog_decay.to(inputs.log_decay.dtype), dbeta.to(inputs.beta.dtype)
    return Inputs(dq, dk, dv, *gates, grad_initial)


def _step(inputs: Inputs, lengths: Tensor, o: Tensor, final: Tensor, scale: float, normalize: bool) -> None:
    from zoo.kernels.gated_delta_rule.triton_step import step_kernel

    q, k, v = (rows_together(x) for x in inputs[:3])
    log_decay, beta = addressed(inputs.log_decay), addressed(inputs.beta)
    initial = final if inputs.initial_state is None else inputs.initial_state.contiguous()
    batch, length, heads, key_dim = q.shape
    value_dim = v.shape[3]
    config = step_config(key_dim, value_dim)
    with on_device(q):
        step_kernel[(batch * heads * (value_dim // config.block_v),)](
            q, k, v, log_decay, beta, initial, lengths, o, final, length, heads,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_decay.stride(), *beta.stride(), scale,
            K=key_dim, V=value_dim, BLOCK_V=config.block_v, NORMALIZE=normalize,
            INITIAL=inputs.initial_state is not None, num_warps=config.num_warps,
        )  # fmt: skip
