"""Choices of the nearest code, model against exported file: an argmin must agree or be a tie."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from export.onnx_export import DTYPES
from validate.executors import Executor
from validate.inputs import Case, cases, draw_inputs
from validate.report import Check
from validate.tolerance import FACTOR
from zoo.kernels.ragged import valid_positions
from zoo.models.parts import Part
from zoo.models.sinkrec import CODES, REACH, SinkRec


def check_codes(model: SinkRec, part: Part, executor: Executor, dtype: str, length: int, seed: int) -> Check:
    """Hold the memory codes of one part at one length to the distances in float64.

    By the tolerance rule a distance may err by twice what it errs in PyTorch in the same dtype, and one unit of
    rounding. So two codes whose float64 distances differ by less than twice that are a tie, and either may be chosen.
    Level by level, what is left over is that of the exported file's own choices: after a tie it goes on from its own.

    Args:
        model: whose part it is, with a memory.
        part: with an output of codes.
        executor: of the exported file.
        dtype: of the file.
        length: of the histories.
        seed: draws the inputs.
    """
    exact, low = _encoder(model, torch.float64), _encoder(model, DTYPES[dtype])
    first = model.parts()[0]
    compared = ties = wrong = 0
    detail = ""
    for case in cases(length, seed=seed + 1000 * length):
        # The very inputs of ``check_parity``, which follows these codes: later parts have the lengths of the first.
        known = {} if part.name == first.name else draw_inputs(first.signature, case, {}, DTYPES[dtype])
        known = {name: value for name, value in known.items() if name == "lengths"}
        inputs = draw_inputs(part.signature, case, known, DTYPES[dtype])
        found = executor(inputs)[CODES]
        valid = valid_positions(inputs["lengths"], found.shape[1])
        codes = found[valid]
        for level, (gaps, allowed) in enumerate(_gaps(exact, low, inputs, codes, valid, DTYPES[dtype])):
            compared += gaps.numel()
            ties += int(((gaps > 0) & (gaps <= allowed)).sum())
            over = int((gaps > allowed).sum())
            wrong += over
            if over and not detail:
                detail = _sentence(case, level, float(gaps.max()), allowed)
    subject = f"{executor.name}, length {length}, {CODES}"
    return Check(
        "parity", part.name, dtype, subject, not wrong, detail, {"values": compared, "ties": ties, "wrong": wrong}
    )


def _sentence(case: Case, level: int, gap: float, allowed: float) -> str:
    return (
        f"a code of level {level} is farther than the nearest by {gap:.2e} (batch {case.batch}, length {case.length}, "
        f"seed {case.seed}); up to {allowed:.2e} is a tie"
    )


def _encoder(model: SinkRec, dtype: torch.dtype) -> SinkRec:
    return copy.deepcopy(model).to(dtype).eval()


@torch.no_grad()
def _gaps(
    exact: SinkRec, low: SinkRec, inputs: Mapping[str, Tensor], codes: Tensor, valid: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, float]]:
    """Yield for each level how much farther than the nearest the chosen codes int64 [P, R] are, and what is a tie."""
    left64, left_low = _encoded(exact, inputs, valid), _encoded(low, inputs, valid).double()
    books64, books_low = exact.memory.quantizer.codebooks.double(), low.memory.quantizer.codebooks.double()
    for level, chosen in enumerate(codes.unbind(-1)):
        distances, rounded = _distances(left64, books64[level]), _distances(left_low, books_low[level])
        error, size = ((rounded - distances).abs(), distances.abs())
        bound = FACTOR * _largest(error) + torch.finfo(dtype).eps * _largest(size)
        picked = distances.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        yield picked - distances.amin(-1), 2 * bound
        left64, left_low = left64 - books64[level][chosen], left_low - books_low[level][chosen]


def _encoded(model: SinkRec, inputs: Mapping[str, Tensor], valid: Tensor) -> Tensor:
    """Return what is quantised at the valid positions, [P, M]."""
    embedded = model.embed(inputs["items"], valid)
    before = inputs.get("windows_before", embedded.new_zeros(embedded.shape[0], REACH, embedded.shape[2]))
    return model.memory.encoded(embedded, before.to(embedded.dtype))[valid]


def _distances(x: Tensor, codebook: Tensor) -> Tensor:
    return codebook.square().sum(-1) - 2 * (x @ codebook.mT)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
