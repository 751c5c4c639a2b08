"""Checkpoints: everything that the next step depends on, in one file that is whole or absent."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zoo import files
from zoo.errors import CheckpointError

CHECKPOINT = "training/checkpoint.pt"
BEST = "training/best.pt"


@dataclass
class State:
    """Where a run stands.

    Attributes:
        identity: what decides the losses (model, recipe, data, seed); a checkpoint fits only its own.
        step: optimiser steps done.
        best_metric: best validation so far, and -1 before the first.
        best_step: the step of that validation.
    """

    identity: dict[str, Any]
    step: int = 0
    best_metric: float = -1.0
    best_step: int = 0


class Stateful(Protocol):
    """A module or an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that it remembers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""


def save(path: Path, state: State, parts: Mapping[str, Stateful], device: torch.device) -> None:
    """Write a checkpoint of ``parts`` (model, average, optimizer), random generators included."""
    content = {
        "state": vars(state),
        "parts": {name: part.state_dict() for name, part in parts.items()},
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    with files.replacing(path) as temporary:
        torch.save(content, temporary)


def load(path: Path, identity: Mapping[str, Any], parts: Mapping[str, Stateful], device: torch.device) -> State:
    """Restore ``parts`` and the random generators from a checkpoint of the same run.

    Raises:
        CheckpointError: damaged, or of a run that differs; the message names the first field that does.
    """
    content = _read(path)
    try:
        stored, state = dict(content["state"]["identity"]), State(**content["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); start over with --restart") from error
    different = [name for name in identity if stored.get(name) != identity[name]]
    if different:
        name = different[0]
        raise CheckpointError(
            f"{path} belongs to a run with {name} {stored.get(name)!r}, not {identity[name]!r}; "
            "resume with the same settings, choose another --out, or start over with --restart"
        )
    for name, part in parts.items():
        part.load_state_dict(content["parts"][name])
    torch.set_rng_state(content["rng"])
    if device.type == "cuda" and content["cuda_rng"] is not None:
        torch.cuda.set_rng_state(content["cuda_rng"], device)
    return state


def save_best(path: Path, state: State, model: torch.nn.Module) -> None:
    """Write the weights of the best validation, with the run and step they belong to."""
    with files.replacing(path) as temporary:
        torch.save({"identity": state.identity, "step": state.best_step, "model": model.state_dict()}, temporary)


def load_best(path: Path, state: State, model: torch.nn.Module) -> None:
    """Read what ``save_best`` wrote.

    Raises:
        CheckpointError: missing, damaged, or of another run or step.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}, the weights of step {state.best_step}, is missing; start over with --restart")
    content = _read(path)
    if (content.get("identity"), content.get("step")) != (state.identity, state.best_step):
        raise CheckpointError(
            f"{path} does not hold the weights of step {state.best_step} of this run; start over with --restart"
        )
    model.load_state_dict(content["model"])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError("it holds no dictionary")
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is damaged ({reason}); start over with --restart") from error
    return content
