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
        counts: int64 [R, V], how often each code was chosen in the last training batch. (The library's moving counts
            cannot tell: it sets those of codes that it draws anew to ``dead_below``.)
        commitment: float32 scalar, that of the last training batch.
    """

    def __init__(self, width: int, levels: int, codebook_size: int, *, decay: float, dead_below: float) -> None:
        super().__init__()
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
        )
        self.counts: Tensor
        self.commitment: Tensor
        self.register_buffer("counts", torch.zeros(levels, codebook_size, dtype=torch.int64), persistent=False)
        self.register_buffer("commitment", torch.zeros(()), persistent=False)

    @property
    def codebooks(self) -> Tensor:
        """The codes of every level, float32 [R, V, M]."""
        return torch.stack([layer._codebook.embed[0] for layer in self.training_side.layers])

    def health(self) -> dict[str, float]:
        """Return of the last training batch: the codes' perplexity (mean over levels, at most V), the share of codes
        that it chose not once, and its commitment."""
        share = self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1)
        perplexity = torch.exp(-torch.special.xlogy(share, share).sum(-1))
        dead = (self.counts == 0).float().mean()
        return {
            "codebook_perplexity": float(perplexity.mean()),
            "dead_codes": float(dead),
            "commitment": float(self.commitment),
        }

    def forward(self, x: Tensor, valid: Tensor) -> Quantized:
        """Quantise ``x`` [B, L, M]; positions that are not ``valid`` (bool [B, L]) teach nothing."""
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                x = x.float()
                found, codes, commitment = self.training_side(x, mask=valid)
                self._note(codes, commitment.sum())
                # The library's own gradient goes straight through every level, and is R times that of one.
                return Quantized(codes, x + (found - x).detach(), commitment.sum())
            x = x.to(accumulation_dtype(x.dtype))
            codes, vectors = nearest_codes(x, self.codebooks.to(x.dtype), self.chosen)
        return Quantized(codes, vectors, x.new_zeros(()))

    @torch.no_grad()
    def _note(self, codes: Tensor, commitment: Tensor) -> None:
        levels, size = self.counts.shape
        places = codes.clamp(min=0) + size * torch.arange(levels, device=codes.device)
        self.counts.zero_().view(-1).index_add_(0, places.flatten(), (codes >= 0).long().flatten())
        self.commitment.copy_(commitment)


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
