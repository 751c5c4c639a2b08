"""Inputs for a part, drawn from its signature: ragged, with hostile padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from export.onnx_export import FLOATING, floating_dtype
from zoo.signature import BATCH, BEAMS, BEFORE, LENGTH, Signature, TensorSpec

LENGTHS = "lengths"
"""The input that counts the valid events of each row."""


@dataclass(frozen=True)
class Case:
    """One set of sizes to try a part at."""

    batch: int
    length: int
    beams: int
    seed: int

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each symbol of a signature."""
        return {BATCH: self.batch, LENGTH: self.length, BEAMS: self.beams}


def cases(length: int, *, seed: int) -> tuple[Case, ...]:
    """Return the cases tried at one length: a single full history, and a ragged batch that holds 0, 1 and the rest.

    Short lengths are drawn more often, so that each length compares at least as many values as length 32 does: the
    largest of a handful of rounding errors says little about either side.
    """
    repeats = max(1, 32 // max(1, length))
    pairs = ((Case(1, length, 1, seed + 2 * i), Case(5, length, 3, seed + 2 * i + 1)) for i in range(repeats))
    return tuple(case for pair in pairs for case in pair)


def draw_inputs(signature: Signature, case: Case, known: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return one tensor per input.

    Args:
        signature: of the part.
        case: sizes and seed.
        known: tensors to use as they are where an input, or the state it is, has their name (outputs of earlier parts).
        dtype: of floating inputs, those that are float32 in every part aside.

    Integer inputs are uniform over their range; ``lengths`` holds the longest length first, then 0, 1 and random ones.
    """
    generator = torch.Generator().manual_seed(case.seed)
    inputs: dict[str, Tensor] = {}
    for spec in signature.inputs:
        state_of = spec.name.removesuffix(BEFORE)
        if spec.name == LENGTHS and isinstance(spec.limit, int):  # of another number of events than an earlier part's
            inputs[spec.name] = _lengths(case.batch, spec.limit - 1, generator)
        elif state_of in known:
            inputs[spec.name] = known[state_of]
        elif spec.limit == LENGTH:
            inputs[spec.name] = _lengths(case.batch, case.length, generator)
        elif spec.dtype in FLOATING:
            drawn = torch.randn(spec.resolved_shape(case.sizes), generator=generator)
            inputs[spec.name] = drawn.to(floating_dtype(spec, dtype))
        else:
            inputs[spec.name] = _integers(spec, case, generator)
    return inputs


def _lengths(batch: int, longest: int, generator: torch.Generator) -> Tensor:
    fixed = [longest, 0, min(1, longest)][:batch]
    drawn = torch.randint(0, longest + 1, (batch - len(fixed),), generator=generator)
    return torch.cat([torch.tensor(fixed), drawn]).to(torch.int32)


def _integers(spec: TensorSpec, case: Case, generator: torch.Generator) -> Tensor:
    limit = spec.limit if isinstance(spec.limit, int) else case.sizes[str(spec.limit)] + 1
    dtype = {"int32": torch.int32, "int64": torch.int64}[spec.dtype]
    return torch.randint(0, limit, spec.resolved_shape(case.sizes), generator=generator, dtype=dtype)
