"""The two feed-forward blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """SiLU-gated feed-forward block (arXiv 2002.05202), no biases; gate and value come from one projection."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.gate_and_value = nn.Linear(d_model, 2 * width, bias=False)
        self.out = nn.Linear(width, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d_model] to [..., d_model]."""
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class ReluMLP(nn.Module):
    """Two linear layers with a ReLU between them, as the GRID protocol's models use."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, width)
        self.out = nn.Linear(width, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d_model] to [..., d_model]."""
        return self.out(F.relu(self.hidden(x)))
