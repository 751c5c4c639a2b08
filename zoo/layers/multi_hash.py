"""Multi-hash item embedding: several hashes of an item id into one shared table."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

MERSENNE_31 = 2**31 - 1
"""The prime of the hash family. With ids, a and b below 2^31, a * id + b stays below 2^63: no int64 overflow."""


class MultiHashEmbedding(nn.Module):
    """Embed item ids as the projection of n rows of one table: rows ((a_i * id + b_i) mod (2^31 - 1)) mod R.

    The coefficients are drawn from ``seed`` and are part of the configuration, not of the weights.

    Args:
        num_hashes: n.
        num_rows: R, a power of two.
        row_width: width of one table row.
        d_model: width of the output.
        seed: draws a_i in [1, 2^31 - 1) and b_i in [0, 2^31 - 1).
    """

    multiplier: Tensor
    offset: Tensor

    def __init__(self, num_hashes: int, num_rows: int, row_width: int, d_model: int, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        multiplier = [draw.randrange(1, MERSENNE_31) for _ in range(num_hashes)]
        offset = [draw.randrange(MERSENNE_31) for _ in range(num_hashes)]
        self.num_rows = num_rows
        self.register_buffer("multiplier", torch.tensor(multiplier, dtype=torch.int64), persistent=False)
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.int64), persistent=False)
        self.table = nn.Embedding(num_rows, row_width)
        self.projection = nn.Linear(num_hashes * row_width, d_model, bias=False)

    def rows(self, item_ids: Tensor) -> Tensor:
        """Return the table rows int64 [..., n] of item ids int64 [...], each id in [0, 2^31)."""
        hashed = (self.multiplier * item_ids.unsqueeze(-1) + self.offset) % MERSENNE_31
        return hashed % self.num_rows

    def forward(self, item_ids: Tensor) -> Tensor:
        """Map item ids int64 [B, L] to embeddings [B, L, d_model] in the dtype of the table.

        Under autocast the projection gives bfloat16; the residual stream that starts here stays in float32.
        """
        table = self.table(self.rows(item_ids)).flatten(-2)
        return self.projection(table).to(table.dtype)
