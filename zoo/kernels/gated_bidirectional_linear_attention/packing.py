"""Where q, k, v, r and the gate logits lie in the packed projection."""

from __future__ import annotations

from dataclasses import dataclass

PACKED_ALIGNMENT = 8
"""Columns are padded to a multiple of this, so that every row of a 16-bit tensor starts on 16 bytes."""

WIDE_ALIGNMENT = 128
WIDE = 2048
"""From this width on columns are padded to a multiple of 128, a tile of the matrix product that makes the projection:
4224 columns took 3.13 ms where 4112 took 3.44 (bf16, 262,144 rows of 1024, cuBLAS on an H200, 2026-11-30)."""


@dataclass(frozen=True)
class PackedLayout:
    """Column offsets into the packed projection; ``None`` marks a part that is switched off."""

    num_heads: int
    head_dim: int
    key_gate: bool = True
    gated_norm: bool = True

    @property
    def inner(self) -> int:
        """Width of q, k, v and r each: H * D."""
        return self.num_heads * self.head_dim

    @property
    def query(self) -> int:
        """First column of q."""
        return 0

    @property
    def key(self) -> int:
        """First column of k."""
        return self.inner

    @property
    def value(self) -> int:
        """First column of v."""
        return 2 * self.inner

    @property
    def residual_gate(self) -> int | None:
        """First column of r, the gate of the gated RMSNorm."""
        return 3 * self.inner if self.gated_norm else None

    @property
    def key_gate_logit(self) -> int | None:
        """First column of s, the logits of the key gate."""
        return (4 if self.gated_norm else 3) * self.inner if self.key_gate else None

    @property
    def used_width(self) -> int:
        """Columns that hold something."""
        return (4 if self.gated_norm else 3) * self.inner + (self.num_heads if self.key_gate else 0)

    @property
    def width(self) -> int:
        """All columns P, alignment padding included; the op never reads the padding."""
        alignment = WIDE_ALIGNMENT if self.used_width >= WIDE else PACKED_ALIGNMENT
        return -(-self.used_width // alignment) * alignment


def packed_width(num_heads: int, head_dim: int, *, key_gate: bool = True, gated_norm: bool = True) -> int:
    """Return P, the number of columns that the packed projection must have."""
    return PackedLayout(num_heads, head_dim, key_gate, gated_norm).width
