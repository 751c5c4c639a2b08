"""Launch parameters of the Triton kernels: a table, not a search.

They depend on head width, element size and compute capability, and how far a row is split depends on the number of
rows, heads, positions and multiprocessors. No length is ever tuned while serving, and the tests run every entry that
the table can give.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from zoo.kernels.gated_bidirectional_linear_attention.packing import PackedLayout

HEAD_DIMS = (16, 32, 64, 128)
_WITH_TMA = range(90, 120)
"""Data-centre Hopper and Blackwell; 12.x has less shared memory and takes the older table."""
_LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""99 KB a program."""
_MOST_WAVES = 4
_TILES_TO_START = 3
_TILES_TO_COMBINE = 6
_TILES_A_PROGRAM = 16


@dataclass(frozen=True)
class TileConfig:
    """How one kernel walks its tiles.

    Attributes:
        block_l: positions a tile.
        num_warps: warps a program.
        num_stages: tiles in flight.
        resident: programs that run on one multiprocessor at a time, as measured or as registers allow.
        tma: move tiles with the tensor memory accelerator (compute capability 9.0 and up).
        splits: chunks of a row; 0 for what ``best_split`` finds.
    """

    block_l: int
    num_warps: int
    num_stages: int
    resident: int
    tma: bool = False
    splits: int = 0


def forward_config(kernel: str, head_dim: int, dtype: torch.dtype, capability: int) -> TileConfig:
    """Return the parameters of ``reduce`` or ``apply``."""
    return (_FORWARD if capability in _WITH_TMA else _FORWARD_OLDER)[kernel, head_dim, dtype.itemsize]


def backward_config(kernel: str, head_dim: int, dtype: torch.dtype, capability: int) -> TileConfig:
    """Return the parameters of ``queries`` or ``keys``, the two passes of the backward."""
    operand = gradient_dot_dtype(dtype).itemsize
    return (_BACKWARD if capability in _WITH_TMA else _BACKWARD_OLDER)[kernel, head_dim, operand]


_FORWARD = {
    ("reduce", 16, 2): TileConfig(128, 4, 3, resident=3, tma=True),
    ("reduce", 32, 2): TileConfig(128, 4, 3, resident=3, tma=True),
    ("reduce", 64, 2): TileConfig(64, 4, 3, resident=3, tma=True),
    ("reduce", 128, 2): TileConfig(64, 8, 3, resident=1, tma=True),
    ("reduce", 16, 4): TileConfig(64, 4, 2, resident=6),
    ("reduce", 32, 4): TileConfig(64, 4, 2, resident=3),
    ("reduce", 64, 4): TileConfig(32, 4, 1, resident=2),
    ("reduce", 128, 4): TileConfig(32, 8, 1, resident=1),
    ("apply", 16, 2): TileConfig(128, 4, 3, resident=6, tma=True),
    ("apply", 32, 2): TileConfig(128, 4, 3, resident=4, tma=True),
    ("apply", 64, 2): TileConfig(64, 4, 3, resident=4, tma=True),
    ("apply", 128, 2): TileConfig(64, 8, 3, resident=1, tma=True),
    ("apply", 16, 4): TileConfig(64, 4, 2, resident=4),
    ("apply", 32, 4): TileConfig(64, 4, 2, resident=2),
    ("apply", 64, 4): TileConfig(32, 4, 1, resident=2),
    ("apply", 128, 4): TileConfig(16, 8, 1, resident=2),
}
_BACKWARD = {
    ("queries", 16, 2): TileConfig(128, 4, 3, resident=2, tma=True),
    ("queries", 32, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("queries", 64, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("queries", 128, 2): TileConfig(64, 8, 2, resident=1, tma=True),
    ("queries", 16, 4): TileConfig(64, 4, 2, resident=2),
    ("queries", 32, 4): TileConfig(32, 4, 2, resident=2),
    ("queries", 64, 4): TileConfig(16, 4, 1, resident=2),
    ("queries", 128, 4): TileConfig(16, 8, 1, resident=1),
    ("keys", 16, 2): TileConfig(128, 4, 3, resident=4, tma=True),
    ("keys", 32, 2): TileConfig(128, 4, 3, resident=2, tma=True),
    ("keys", 64, 2): TileConfig(64, 4, 3, resident=2, tma=True),
    ("keys", 128, 2): TileConfig(64, 8, 2, resident=1, tma=True),
    ("keys", 16, 4): TileConfig(64, 4, 2, resident=3),
    ("keys", 32, 4): TileConfig(32, 4, 2, resident=2),
    ("keys", 64, 4): TileConfig(16, 4, 1, resident=2),
    ("keys", 128, 4): TileConfig(16, 8, 1, resident=1),
}
"""By kernel, head width and bytes of an operand. Head width 64 in bfloat16 was tuned on an H200 (docs/kernels.md); the
others follow it as far as registers and shared memory allow, and are checked but not tuned."""


def _without_tma(table: dict[tuple[str, int, int], TileConfig]) -> dict[tuple[str, int, int], TileConfig]:
    """Return a table for GPUs with no tensor memory accelerator and less shared memory."""
    return {
        key: TileConfig(min(c.block_l, 32), c.num_warps, min(c.num_stages, 2), c.resident) for key, c in table.items()
    }


_FORWARD_OLDER = _without_tma(_FORWARD)
_BACKWARD_OLDER = _without_tma(_BACKWARD)
COMBINE_WARPS = 4


def gradient_dot_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what the operands of gradient products are: float16 gradients need float32's range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def gradient_dtype(dtype: torch.dtype, head_dim: int, capability: int) -> torch.dtype:
    """Return the dtype that the backward runs in: another where the kernels for ``dtype`` need too much shared memory.

    Those for float16 at head width 128 hold two states at once as widened operands; those for float32 hold one.
    """
    too_large = dtype == torch.float16 and head_dim == 128 and capability in _LITTLE_SHARED_MEMORY
    return torch.float32 if too_large else dtype


def constants(kernel: str, layout: PackedLayout, dtype: torch.dtype, config: TileConfig) -> dict[str, Any]:
    """Return a kernel's compile-time arguments; TMA and FINAL are the launch's to say."""
    import triton.language as tl

    found: dict[str, Any] = {"D": layout.head_dim, "BLOCK_L": config.block_l, "STAGES": config.num_stages}
    if kernel in ("reduce", "keys"):
        found["KEY_GATE"] = layout.key_gate
    if kernel in ("apply", "queries"):
        found["GATED_NORM"] = layout.gated_norm
    if kernel != "keys":
        found["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
    if kernel in ("queries", "keys"):
        found["DOT"] = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
        found["DOT_PRECISION"] = dot_precision(dtype)
    return found


def dot_precision(dtype: torch.dtype) -> str:
    """Return how float32 operands of gradient products are multiplied."""
    return "tf32" if dtype == torch.float16 else "ieee"


def combine_constants(head_dim: int) -> dict[str, Any]:
    """Return the compile-time arguments of both combine kernels."""
    return {"D": head_dim, "COLUMNS": min(32, head_dim), "STAGES": 3}


def configs(capability: int) -> dict[str, dict[tuple[int, int], TileConfig]]:
    """Return every entry of the table that a capability can pick: kernel -> (head width, bytes of an operand) -> it."""
    tables = (_FORWARD, _BACKWARD) if capability in _WITH_TMA else (_FORWARD_OLDER, _BACKWARD_OLDER)
    found: dict[str, dict[tuple[int, int], TileConfig]] = {}
    for table in tables:
        for (kernel, head_dim, operand), config in table.items():
            found.setdefault(kernel, {})[head_dim, operand] = config
    return found


@functools.lru_cache(maxsize=4096)
def best_split(pairs: int, length: int, config: TileConfig, processors: int, combines: bool) -> tuple[int, int]:
    """Return the split with the lowest cost, the smallest of equals.

    Programs run in waves of as many as fit. A program costs its tiles and a fixed part, and a second kernel that
    combines chunks costs another. Where chunks need no combining and rows are long, programs of sixteen tiles do better
    than one wave: they even out the multiprocessors.
    """
    tiles = max(1, -(-length // config.block_l))
    slots = config.resident * processors

    def cost(splits: int) -> int:
        waves = -(-pairs * splits // slots)
        return waves * (-(-tiles // splits) + _TILES_TO_START) + (_TILES_TO_COMBINE if combines and splits > 1 else 0)

    most = min(tiles, _MOST_WAVES * slots // pairs + 1)
    best = min(range(1, most + 1), key=cost)
    if not combines:
        best = max(best, tiles // _TILES_A_PROGRAM)
    splits = min(config.splits or best, tiles)
    tiles_each = -(-tiles // splits)
    return -(-tiles // tiles_each), tiles_each * config.block_l
