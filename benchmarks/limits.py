"""Bytes that must move at least: each tensor once, 16 bits a number where not said otherwise, full rows."""

from __future__ import annotations

from dataclasses import dataclass

TWO_BYTES = 2


@dataclass(frozen=True)
class MixerSize:
    """Sizes of one mixer layer: B rows, L positions, d_model channels, H heads of D."""

    batch: int
    length: int
    d_model: int
    num_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """B * L."""
        return self.batch * self.length

    @property
    def inner(self) -> int:
        """H * D."""
        return self.num_heads * self.head_dim

    def conv_bytes(self, bytes_of_x: int = TWO_BYTES) -> int:
        """Read x, write the convolved x."""
        return (bytes_of_x + TWO_BYTES) * self.tokens * self.d_model

    def conv_backward_bytes(self, bytes_of_x: int = TWO_BYTES) -> int:
        """Read x and the output's gradient, write the gradient of x."""
        return (2 * bytes_of_x + TWO_BYTES) * self.tokens * self.d_model

    def core_bytes(self) -> int:
        """Read k, v and gate logits (first pass); read q and r, write y (second pass)."""
        return (5 * self.inner + self.num_heads) * self.tokens * TWO_BYTES

    def core_backward_bytes(self) -> int:
        """Read q, r and dy, write dq and dr; read k, v and logits, write their gradients."""
        return (9 * self.inner + 2 * self.num_heads) * self.tokens * TWO_BYTES

    def layer_bytes(self) -> int:
        """What the convolution and the core move; projections are counted in time, not in bytes."""
        return self.conv_bytes() + self.core_bytes()


@dataclass(frozen=True)
class DeltaRuleSize:
    """Sizes of a gated delta rule: B rows, L positions, H heads of D, keys and values alike.

    The decays and write strengths, 1/(2 D) to 1/D of the rest, are left out.
    """

    batch: int
    length: int
    num_heads: int
    head_dim: int

    @property
    def _tensor_bytes(self) -> int:
        return TWO_BYTES * self.batch * self.length * self.num_heads * self.head_dim

    def forward_bytes(self) -> int:
        """Read q, k and v, write o."""
        return 4 * self._tensor_bytes

    def backward_bytes(self) -> int:
        """Read q, k, v and do; write dq, dk and dv."""
        return 7 * self._tensor_bytes

    def step_bytes(self) -> int:
        """Read and write the float32 state [B, H, D, D]: what a step of one position moves."""
        return 2 * 4 * self.batch * self.num_heads * self.head_dim**2


def milliseconds(bytes_moved: int, bandwidth: float) -> float:
    """Return the time of moving bytes at a bandwidth in bytes a second."""
    return 1e3 * bytes_moved / bandwidth


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient, or None where one of the two was not measured."""
    return None if numerator is None or not denominator else numerator / denominator
