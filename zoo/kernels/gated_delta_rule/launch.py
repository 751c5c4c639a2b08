"""The functions that launch the Triton kernels, and what they need to know of the tensors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.gated_delta_rule.parameters import (
    CHUNK,
    FEWEST_COLUMNS,
    HEAD_DIMS,
    LONGEST_STEP,
    GradientsConfig,
    Segments,
    SolveConfig,
    WalkConfig,
    dot_precision,
    gradients_config,
    segments,
    solve_config,
    solve_precision,
    step_config,
    walk_back_config,
    walk_config,
)
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import Choice, capability, choose_triton, multiprocessors, on_device

_LARGEST_INT32 = 2**31 - 1
_TMA_ALIGNMENT = 16


class Solved(NamedTuple):
    """What a chunk needs before its state is known; the names are those of ``triton_solve``."""

    inverse: Tensor
    """T diag(b) [B, H, N, C, C] in the dtype of k"""
    gates: Tensor
    """[B, H, N, C] float32: log a in float32, sums of log2 a from the chunk's start in 16 bits"""
    norms: Tensor
    """[B, H, N, C] float32: 1 / sqrt(|k|^2 + eps), its logarithm to base 2 in 16 bits; only if keys are normalised"""

    def rows(self) -> Tensor:
        """Return the inverses as one tensor of rows [1, B * H * N * C, 1, C]."""
        return self.inverse.view(1, -1, 1, CHUNK)


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
    cut: Segments | None = None,
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
    """
    batch, length, heads, key_dim = inputs.q.shape
    value_dim = inputs.v.shape[3]
    o = torch.empty(batch, length, heads, value_dim, dtype=inputs.q.dtype, device=inputs.q.device)
    final = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=inputs.q.device)
    if batch and length <= LONGEST_STEP and solve_with is walk_with is cut is None:
        _step(inputs, lengths, o, final, scale, normalize)
    elif batch:
        solved = solve(inputs, lengths, normalize, solve_with)
        walk = _Walk(inputs, lengths, solved, normalize, walk_with, cut)
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
    """
    from zoo.kernels.gated_delta_rule.triton_backward import gradients_kernel

    q, k, v = (_rows_together(x) for x in inputs[:3])
    batch, length, heads, key_dim = q.shape
    value_dim, device, dtype = v.shape[3], q.device, q.dtype
    grad_o = grad_o.to(dtype).contiguous()
    grad_initial = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=device)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=device) for x in inputs[:3])
    dlog_decay, dbeta = (torch.empty(batch, length, heads, dtype=torch.float32, device=device) for _ in range(2))
    if batch:
        solved = solve(inputs, lengths, normalize, solve_with)
        walk = _Walk(inputs, lengths, solved, normalize, walk_with, cut)
        states = torch.empty(batch, heads, walk.chunks, value_dim, key_dim, dtype=dtype, device=device)
        grad_states = torch.empty_like(states)
        walk("states", walk.initial_states(), states=states)
        back = _WalkBack(walk, grad_o, scale, walk_back_with)
        back(back.final_gradients(grad_state), dv=dv, grad_initial=grad_initial, grad_states=grad_states)
        parallel = gradients_with or gradients_config(key_dim, value_dim, dtype, capability(device))
        if length:
            with on_device(q):
                gradients_kernel[(batch * heads * walk.chunks,)](
                    q, k, v, grad_o, dv, *solved, states, grad_states, lengths, dq, dk, dlog_decay, dbeta,
                    length, heads, walk.chunks, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
                    K=key_dim, K_PADDED=max(key_dim, FEWEST_COLUMNS), V=value_dim, BLOCK_V=parallel.block_v,
                    NORMALIZE=normalize, PRECISION=dot_precision(dtype), num_warps=parallel.num_warps,
                    **parallel.limit(),
                )  # fmt: skip
    gates = dlog_decay.to(inputs.log_decay.dtype), dbeta.to(inputs.beta.dtype)
    return Inputs(dq, dk, dv, *gates, grad_initial)


class _Walk:
    """Walks over the chunks of one call: all of them share tensors, parameters and segments."""

    def __init__(
        self,
        inputs: Inputs,
        lengths: Tensor,
        solved: Solved,
        normalize: bool,
        config: WalkConfig | None,
        cut: Segments | None,
    ) -> None:
        self.q, self.k, self.v = (_rows_together(x) for x in inputs[:3])
        self.first = None if inputs.initial_state is None else inputs.initial_state.contiguous()
        self.lengths, self.solved, self.normalize = lengths, solved, normalize
        self.batch, self.length, self.heads, self.key_dim = self.q.shape
        self.value_dim, self.chunks = self.v.shape[3], solved.gates.shape[2]
        self.config = config or walk_config(self.key_dim, self.value_dim, self.q.dtype, capability(self.q.device))
        programs = self.batch * self.heads * (self.value_dim // self.config.block_v)
        self.cut = cut or segments(programs, self.chunks, self.key_dim, multiprocessors(self.q.device))

    def __call__(
        self,
        mode: str,
        initial: Tensor | None,
        *,
        o: Tensor | None = None,
        final: Tensor | None = None,
        states: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Walk in one of the modes of ``walk_kernel``, from ``initial`` [B, H, segments, K, V] or zeros."""
        from zoo.kernels.gated_delta_rule.triton_walk import walk_kernel

        q, k, v, solved = self.q, self.k, self.v, self.solved
        value_dim = self.key_dim if mode == "transition" else self.value_dim
        block_v = min(self.config.block_v, value_dim)
        tiles = [(q, self.key_dim), (k, self.key_dim), (v, block_v), (solved.rows(), CHUNK)]
        if mode == "transition":
            tiles[2] = (k, self.key_dim)
        tiles += [(o, block_v)] if o is not None else []
        descriptors, tma = _descriptors(tiles, self.config.tma)
        q_desc, k_desc, v_desc, inverse_desc, o_desc = (*descriptors, k)[:5]
        with on_device(q):
            walk_kernel[(self.batch * self.heads * self.cut.number * (value_dim // block_v),)](
                q, q_desc, k, k_desc, v, v_desc, solved.inverse, inverse_desc, solved.gates, solved.norms,
                solved.gates if initial is None else initial, self.lengths,
                k if o is None else o, o_desc, solved.gates if final is None else final, k if states is None else states,
                self.length, self.heads, self.chunks, *self.cut,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
                K=self.key_dim, V=value_dim, BLOCK_V=block_v, NORMALIZE=self.normalize, INITIAL=initial is not None,
                MODE=mode, TMA=tma, PRECISION=dot_precision(q.dtype), STAGES=self.config.num_stages,
                num_warps=self.config.num_warps,
            )  # fmt: skip

    def initial_states(self) -> Tensor | None:
        """Return the state before each segment, [B, H, segments, K, V], None for zeros."""
        if self.cut.number == 1:
            return self.first
        sums = self.per_segment(self.value_dim)
        self("sum", None, final=sums)
        return self.scan(sums, self.transitions(), self.first, back=False)

    @functools.cached_property
    def _transitions(self) -> Tensor:
        transitions = self.per_segment(self.key_dim)
        self("transition", None, final=transitions)
        return transitions

    def transitions(self) -> Tensor:
        """Return what each segment makes of the state before it, [B, H, segments, K, K]."""
        return self._transitions

    def per_segment(self, width: int) -> Tensor:
        """Return room for [B, H, segments, K, width] float32."""
        shape = self.batch, self.heads, self.cut.number, self.key_dim, width
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def scan(self, sums: Tensor, transitions: Tensor, first: Tensor | None, *, back: bool) -> Tensor:
        """Return the state before each segment, or with ``back`` the gradient of the state after each."""
        from zoo.kernels.gated_delta_rule.triton_walk import scan_kernel

        found = torch.empty_like(sums)
        block_v = min(self.value_dim, 16)
        with on_device(self.q):
            scan_kernel[(self.batch * self.heads * (self.value_dim // block_v),)](
                sums, transitions, sums if first is None else first, found, self.cut.number,
                K=self.key_dim, V=self.value_dim, BLOCK_V=block_v, INITIAL=first is not None, BACK=back, num_warps=4,
            )  # fmt: skip
        return found


class _WalkBack:
    """The walk back of one call."""

    def __init__(self, walk: _Walk, grad_o: Tensor, scale: float, config: WalkConfig | None) -> None:
        self.walk, self.grad_o, self.scale = walk, grad_o, scale
        device, dtype = grad_o.device, grad_o.dtype
        self.config = config or walk_back_config(walk.key_dim, walk.value_dim, dtype, capability(device))

    def __call__(
        self, final: Tensor | None, *, grad_initial: Tensor, dv: Tensor | None = None, grad_states: Tensor | None = None
    ) -> None:
        """Walk from ``final`` [B, H, segments, K, V] or zeros; without ``dv`` only for the gradients of the states."""
        from zoo.kernels.gated_delta_rule.triton_backward import walk_back_kernel

        walk, grad_o, solved = self.walk, self.grad_o, self.walk.solved
        q, k, block_v = walk.q, walk.k, self.config.block_v
        tiles = [(q, walk.key_dim), (k, walk.key_dim), (grad_o, block_v), (solved.rows(), CHUNK)]
        tiles += [(dv, block_v)] if dv is not None else []
        descriptors, tma = _descriptors(tiles, self.config.tma)
        q_desc, k_desc, grad_o_desc, inverse_desc, dv_desc = (*descriptors, k)[:5]
        with on_device(q):
            walk_back_kernel[(walk.batch * walk.heads * walk.cut.number * (walk.value_dim // block_v),)](
                q, q_desc, k, k_desc, grad_o, grad_o_desc, solved.inverse, inverse_desc, solved.gates, solved.norms,
                grad_initial if final is None else final, walk.lengths, k if dv is None else dv, dv_desc, grad_initial,
                k if grad_states is None else grad_states,
                walk.length, walk.heads, walk.chunks, *walk.cut, *q.stride()[:3], *k.stride()[:3], self.scale,
                K=walk.key_dim, V=walk.value_dim, BLOCK_V=block_v, NORMALIZE=walk.normalize, FINAL=final is not None,
                OUTPUT=dv is not None, TMA=tma, PRECISION=dot_precision(q.dtype), STAGES=self.config.num_stages,
                num_warps=self.config.num_warps,
            )  # fmt: skip

    def final_gradients(self, grad_state: Tensor | None) -> Tensor | None:
        """Return the gradient of the state after each segment, [B, H, segments, K, V], None for zeros."""
        walk = self.walk
        last = None if grad_state is None else grad_state.to(torch.float32).contiguous()
        if walk.cut.number == 1:
            return last
        sums = walk.per_segment(walk.value_dim)
        self(None, grad_initial=sums)
        return walk.scan(sums, walk.transitions(), last, back=True)


def _step(inputs: Inputs, lengths: Tensor, o: Tensor, final: Tensor, scale: float, normalize: bool) -> None:
    from zoo.kernels.gated_delta_rule.triton_step import step_kernel

    q, k, v = (_rows_together(x) for x in inputs[:3])
    log_decay, beta = inputs.log_decay, inputs.beta
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
