"""The tolerance rule: an output may err twice as much as the reference itself errs in the same dtype.

With ``ref64`` the float64 reference and ``ref_lo`` the same reference in the tested dtype, an output passes when

    |out - ref64| <= 2 * |ref_lo - ref64| + atol

in the relative root-mean-square norm and in the maximum norm. ``atol`` is one unit of rounding of the dtype, relative
to the size of ``ref64`` in the same norm: it matters only where the reference happens to be exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0


@dataclass(frozen=True)
class Deviation:
    """How far an output is from float64, beside what the rule allows; all relative to ``ref64`` in the same norm."""

    rms: float
    rms_allowed: float
    max: float
    max_allowed: float
    worst_index: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether both norms are inside; NaN never is."""
        return self.rms <= self.rms_allowed and self.max <= self.max_allowed

    @property
    def share(self) -> float:
        """The larger used share of the two allowances: up to 1 passes."""
        shares = [_ratio(self.rms, self.rms_allowed), _ratio(self.max, self.max_allowed)]
        return max(shares)


def deviation(out: Tensor, ref64: Tensor, ref_lo: Tensor, dtype: torch.dtype) -> Deviation:
    """Judge ``out`` by the tolerance rule; all three of one shape, ``ref64`` in float64, ``dtype`` the tested one.

    An output whose NaNs or infinities are not where those of ``ref64`` are has an infinite deviation. Where those of
    ``ref_lo`` are not, the dtype cannot hold the values: an overflow of the reference allows nothing but ``atol``.
    """
    if out.shape != ref64.shape:
        infinity = float("inf")
        return Deviation(infinity, 0.0, infinity, 0.0, ())
    if out.numel() == 0:
        return Deviation(0.0, 0.0, 0.0, 0.0, ())
    error, allowed = _error(out, ref64), _error(ref_lo, ref64)
    if not allowed.isfinite().all():
        allowed = torch.zeros_like(allowed)
    finite = torch.where(ref64.isfinite(), ref64, torch.zeros_like(ref64))
    # A reference of all zeros has no scale of its own: errors are then absolute.
    rms_scale = _rms(finite) or 1.0
    max_scale = float(finite.abs().max()) or 1.0
    atol = torch.finfo(dtype).eps
    flat = int(error.flatten().argmax())
    return Deviation(
        rms=_rms(error) / rms_scale,
        rms_allowed=FACTOR * _rms(allowed) / rms_scale + atol,
        max=float(error.max()) / max_scale,
        max_allowed=FACTOR * float(allowed.max()) / max_scale + atol,
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)),
    )


def _error(value: Tensor, ref64: Tensor) -> Tensor:
    """Return |value - ref64|, infinite where one is finite and the other is not or they are different infinities."""
    value = value.to(torch.float64)
    same = (value == ref64) | (value.isnan() & ref64.isnan())
    difference = (value - ref64).abs()
    return torch.where(same, 0.0, torch.where(difference.isfinite(), difference, torch.inf))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _ratio(value: float, allowed: float) -> float:
    if allowed == 0:
        return 0.0 if value == 0 else float("inf")
    return value / allowed
