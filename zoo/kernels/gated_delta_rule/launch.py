"""The functions that launch the Triton kernels, and what they need to know of the tensors."""

from __future__ import annotations

from torch import Tensor

from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import Choice


def choose(inputs: Inputs) -> Choice:
    """Return whether the Triton kernels take these inputs, and why."""
    return Choice(False, "no kernel yet")


def forward(inputs: Inputs, lengths: Tensor, scale: float, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return o and the final state."""
    raise NotImplementedError


def backward(
    grad_o: Tensor, grad_state: Tensor | None, inputs: Inputs, lengths: Tensor, scale: float, normalize: bool
) -> Inputs:
    """Return the gradients of all inputs."""
    raise NotImplementedError
