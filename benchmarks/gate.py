"""The correctness gate: a candidate whose result is outside the tolerance rule is not timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from validate.tolerance import deviation
from zoo.errors import ParityError
from zoo.kernels.launch import MODE_VARIABLE


def admit(
    candidate: str, found: Mapping[str, Tensor], ref64: Mapping[str, Tensor], low: Mapping[str, Tensor]
) -> dict[str, float]:
    """Compare a candidate's tensors with the float64 reference.

    Args:
        candidate: its name, for the message.
        found: tensors by name, in the tested dtype.
        ref64: the same of the reference in float64.
        low: the same of the reference in the tested dtype.

    Returns:
        The used share of the tolerance of each tensor; up to 1 passes.

    Raises:
        ParityError: a tensor is outside the rule, or missing.
    """
    shares = {}
    for name, wanted in ref64.items():
        if name not in found:
            raise ParityError(f"{candidate} gave no {name}, so it is not timed")
        judged = deviation(found[name].detach(), wanted.detach(), low[name].detach(), found[name].dtype)
        if not judged.ok:
            raise ParityError(
                f"{candidate} is not timed because its {name} is wrong: rms error {judged.rms:.2e} where "
                f"{judged.rms_allowed:.2e} is allowed, largest {judged.max:.2e} where {judged.max_allowed:.2e} is, "
                f"at {list(judged.worst_index)}"
            )
        shares[name] = judged.share
    return shares


def admit_peers(
    peers: Mapping[str, Callable[[], Mapping[str, Tensor]]], ref64: Mapping[str, Tensor], low: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the tolerance that each peer used, and a sentence for each that is left out: it is wrong or fails."""
    shares, notes = {}, []
    for name, run in peers.items():
        try:
            shares[name] = admit(name, run(), ref64, low)
        except ParityError as error:
            notes.append(f"{error}.")
        except RuntimeError as error:
            notes.append(f"{name} is not timed because it failed: {str(error).splitlines()[0]}.")
    return shares, notes


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Let the custom ops take their references."""
    before = os.environ.get(MODE_VARIABLE)
    os.environ[MODE_VARIABLE] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MODE_VARIABLE]
        else:
            os.environ[MODE_VARIABLE] = before


def end_rows(x: Tensor) -> Tensor:
    """Return the first and the last row of a batch: what is compared where the whole would not fit in float64."""
    return x if x.shape[0] <= 2 else torch.stack([x[0], x[-1]])
