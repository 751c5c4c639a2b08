"""Choices of the nearest code, model against exported file: an argmin must agree or be a tie.

Rounding moves what is quantised by d, and with it the distance of code e by -2 d.e. So it may put code c before the
nearest code n where that is farther by no more than 2 d.(n - c): codes that lie close together change places easily,
codes far apart do not. How far d reaches along the line between two codes is measured, on PyTorch in the tested dtype.

Shape suffixes: P valid positions of all cases, R levels, V codes, M memory width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from validate.executors import TorchExecutor
from validate.inputs import Case
from validate.report import Check
from validate.tolerance import FACTOR
from zoo.kernels.ragged import accumulation_dtype, valid_positions
from zoo.models.parts import Part
from zoo.models.sinkrec import SinkRec
from zoo.models.sinkrec_layers import REACH


@dataclass(frozen=True)
class Choices:
    """What a file chose in one case: codes int64 [B, L, R], of any values, and the inputs that it was given."""

    case: Case
    inputs: Mapping[str, Tensor]
    codes: Tensor


def check_codes(
    part: Part, found: Sequence[Choices], exact: TorchExecutor, low: TorchExecutor, dtype: str, subject: str
) -> Check:
    """Hold the memory codes that one part chose at one length to the distances in float64.

    What is quantised comes from the float64 model, the codebooks are those of the dtype, which the file holds bit by
    bit: their rounding is known and excuses nothing. By the tolerance rule a file may move what is quantised twice as
    far along the line between two codes as PyTorch in the same dtype moves it at most, over all positions and codes.
    Distances are summed in float32 in files of half precision too: each may err there by twice what PyTorch's errs, and
    one unit of rounding. A chosen code that is farther than the nearest by more than both explain is wrong; by less, it
    is a tie. Where PyTorch overflows in the dtype, nothing is a tie.

    Level by level, what is left over is that of the file's own choices: after a tie it goes on from its own.

    Args:
        part: with a memory.
        found: of one or more cases of the length, which are judged together.
        exact: the part in float64.
        low: the part in the tested dtype.
        dtype: of the file, for the report.
        subject: for the report.

    Returns:
        One check. Its figures count the codes compared, ties and wrong ones, and give the largest share that a code
        other than the nearest takes of what is a tie there.
    """
    values = ties = wrong = 0
    share, detail = 0.0, ""
    owners = [(choices.case, place) for choices in found for place in _valid(choices).nonzero().tolist()]
    for level, (gaps_P, allowed_P, unknown_P) in enumerate(_levels(found, exact, low)):
        over_P = unknown_P | ~(gaps_P <= allowed_P)  # also where a gap is not a number
        values += gaps_P.numel()
        ties += int(((gaps_P > 0) & ~over_P).sum())
        wrong += int(over_P.sum())
        share = max([share, *(gaps_P / allowed_P)[gaps_P > 0].tolist()])
        if not detail and wrong:
            first = int(over_P.int().argmax())
            detail = _sentence(*owners[first], level, float(gaps_P[first]), float(allowed_P[first]))
    figures = {"values": values, "ties": ties, "wrong": wrong, "share": share}
    return Check("parity", part.name, dtype, subject, not wrong, detail, figures)


def _sentence(case: Case, place: Sequence[int], level: int, gap: float, allowed: float) -> str:
    return (
        f"a code of level {level} is farther than the nearest by {gap:.2e} (row {place[0]}, position {place[1]} of "
        f"batch {case.batch}, length {case.length}, seed {case.seed}); up to {allowed:.2e} is a tie"
    )


class _Level(NamedTuple):
    """By position: how much farther than the nearest, up to what that is a tie, whether there is no such code."""

    gaps_P: Tensor
    allowed_P: Tensor
    unknown_P: Tensor


@torch.no_grad()
def _levels(found: Sequence[Choices], exact: TorchExecutor, low: TorchExecutor) -> Iterator[_Level]:
    wide = accumulation_dtype(low.dtype)
    left64_PM, left_PM = _encoded(exact, found), _encoded(low, found).to(wide)
    books_RVM = _model(low).memory.quantizer.codebooks.to(wide)
    codes_PR = torch.cat([choices.codes[_valid(choices)] for choices in found])
    for codes_P, book_VM in zip(codes_PR.unbind(-1), books_RVM, strict=True):
        chosen_P, book64_VM = codes_P.clamp(0, len(book_VM) - 1), book_VM.double()
        distances_PV = _distances(left64_PM, book64_VM)
        nearest_P = distances_PV.argmin(-1)
        # What summing in the file's accumulation dtype changes of a distance.
        errors_PV = _distances(left_PM, book_VM).double() - _distances(left_PM.double(), book64_VM)
        summing = FACTOR * _largest(errors_PV) + torch.finfo(wide).eps * _largest(distances_PV)
        # What rounding before the quantiser changes of the difference of two distances, a unit of the codes' distance.
        moved_PV = -2 * (left_PM.double() - left64_PM) @ book64_VM.mT
        moved_PV = moved_PV - _at(moved_PV, nearest_P).unsqueeze(-1)
        # Not by a product: two codes that are the same must be exactly 0 apart.
        apart_PV = torch.cdist(book64_VM, book64_VM, compute_mode="donot_use_mm_for_euclid_dist")[nearest_P]
        slope = _largest(torch.where(apart_PV > 0, moved_PV / apart_PV, 0))
        allowed_P = FACTOR * slope * _at(apart_PV, chosen_P) + 2 * summing
        yield _Level(
            gaps_P=_at(distances_PV, chosen_P) - _at(distances_PV, nearest_P),
            allowed_P=torch.where(allowed_P.isfinite(), allowed_P, 0),
            unknown_P=chosen_P != codes_P,
        )
        left64_PM, left_PM = left64_PM - book64_VM[chosen_P], left_PM - book_VM[chosen_P]


def _valid(choices: Choices) -> Tensor:
    return valid_positions(choices.inputs["lengths"], choices.codes.shape[1])


def _model(executor: TorchExecutor) -> SinkRec:
    modules: Iterator[nn.Module] = executor.module.modules()
    return next(module for module in modules if isinstance(module, SinkRec))


def _encoded(executor: TorchExecutor, found: Sequence[Choices]) -> Tensor:
    """Return what the part quantises at the valid positions, [P, M]."""
    model, encoded = _model(executor), []
    for choices in found:
        valid = _valid(choices)
        embedded = model.embed(choices.inputs["items"], valid)
        before = choices.inputs.get("windows_before", embedded.new_zeros(len(embedded), REACH, embedded.shape[2]))
        encoded.append(model.memory.encoded(embedded, before.to(embedded.dtype))[valid])
    return torch.cat(encoded)


def _distances(x_PM: Tensor, book_VM: Tensor) -> Tensor:
    """Return |x - e|^2 - |x|^2 of every code e, [P, V], in the order of ``nearest_codes``."""
    return book_VM.square().sum(-1) - 2 * (x_PM @ book_VM.mT)


def _at(x_PV: Tensor, codes_P: Tensor) -> Tensor:
    return x_PV.gather(-1, codes_P.unsqueeze(-1)).squeeze(-1)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
