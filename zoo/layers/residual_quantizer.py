"""Residual vector quantisation (SoundStream, arXiv 2107.03312): a vector as a sum of codes, one a level."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.kernels.ragged import accumulation_dtype


class Quantized(NamedTuple):
    """What became of vectors [..., M].

    Attributes:
        codes: int64 [..., R], the chosen code of each level, -1 at padding in training.
        vectors: [..., M], the sum of the chosen codes; in training its gradient goes straight through to the input.
        commitment: float32 scalar, the mean squared distance to the codes, summed over levels; 0 in evaluation.
    """

    codes: Tensor
    vectors: Tensor
    commitment: Tensor


class ResidualQuantizer(nn.Module):
    """Each level quantises what the levels before it have left over.

    In training, codebooks follow the vectors by moving averages, start from k-means of the first batch, and codes that
    are hardly used are drawn anew from the batch (the library vector-quantize-pytorch). In evaluation the same codes
    come from a product, an argmin and a gather a level, which is what is exported. Everything is float32, also under
    autocast: sums of squares in bfloat16 would merge codes.

    Args:
        width: M.
        levels: R.
        codebook_size: codes a level.
        decay: of the moving averages.
        dead_below: a code whose moving count is below this is drawn anew.

    Attributes:
        chosen: int64 [B, L, R], codes to take instead of the nearest in evaluation, so that it follows another run's.
    """

    def __init__(self, width: int, levels: int, codebook_size: int, *, decay: float, dead_below: float) -> None:
        super().__init__()
        self.dead_below = dead_below
        self.chosen: Tensor | None = None
        from vector_quantize_pytorch import ResidualVQ  # only this model needs it

        self.training_side = ResidualVQ(
            dim=width,
            num_quantizers=levels,
            codebook_size=codebook_size,
            decay=decay,
            threshold_ema_dead_code=dead_below,
            kmeans_init=True,
            kmeans_iters=10,
            rotation_trick=False,
            straight_through=True,
        )

    @property
    def codebooks(self) -> Tensor:
        """The codes of every level, float32 [R, V, M]."""
        return torch.stack([layer._codebook.embed[0] for layer in self.training_side.layers])

    @property
    def usage(self) -> Tensor:
        """Moving counts of how often each code is chosen, float32 [R, V]."""
        return torch.stack([layer._codebook.cluster_size[0] for layer in self.training_side.layers])

    def health(self) -> dict[str, float]:
        """Return the codes' perplexity (mean over levels, at most V) and the share of them that is hardly used."""
        usage = self.usage
        share = usage / usage.sum(-1, keepdim=True).clamp(min=1e-9)
        perplexity = torch.exp(-torch.special.xlogy(share, share).sum(-1))
        dead = (usage < self.dead_below).float().mean()
        return {"codebook_perplexity": float(perplexity.mean()), "dead_codes": float(dead)}

    def forward(self, x: Tensor, valid: Tensor) -> Quantized:
        """Quantise ``x`` [B, L, M]; positions that are not ``valid`` (bool [B, L]) teach nothing."""
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                vectors, codes, commitment = self.training_side(x.float(), mask=valid)
                return Quantized(codes, vectors, commitment.sum())
            x = x.to(accumulation_dtype(x.dtype))
            codes, vectors = nearest_codes(x, self.codebooks.to(x.dtype), self.chosen)
        return Quantized(codes, vectors, x.new_zeros(()))


def nearest_codes(x: Tensor, codebooks: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes int64 [..., R] of ``x`` [..., M] in ``codebooks`` [R, V, M], and the sums of those codes.

    If ``chosen`` int64 [..., R] is given, those are the codes.
    |x - e|^2 = |x|^2 - 2 x.e + |e|^2, whose first term is the same for all codes e and left out.
    """
    residual, found = x, []
    for level, codebook in enumerate(codebooks.unbind(0)):
        if chosen is None:
            index = (codebook.square().sum(-1) - 2 * (residual @ codebook.mT)).argmin(-1)
        else:
            index = chosen[..., level]
        found.append(index)
        residual = residual - codebook[index]
    return torch.stack(found, -1), x - residual
