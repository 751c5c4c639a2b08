"""GBLA: generative retrieval with gated bidirectional linear attention (arXiv 2606.07317).

A bidirectional encoder reads the history; a small causal decoder with cross-attention writes the semantic ID of the
next item, digit by digit. (P) marks what the paper states, (R) our reading where it is silent.

Shape suffixes: B batch, L length, C d_model, H heads, D head width, N decoder layers, K beams, M digits, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.kernels.ragged import valid_positions
from zoo.layers import (
    UNPADDED_CAUSAL,
    AttentionPlan,
    GatedBidirectionalLinearAttention,
    MultiHashEmbedding,
    MultiHeadAttention,
    ReluMLP,
    SwiGLU,
    matmul_dtype,
    plan_attention,
    rotate,
)
from zoo.models.fields import check_one_or_more, check_types, overridden
from zoo.models.parts import Part
from zoo.signature import BATCH, BEAMS, LENGTH, Signature, TensorSpec


@dataclass(frozen=True)
class GBLAConfig:
    """Sizes and switches of one GBLA model.

    Attributes:
        d_model: model width.
        num_heads: attention heads, encoder and decoder.
        head_dim: width of a head; num_heads * head_dim need not equal d_model.
        layout: encoder mixers in order, S softmax attention and L linear attention, repeated over the depth (P: SLL).
        num_layers: encoder depth.
        decoder_layers: decoder depth.
        attention: what an L layer is: ``gbla``, ``bla`` (none of the three additions) or ``softmax``.
        direction: ``bidirectional`` or ``causal``, for every encoder layer.
        conv: short convolution before the projection of L layers.
        key_gate: softmax key gate in L layers.
        gated_norm: gated RMSNorm in L layers.
        conv_width: taps of the short convolution (P: 4).
        mlp: ``swiglu`` (R) or ``relu`` (GRID).
        mlp_width: hidden width of the MLP blocks.
        num_hashes: hash functions of the item embedding (R).
        hash_rows: rows of the shared table, a power of two (R).
        hash_width: width of a table row (R).
        hash_seed: draws the hash coefficients.
        num_digits: digits M of a semantic ID, the de-duplication digit included (P: 4).
        codebook_size: codes V a digit (P: 256).
        rotary_base: wavelength base of rotary positions in S layers (R).
        cross_recency: give cross-attention keys rotary positions counted back from the end of the history (R).
        dropout: after the embedding and in every residual branch, in training only.
        eps: of every RMSNorm (R).
    """

    d_model: int
    num_heads: int
    head_dim: int
    layout: str
    num_layers: int
    decoder_layers: int
    mlp_width: int
    hash_rows: int
    attention: str = "gbla"
    direction: str = "bidirectional"
    conv: bool = True
    key_gate: bool = True
    gated_norm: bool = True
    conv_width: int = 4
    mlp: str = "swiglu"
    num_hashes: int = 4
    hash_width: int = 64
    hash_seed: int = 0
    num_digits: int = 4
    codebook_size: int = 256
    rotary_base: float = 10_000.0
    cross_recency: bool = False
    dropout: float = 0.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not self.layout or set(self.layout) - {"S", "L"}:
            raise ConfigError(f"layout is {self.layout!r}; write one letter a layer, S (softmax) or L (linear)")
        check_one_or_more(self, _POSITIVE)
        if self.hash_rows < 1 or self.hash_rows & (self.hash_rows - 1):
            raise ConfigError(f"hash_rows is {self.hash_rows}; it must be a power of two")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        if self.num_digits < 2:
            raise ConfigError(f"num_digits is {self.num_digits}; a semantic ID has a level and a last digit, 2 or more")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps is {self.eps}; it must be above 0 and below 1")

    @property
    def mixers(self) -> str:
        """One letter an encoder layer: S softmax, L linear attention."""
        letters = (self.layout * self.num_layers)[: self.num_layers]
        return letters.replace("L", "S") if self.attention == "softmax" else letters

    def with_overrides(self, **overrides: Any) -> GBLAConfig:
        """Return a copy with some fields changed; an unknown field raises ConfigError."""
        return overridden("GBLA", self, overrides)

    def twin(self, name: str) -> GBLAConfig:
        """Return a comparison model of this one, a name of ``TWINS``."""
        return self.with_overrides(**TWINS[name])


_CHOICES = {
    "attention": ("gbla", "bla", "softmax"),
    "direction": ("bidirectional", "causal"),
    "mlp": ("swiglu", "relu"),
}
_POSITIVE = (
    "d_model",
    "num_heads",
    "head_dim",
    "num_layers",
    "decoder_layers",
    "mlp_width",
    "num_hashes",
    "hash_width",
    "num_digits",
    "codebook_size",
    "conv_width",
    "rotary_base",
)

PRESETS = {
    # (P) industrial; mlp_width and hash_rows are ours.
    "gbla-yandex": GBLAConfig(
        d_model=1024, num_heads=16, head_dim=64, layout="SLL", num_layers=9, decoder_layers=1, mlp_width=2816,
        hash_rows=2**22,
    ),
    # (P) academic: the GRID protocol.
    "gbla-grid": GBLAConfig(
        d_model=128, num_heads=6, head_dim=64, layout="SLLS", num_layers=4, decoder_layers=4, mlp="relu",
        mlp_width=1024, hash_rows=2**16, dropout=0.1,
    ),
    # Ours, for MovieLens-1M.
    "gbla-ml1m": GBLAConfig(
        d_model=256, num_heads=4, head_dim=64, layout="SLL", num_layers=6, decoder_layers=1, mlp_width=704,
        hash_rows=2**14, cross_recency=True, dropout=0.2,
    ),
    # Ours, for tests and the demo.
    "gbla-tiny": GBLAConfig(
        d_model=64, num_heads=2, head_dim=32, layout="SLL", num_layers=3, decoder_layers=1, mlp_width=128,
        hash_rows=2**12, hash_width=32, cross_recency=True,
    ),
}  # fmt: skip

TWINS: dict[str, dict[str, Any]] = {
    "all-softmax": {"attention": "softmax"},
    "causal-softmax": {"attention": "softmax", "direction": "causal"},
    "causal": {"direction": "causal"},
    "fully-gbla": {"layout": "L"},
    "no-key-gate": {"key_gate": False},
    "no-conv": {"conv": False},
    "no-gated-norm": {"gated_norm": False},
    "bla": {"attention": "bla"},
}
"""The paper's comparison models: each is a preset with these fields changed."""


class EncodedHistory(NamedTuple):
    """What the decoder reads: cross-attention keys and values of every decoder layer, [N, B, H, L, D] each."""

    keys: Tensor
    values: Tensor


class EncoderLayer(nn.Module):
    """Pre-norm residual block: one mixer (S or L), one MLP."""

    def __init__(self, config: GBLAConfig, mixer: str) -> None:
        super().__init__()
        additions = config.attention == "gbla"
        self.is_softmax = mixer == "S"
        self.mixer_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        if self.is_softmax:
            self.mixer: nn.Module = MultiHeadAttention(
                config.d_model, config.num_heads, config.head_dim, config.rotary_base
            )
        else:
            self.mixer = GatedBidirectionalLinearAttention(
                config.d_model,
                config.num_heads,
                config.head_dim,
                conv_width=config.conv_width if additions and config.conv else 0,
                key_gate=additions and config.key_gate,
                gated_norm=additions and config.gated_norm,
                causal=config.direction == "causal",
                eps=config.eps,
            )
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mlp = _mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLC: Tensor, lengths_B: Tensor, plan: AttentionPlan | None) -> Tensor:
        """Map [B, L, d_model] to the same."""
        if self.is_softmax:
            y_BLC = self.mixer(self.mixer_norm(x_BLC), plan)
        else:
            y_BLC = self.mixer(x_BLC, lengths_B, self.mixer_norm)
        x_BLC = x_BLC + self.dropout(y_BLC)
        return x_BLC + self.dropout(self.mlp(self.mlp_norm(x_BLC)))


class DecoderLayer(nn.Module):
    """Pre-norm residual block: causal self-attention over digits, cross-attention to the history, MLP."""

    def __init__(self, config: GBLAConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        inner = config.num_heads * config.head_dim
        self.self_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads, config.head_dim, rotary_base=None)
        self.cross_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.cross_query = nn.Linear(config.d_model, inner, bias=False)
        self.cross_key_value = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.cross_out = nn.Linear(inner, config.d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mlp = _mlp(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recency_base = config.rotary_base if config.cross_recency else None

    def keys_and_values(self, memory_BLC: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's cross-attention keys and values, each [B, H, L, D], of the encoder output."""
        kv = self.cross_key_value(memory_BLC).unflatten(-1, (2, self.num_heads, self.head_dim))
        keys_BHLD, values_BHLD = kv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.recency_base is not None:
            positions = torch.arange(memory_BLC.shape[1], device=memory_BLC.device)
            keys_BHLD = rotate(keys_BHLD, positions - lengths_B.unsqueeze(-1), self.recency_base)
        return keys_BHLD, values_BHLD

    def forward(self, x_BKMC: Tensor, keys_BHLD: Tensor, values_BHLD: Tensor, valid_BL: Tensor) -> Tensor:
        """Map the digits [B, K, M, d_model] of K candidates a row to the same."""
        batch, beams, digits, _ = x_BKMC.shape
        own = self.self_attention(self.self_norm(x_BKMC).flatten(0, 1), UNPADDED_CAUSAL)
        x_BKMC = x_BKMC + self.dropout(own.unflatten(0, (batch, beams)))
        query = self.cross_query(self.cross_norm(x_BKMC)).flatten(1, 2)
        query_BHTD = query.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        mask_B1TL = valid_BL[:, None, None, :].expand(-1, -1, beams * digits, -1)
        seen_BHTD = F.scaled_dot_product_attention(query_BHTD, keys_BHLD, values_BHLD, attn_mask=mask_B1TL)
        seen = self.cross_out(seen_BHTD.transpose(1, 2).flatten(2)).unflatten(1, (beams, digits))
        x_BKMC = x_BKMC + self.dropout(seen)
        return x_BKMC + self.dropout(self.mlp(self.mlp_norm(x_BKMC)))


class GBLA(nn.Module):
    """The whole model: item embedding, encoder, decoder, one head a digit."""

    def __init__(self, config: GBLAConfig) -> None:
        super().__init__()
        self.config = config
        self.items = MultiHashEmbedding(
            config.num_hashes, config.hash_rows, config.hash_width, config.d_model, config.hash_seed
        )
        self.encoder = nn.ModuleList([EncoderLayer(config, mixer) for mixer in config.mixers])
        self.encoder_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.start = nn.Parameter(torch.empty(config.d_model))
        self.digit_positions = nn.Parameter(torch.empty(config.num_digits, config.d_model))
        self.codes = nn.Embedding((config.num_digits - 1) * config.codebook_size, config.d_model)
        self.decoder = nn.ModuleList([DecoderLayer(config) for _ in range(config.decoder_layers)])
        self.decoder_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.heads = nn.Parameter(torch.empty(config.num_digits, config.codebook_size, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight anew (R): embeddings from N(0, 1), projections from N(0, 0.25 / fan-in), biases zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, GatedBidirectionalLinearAttention):
                module.reset_conv()
        for parameter in (self.start, self.digit_positions):
            nn.init.normal_(parameter)
        nn.init.normal_(self.heads, std=0.5 * self.config.d_model**-0.5)

    def attention_plan(self, valid_BL: Tensor, *, all_full: bool = False) -> AttentionPlan:
        """Return how the S layers of the encoder treat a batch with this mask of valid positions; it says why."""
        config = self.config
        dtype = matmul_dtype(self.items.projection.weight)
        causal = config.direction == "causal"
        return plan_attention(valid_BL, causal=causal, dtype=dtype, head_dim=config.head_dim, all_full=all_full)

    def encode(self, item_ids: Tensor, lengths: Tensor, *, all_full: bool = False) -> EncodedHistory:
        """Read histories.

        Args:
            item_ids: int64 [B, L], oldest first, right-padded; ids in [0, 2^31); padding may hold anything.
            lengths: int32 [B], clamped to [0, L]. A row of length 0 is an empty history.
            all_full: the caller knows that every length is L, so that softmax attention needs no mask; not checked.

        Returns:
            EncodedHistory in the model's dtype, zero at padded positions.
        """
        valid_BL = valid_positions(lengths, item_ids.shape[1])
        plan = self.attention_plan(valid_BL, all_full=all_full) if "S" in self.config.mixers else None
        x_BLC = self.dropout(self.items(item_ids.masked_fill(~valid_BL, 0)))
        for layer in self.encoder:
            x_BLC = layer(x_BLC, lengths, plan)
        memory_BLC = self.encoder_norm(x_BLC).masked_fill(~valid_BL.unsqueeze(-1), 0)
        pairs = [layer.keys_and_values(memory_BLC, lengths) for layer in self.decoder]  # type: ignore[operator]
        return EncodedHistory(torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs]))

    def decode(self, encoded: EncodedHistory, lengths: Tensor, codes_BKM: Tensor) -> Tensor:
        """Return the decoder's hidden state [B, K, M, d_model] before each digit of ``codes`` int64 [B, K, M].

        Position m has seen digits 0 to m - 1 only, so digit m and later ones may hold anything in [0, V).
        """
        config = self.config
        offsets = torch.arange(config.num_digits - 1, device=codes_BKM.device) * config.codebook_size
        known_BKMC = self.codes(codes_BKM[..., :-1] + offsets)
        start = self.start.expand(*codes_BKM.shape[:2], 1, -1)
        x_BKMC = self.dropout(torch.cat([start, known_BKMC], dim=2) + self.digit_positions)
        # Values are zero at padding, so an empty history that sees its padding reads zeros, not NaN.
        valid_BL = valid_positions(lengths, encoded.keys.shape[3]) | (lengths < 1).unsqueeze(-1)
        for index, layer in enumerate(self.decoder):
            x_BKMC = layer(x_BKMC, encoded.keys[index], encoded.values[index], valid_BL)
        return self.decoder_norm(x_BKMC)

    def decode_step(self, encoded: EncodedHistory, lengths: Tensor, codes: Tensor, digit: Tensor) -> Tensor:
        """Score the next digit of K candidates a row.

        Args:
            encoded: of ``encode``.
            lengths: int32 [B], as given to ``encode``.
            codes: int64 [B, K, M] in [0, V); only digits before ``digit`` are read.
            digit: int64 [1], the digit to score, in [0, M).

        Returns:
            Logits [B, K, V].
        """
        hidden_BKC = self.decode(encoded, lengths, codes).index_select(2, digit).squeeze(2)
        return F.linear(hidden_BKC, self.heads.index_select(0, digit).squeeze(0))

    def forward(self, item_ids: Tensor, lengths: Tensor, target_codes: Tensor, *, all_full: bool = False) -> Tensor:
        """Return the training loss of each target: the sum of its M digit cross-entropies (P), float32 [B, K].

        ``target_codes`` int64 [B, K, M] holds K targets a history, each decoded on its own; the rest as in ``encode``.
        """
        encoded = self.encode(item_ids, lengths, all_full=all_full)
        hidden_BKMC = self.decode(encoded, lengths, target_codes)
        logits_BKMV = torch.einsum("bkmc,mvc->bkmv", hidden_BKMC, self.heads)
        loss = F.cross_entropy(logits_BKMV.float().flatten(0, 2), target_codes.flatten(), reduction="none")
        return loss.view(target_codes.shape).sum(-1)

    def parts(self) -> tuple[Part, ...]:
        """Return what is exported: ``encoder`` and ``decoder_step``."""
        config = self.config
        history = (config.decoder_layers, BATCH, config.num_heads, LENGTH, config.head_dim)
        lengths = TensorSpec("lengths", "int32", (BATCH,), "valid items of each history", LENGTH)
        encoded = (
            TensorSpec("cross_keys", "float", history, "cross-attention keys of every decoder layer"),
            TensorSpec("cross_values", "float", history, "cross-attention values of every decoder layer"),
        )
        encoder = Signature(
            (TensorSpec("item_ids", "int64", (BATCH, LENGTH), "history, oldest first, right-padded", 2**31), lengths),
            encoded,
        )
        codes = (BATCH, BEAMS, config.num_digits)
        decoder_step = Signature(
            (
                *encoded,
                lengths,
                TensorSpec("codes", "int64", codes, "digits chosen so far", config.codebook_size),
                TensorSpec("digit", "int64", (1,), "the digit to score", config.num_digits),
            ),
            (TensorSpec("logits", "float", (BATCH, BEAMS, config.codebook_size), "scores of the next digit"),),
        )
        return Part("encoder", _Encoder(self), encoder), Part("decoder_step", _DecoderStep(self), decoder_step)


class _Encoder(nn.Module):
    def __init__(self, model: GBLA) -> None:
        super().__init__()
        self.model = model

    def forward(self, item_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.encode(item_ids, lengths)


class _DecoderStep(nn.Module):
    def __init__(self, model: GBLA) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, cross_keys: Tensor, cross_values: Tensor, lengths: Tensor, codes: Tensor, digit: Tensor
    ) -> Tensor:
        return self.model.decode_step(EncodedHistory(cross_keys, cross_values), lengths, codes, digit)


def _mlp(config: GBLAConfig) -> nn.Module:
    block = SwiGLU if config.mlp == "swiglu" else ReluMLP
    return block(config.d_model, config.mlp_width)
