"""The walks of one call over the chunks of every row and head: what they share, and how rows are cut into segments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.gated_delta_rule.parameters import (
    CHUNK,
    MOST_REGISTERS,
    WIDEST_TRANSITION,
    Segments,
    WalkConfig,
    dot_precision,
    forgotten_bits,
    is_specialized,
    resident_walks,
    segments,
    walk_back_config,
    walk_back_ring,
    walk_config,
    walk_ring,
)
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import capability, multiprocessors, on_device

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
    bounds: Tensor
    """[B, H, N] float32: the logarithm to base 2 of what the norm of a state can grow by"""

    def rows(self) -> Tensor:
        """Return the inverses as one tensor of rows [1, B * H * N * C, 1, C]."""
        return self.inverse.view(1, -1, 1, CHUNK)


def schedule(inputs: Inputs, config: WalkConfig | None = None) -> Segments:
    """Return how the rule cuts the rows of these inputs, walked with ``config`` or the table's parameters."""
    batch, length, heads, key_dim = inputs.q.shape
    sizes = key_dim, inputs.v.shape[3], inputs.q.dtype
    device = inputs.q.device
    return schedule_of(batch * heads, length, *sizes, capability(device), multiprocessors(device), config)


def schedule_of(
    pairs: int,
    length: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: int,
    multiprocessors: int,
    config: WalkConfig | None = None,
) -> Segments:
    """Return how the rule cuts ``pairs`` rows and heads of ``length`` positions on a device of these figures."""
    sizes = key_dim, value_dim, dtype, capability
    block_v = (config or walk_config(*sizes)).block_v
    slots = multiprocessors * resident_walks(specialized=config is None and is_specialized(*sizes))
    transitions = pairs * (key_dim // min(block_v, key_dim)) if key_dim <= WIDEST_TRANSITION else 0
    return segments(pairs * (value_dim // block_v), transitions, -(-length // CHUNK), key_dim, slots)


class Walk:
    """Walks over the chunks of one call: all of them share tensors, parameters and segments.

    Unless a ``config`` is given, the warp-specialised kernels run where there are any and tensor memory access can
    describe the tensors.
    """

    def __init__(
        self,
        inputs: Inputs,
        lengths: Tensor,
        solved: Solved,
        normalize: bool,
        config: WalkConfig | None,
        cut: Segments | None,
    ) -> None:
        self.q, self.k, self.v = (rows_together(x) for x in inputs[:3])
        self.first = None if inputs.initial_state is None else inputs.initial_state.contiguous()
        self.lengths, self.solved, self.normalize = lengths, solved, normalize
        self.batch, self.length, self.heads, self.key_dim = self.q.shape
        self.value_dim, self.chunks = self.v.shape[3], solved.gates.shape[2]
        sizes = self.key_dim, self.value_dim, self.q.dtype, capability(self.q.device)
        self.specialized = config is None and is_specialized(*sizes)
        self.config = config or walk_config(*sizes)
        self.cut = cut or schedule(inputs, config)

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
        if self.specialized and self._specialized(mode, initial, o, final, states, scale):
            return
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
                self._spans_of(mode), k if o is None else o, o_desc, solved.gates if final is None else final,
                k if states is None else states,
                self.length, self.heads, self.chunks, *self.cut,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale,
                K=self.key_dim, V=value_dim, BLOCK_V=block_v, NORMALIZE=self.normalize, INITIAL=initial is not None,
                MODE=mode, TMA=tma, PRECISION=dot_precision(q.dtype), STAGES=self.config.num_stages,
                num_warps=self.config.num_warps, maxnreg=MOST_REGISTERS,
            )  # fmt: skip

    def _specialized(
        self,
        mode: str,
        initial: Tensor | None,
        o: Tensor | None,
        final: Tensor | None,
        states: Tensor | None,
        scale: float,
    ) -> bool:
        """Walk with the warp-specialised kernel; return False, having done nothing, if tensors cannot be described."""
        value_dim = self.key_dim if mode == "transition" else self.value_dim
        tiles = [(self.q, self.key_dim), (self.k, self.key_dim), (self.v, CHUNK), (self.solved.rows(), CHUNK)]
        tiles += [] if o is None else [(o, CHUNK)]
        tiles += [] if states is None else [(states.view(1, -1, 1, self.key_dim), self.key_dim)]
        descriptors = ring_descriptors(tiles)
        if descriptors is None:
            return False
        from zoo.kernels.gated_delta_rule.gluon_walk import specialized_walk_kernel

        *read, written = descriptors if len(descriptors) > 4 else (*descriptors, descriptors[1])
        ring, solved = walk_ring(self.key_dim, mode), self.solved
        with on_device(self.q):
            specialized_walk_kernel[(self.batch * self.heads * self.cut.number * (value_dim // CHUNK),)](
                *read, solved.gates, solved.norms, solved.gates if initial is None else initial, self.lengths,
                self._spans_of(mode), self.k if o is None else o, written,
                solved.gates if final is None else final, written, self.length, self.heads, self.chunks, *self.cut,
                self.q.stride(2), self.k.stride(2), self.v.stride(2), scale,
                K=self.key_dim, V=value_dim, BLOCK_V=CHUNK, NORMALIZE=self.normalize, INITIAL=initial is not None,
                MODE=mode, STAGES=ring.num_stages, SLOTS=ring.num_slots, GROUPS=ring.num_outputs, num_warps=4,
                maxnreg=ring.max_registers,
            )  # fmt: skip
        return True

    @functools.cached_property
    def spans(self) -> Tensor:
        """What of each segment matters outside of it, int32 [B, H, segments, 3], as ``spans_kernel`` writes."""
        from zoo.kernels.gated_delta_rule.triton_walk import spans_kernel

        spans = torch.empty(self.batch, self.heads, self.cut.number, 3, dtype=torch.int32, device=self.q.device)
        with on_device(self.q):
            spans_kernel[(self.batch * self.heads * self.cut.number,)](
                self.solved.bounds, self.lengths, spans, self.length, self.heads, self.chunks, *self.cut,
                LIMIT=forgotten_bits(self.q.dtype), num_warps=1,
            )  # fmt: skip
        return spans

    def _spans_of(self, mode: str) -> Tensor:
        return self.spans if mode in ("sum", "transition") else self.lengths

    def initial_states(self) -> Tensor | None:
        """Return the state before each segment, [B, H, segments, K, V], None for zeros."""
        if self.cut.number == 1:
            return self.first
        sums = self.per_segment(self.value_dim)
        self("sum", None, final=sums)
        return self.scan(sums, self.first, back=False)

    @functools.cached_property
    def transitions(self) -> Tensor:
        """What each segment makes of the state before it, [B, H, segments, K, K]; both directions need it."""
        transitions = self.per_segment(self.key_dim)
        self("transition", None, final=transitions)
        return transitions

    def per_segment(self, width: int) -> Tensor:
        """Return room for [B, H, segments, K, width] float32."""
        shape = self.batch, self.heads, self.cut.number, self.key_dim, width
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def scan(self, sums: Tensor, first: Tensor | None, *, back: bool) -> Tensor:
        """Return the state before each segment, or with ``back`` the gradient of the state after each.

        Both follow from what each segment adds, ``sums`` [B, H, segments, K, V], and the first of them, zeros if None.
        """
        from zoo.kernels.gated_delta_rule.triton_walk import scan_kernel

        found = torch.empty_like(sums)
        block_v = min(self.value_dim, 16)
        with on_device(self.q):
            scan_kernel[(self.batch * self.heads * (self.value_dim // block_v),)](
                sums, self.transitions, sums if first is None else first, self.spans, found, self.cut.number,
                K=self.key_dim, V=self.value_dim, BLOCK_V=block_v, INITIAL=first is not None, BACK=back,
                PRECISION=dot_precision(sums.dtype), num_warps=4,
            )  # fmt: skip
        return found


class WalkBack:
    """The walk back of one call."""

    def __init__(self, walk: Walk, grad_o: Tensor, scale: float, config: WalkConfig | None) -> None:
        self.walk, self.grad_o, self.scale = walk, grad_o, scale
        sizes = walk.key_dim, walk.value_dim, grad_o.dtype, capability(grad_o.device)
        self.specialized = config is None and is_specialized(*sizes)
        self.config = config or walk_back_config(*sizes)

    def __call__(
        self, final: Tensor | None, *, grad_initial: Tensor, dv: Tensor | None = None, grad_states: Tensor | None = None
    ) -> None:
        """Walk from ``final`` [B, H, segments, K, V] or zeros; without ``dv`` only for the gradients of the states."""
        if self.specialized and self._specialized(final, grad_initial, dv, grad_states):
            return
        from zoo.kernels.gated_delta_rule.triton_backward import walk_back_kernel

        walk, grad_o, solved = self.walk, self.grad_o, self.walk.solved
        q, k, block_v = walk.q, walk.k, self.config.block_v
        tiles = [(q, walk.key_dim), (k, walk.key_dim), (grad_o, block_v), (solved.rows(), CHUNK)]
        tiles += [(dv, block_v)] if dv is not None else []
        spans = walk.lengths if dv is not None else walk.spans
        descriptors, tma = _descriptors(tiles, self.config.tma)
        q_desc, k_desc, grad_o_desc, inverse_desc, dv_desc = (*descriptors, k)[:5]
        with on_device(q):
            walk_back_kernel[(walk.batch * walk.heads * walk.cut.number * (walk.value_dim // block_v),)](
                q, q_desc, k, k_desc, grad_o, grad_o_desc, solved.inverse, inverse_desc, solved.gates, solved.norms,
                grad_initial if final is None else final, walk.lengths, spans, k if dv is None else dv, dv_desc,
                grad_initial, k if grad_states is None else grad_states,
                walk.length, walk.heads, walk.chunks, *walk.cut, *q.stride()[:3], *k.stride()[:3], self.scale,
                K=walk.key_dim, V=walk.value_dim, BLOCK_V=block_v, NORMALIZE=walk.normalize, FINAL=final is not None,
                OUTPUT=dv is not None, TMA=tma, PRECISION=dot_precision(q.dtype), STAGES=self.config.num_stages,
                num_warps=self.config.num_warps, maxnreg=MOST_REGISTERS,
            )  # fmt: skip

    def _specialized(
        self, final: Tensor | None, grad_initial: Tensor, dv: Tensor | None, grad_states: Tensor | None
    ) -> bool:
        """Walk with the warp-specialised kernel; return False, having done nothing, if tensors cannot be described."""
        walk, solved = self.walk, self.walk.solved
        tiles = [(walk.q, walk.key_dim), (walk.k, walk.key_dim), (self.grad_o, CHUNK), (solved.rows(), CHUNK)]
        if dv is not None and grad_states is not None:
            tiles += [(dv, CHUNK), (grad_states.view(1, -1, 1, walk.key_dim), walk.key_dim)]
        descriptors = ring_descriptors(tiles)
        if descriptors is None:
            return False
        from zoo.kernels.gated_delta_rule.gluon_backward import specialized_walk_back_kernel

        ring = walk_back_ring(walk.key_dim)
        q_desc, k_desc, grad_o_desc, inverse_desc, dv_desc, grad_states_desc = (*descriptors, *descriptors[2:0:-1])[:6]
        with on_device(walk.q):
            specialized_walk_back_kernel[(walk.batch * walk.heads * walk.cut.number * (walk.value_dim // CHUNK),)](
                q_desc, k_desc, grad_o_desc, inverse_desc, solved.gates, solved.norms,
                grad_initial if final is None else final, walk.lengths, walk.spans if dv is None else walk.lengths,
                walk.k if dv is None else dv, dv_desc, grad_initial, grad_states_desc,
                walk.length, walk.heads, walk.chunks, *walk.cut, walk.q.stride(2), walk.k.stride(2), self.scale,
                K=walk.key_dim, V=walk.value_dim, BLOCK_V=CHUNK, NORMALIZE=walk.normalize, FINAL=final is not None,
                OUTPUT=dv is not None, STAGES=ring.num_stages, SLOTS=ring.num_slots, num_warps=4,
            )  # fmt: skip
        return True

    def final_gradients(self, grad_state: Tensor | None) -> Tensor | None:
        """Return the gradient of the state after each segment, [B, H, segments, K, V], None for zeros."""
        walk = self.walk
        last = None if grad_state is None else grad_state.to(torch.float32).contiguous()
        if walk.cut.number == 1:
            return last
        sums = walk.per_segment(walk.value_dim)
        self(None, grad_initial=sums)
        return walk.scan(sums, last, back=True)


def _descriptors(tiles: list[tuple[Tensor, int]], wanted: bool) -> tuple[list[Any], bool]:
    """Return tensor-memory descriptors of [B, T, H, W] tensors as [B * T, H * W], and whether they could be had.

    A tile is a chunk of positions times the given columns. Where one of the tensors cannot be described, the tensors
    themselves take the descriptors' places.
    """
    tensors = [x for x, _ in tiles]
    if not (wanted and all(_is_describable(x) for x in tensors)):
        return list(tensors), False
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor(x, *_rows_of_heads(x), [CHUNK, width]) for x, width in tiles], True


def ring_descriptors(tiles: Sequence[tuple[Tensor, int] | tuple[Tensor, int, int]]) -> list[Any] | None:
    """Return the same for Gluon, whose descriptors know how a tile lies in shared memory; None if one cannot be had.

    A tile may name its rows where they are not those of a chunk.
    """
    if not all(_is_describable(x) for x, *_ in tiles):
        return None
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    found = []
    for x, width, *rest in tiles:
        rows = rest[0] if rest else CHUNK
        layout = shared_layout(rows, width, x.dtype)
        found.append(TensorDescriptor(x, *_rows_of_heads(x), [rows, width], layout))
    return found


@functools.cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Return how a tile lies in shared memory for tensor memory access and the tensor cores of 9.0."""
    from triton.experimental.gluon import language as gl

    types = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], types[dtype])


def _rows_of_heads(x: Tensor) -> tuple[list[int], list[int]]:
    """Return shape and strides of [B, T, H, W] as [B * T, H * W]."""
    return [x.shape[0] * x.shape[1], (x.shape[2] - 1) * x.stride(2) + x.shape[3]], [x.stride(1), 1]


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


def rows_together(x: Tensor) -> Tensor:
    """Return ``x`` [B, T, H, W] with the values of a head adjacent; other strides are free, 32-bit as ``addressed``."""
    return addressed(x) if x.stride(3) == 1 else x.contiguous()


def addressed(x: Tensor) -> Tensor:
    """Return ``x`` [B, T, H, ...], a copy if kernels could not address it: within a chunk and over heads offsets are
    32-bit numbers, over rows and chunks 64-bit ones."""
    within, heads = x.stride(1) < _LARGEST_INT32 // CHUNK, x.stride(2) <= _LARGEST_INT32 // x.shape[2]
    return x if within and heads else x.contiguous()
