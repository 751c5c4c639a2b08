# mypy: ignore-errors
"""Pieces that the warp-specialised kernels for Hopper share.

Those kernels are written in Gluon, Triton's lower level, where a program says which warps do what. A loader warp brings
tiles through tensor memory access into a ring of stages in shared memory and signals a stage's ``full`` barrier; groups
of four warps work on them and signal ``empty`` when done. Barriers carry the parity of the round in which they are
waited for. Gluon has no interpreter, so these kernels are tested on the GPU only, against the same references.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_Shared = gl.shared_memory_descriptor
reinterpret = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret
"""Triton 3.6 has only the longer names and the private one, 3.9 only the others. The last takes memory, dtype, shape
and layout."""


@gluon.jit
def tile_like(desc, slots: gl.constexpr):
    """Allocate shared memory for ``slots`` tiles as a descriptor reads or writes them."""
    return gl.allocate_shared_memory(desc.dtype, [slots] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def tiles(dtype: gl.constexpr, slots: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Allocate shared memory for ``slots`` operands of products."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [slots, rows, columns], layout)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate barriers that ``count`` arrivals complete."""
    found = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(found.index(i), count=count)
    return found


@gluon.jit
def clear_rows(tile, first):
    """Zero the rows of a tile in shared memory from ``first`` on, by one warp: memory there may hold NaN."""
    COLUMNS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    for i in gl.static_range(tile.shape[0] // 8):
        if first < 8 * i + 8:
            rows = 8 * i + gl.arange(0, 8, gl.SliceLayout(1, layout))
            part = tile.slice(8 * i, 8)
            part.store(gl.where((rows < first)[:, None], part.load(layout), 0.0))


@gluon.jit
def valid_length(lengths, row, length):
    """Return the number of valid positions of a row, clamped to [0, length]."""
    return gl.minimum(gl.maximum(gl.load(lengths + row), 0), length)
