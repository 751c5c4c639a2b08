"""How softmax attention treats one ragged batch: a plan made once and shared by every layer that reads the batch.

    mask     SDPA with a bool mask [B, 1, L, L]: any device and dtype, and the only plan that is exported
    dense    SDPA with no mask, where the caller knows that every row is full
    packed   the valid tokens moved to the front of a [B * L] buffer, and a variable-length kernel over them

The packed buffer has a fixed size and its index is computed on the device, so nothing waits for the lengths: the plan
works in CUDA graphs and under torch.compile. The variable-length kernel leaves whatever it finds in the slots behind
the last token, in its output and in its gradients; ``Packing`` puts zeros there.

Shape suffixes: B batch, L length, T = B * L slots, C channels, H heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo.kernels.launch import Choice, capability

PACKED_DTYPES = (torch.float16, torch.bfloat16)
WIDEST_PACKED_HEAD = 256
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Packing(NamedTuple):
    """A permutation of the B * L positions that brings the valid tokens, row after row, to the front.

    Attributes:
        token_T: int64, the position b * L + l that each slot takes its token from.
        slot_T: int64, the slot of each position; the inverse of ``token_T``.
        filled_T: bool, true for the slots that hold a valid token: the first sum(lengths).
        valid_T: bool, true for the positions that hold a valid token.
        rank_T: int64, the place l of each slot's token in its history.
        offsets_B1: int32 [B + 1], the slots where each row begins and, last, where the tokens end.
        length: L.
    """

    token_T: Tensor
    slot_T: Tensor
    filled_T: Tensor
    valid_T: Tensor
    rank_T: Tensor
    offsets_B1: Tensor
    length: int

    def pack(self, x_BLC: Tensor) -> Tensor:
        """Move ``x`` [B, L, C] into slots [T, C]; slots behind the last token are zero, whatever the padding holds."""
        return _Rearrange.apply(x_BLC.flatten(0, 1), self.token_T, self.slot_T, self.filled_T, self.valid_T)

    def unpack(self, x_TC: Tensor) -> Tensor:
        """Move slots [T, C] back to [B, L, C]; padding is zero, whatever the last slots hold."""
        rows_TC = _Rearrange.apply(x_TC, self.slot_T, self.token_T, self.valid_T, self.filled_T)
        return rows_TC.unflatten(0, (self.offsets_B1.shape[0] - 1, self.length))

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool) -> Tensor:
        """Return softmax attention [T, H, D] within each row, zero behind the last token."""
        o_THD = varlen_attention(q_THD, k_THD, v_THD, self.offsets_B1, self.length, causal=causal)
        return o_THD.masked_fill(~self.filled_T[:, None, None], 0)

    def guard(self, x_TC: Tensor) -> Tensor:
        """Return ``x``; its gradient is zero behind the last token, whatever the kernel has left there."""
        return _GuardGradient.apply(x_TC, self.filled_T)


def packing_of(valid_BL: Tensor) -> Packing:
    """Compute the packing of a bool mask [B, L] on its device, with no synchronisation."""
    valid_T = valid_BL.flatten()
    position_T = torch.arange(valid_T.shape[0], device=valid_T.device)
    order_T = valid_T.cumsum(0)
    total = valid_T.sum()
    slot_T = torch.where(valid_T, order_T - 1, total + position_T - order_T)
    token_T = torch.zeros_like(slot_T).scatter(0, slot_T, position_T)
    return Packing(
        token_T=token_T,
        slot_T=slot_T,
        filled_T=position_T < total,
        valid_T=valid_T,
        rank_T=token_T % max(valid_BL.shape[1], 1),
        offsets_B1=F.pad(valid_BL.sum(1).cumsum(0), (1, 0)).to(torch.int32),
        length=valid_BL.shape[1],
    )


class AttentionPlan(NamedTuple):
    """What every softmax layer of one encoding does.

    Attributes:
        kind: ``mask``, ``dense`` or ``packed``.
        reason: why this kind, in one sentence.
        causal: position i sees only j <= i.
        mask_B1LL: of ``mask``: bool, true where query i may see key j. None there means no padding.
        packing: of ``packed``.
        cudnn_first: of ``dense``: cuDNN's kernel is tried before torch's own.
    """

    kind: str
    reason: str
    causal: bool
    mask_B1LL: Tensor | None = None
    packing: Packing | None = None
    cudnn_first: bool = False


UNPADDED_CAUSAL = AttentionPlan("mask", "short sequences with no padding", causal=True)
"""For the decoder: a handful of digits, all of them valid."""


def plan_attention(
    valid_BL: Tensor, *, causal: bool, dtype: torch.dtype, head_dim: int, all_full: bool = False
) -> AttentionPlan:
    """Choose the plan of a batch.

    Args:
        valid_BL: bool, true at valid positions, which come first in each row.
        causal: position i sees only j <= i.
        dtype: of queries, keys and values; see ``matmul_dtype``.
        head_dim: D.
        all_full: the caller knows that every position is valid; it is not checked.
    """
    dense = choose_dense(valid_BL, all_full=all_full)
    if dense.ok:
        device = valid_BL.device
        cudnn_first = device.type == "cuda" and dtype in PACKED_DTYPES and capability(device) >= 90
        return AttentionPlan("dense", dense.reason, causal, cudnn_first=cudnn_first)
    packed = choose_packed(valid_BL, dtype, head_dim)
    if packed.ok:
        return AttentionPlan("packed", packed.reason, causal, packing=packing_of(valid_BL))
    return AttentionPlan("mask", packed.reason, causal, mask_B1LL=attention_mask(valid_BL, causal=causal))


def choose_dense(valid_BL: Tensor, *, all_full: bool) -> Choice:
    """Return whether attention may run with no mask at all."""
    if not all_full:
        return Choice(False, "rows may be shorter than the batch is long")
    if torch.compiler.is_exporting():
        return Choice(False, "an exported graph serves any lengths")
    if valid_BL.numel() == 0:
        return Choice(False, "the batch is empty")
    return Choice(True, "every row is full")


def choose_packed(valid_BL: Tensor, dtype: torch.dtype, head_dim: int) -> Choice:
    """Return whether the variable-length kernel takes a batch with heads of this dtype and width."""
    if torch.compiler.is_exporting():
        return Choice(False, "an exported graph holds standard operators only")
    if valid_BL.device.type != "cuda":
        return Choice(
            False, f"the tensors are on {valid_BL.device.type}; the variable-length kernel is for CUDA devices"
        )
    if dtype not in PACKED_DTYPES:
        return Choice(False, f"the variable-length kernel takes float16 and bfloat16, not {dtype}")
    if head_dim % 8 or head_dim > WIDEST_PACKED_HEAD:
        return Choice(
            False,
            f"heads of width {head_dim}: the variable-length kernel takes multiples of 8 up to {WIDEST_PACKED_HEAD}",
        )
    found = capability(valid_BL.device)
    if found < 80:
        return Choice(False, f"compute capability {found / 10:.1f} is older than 8.0")
    if valid_BL.numel() == 0:
        return Choice(False, "the batch is empty")
    return Choice(True, "padding is left out of the computation")


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer with this weight gives its output: autocast's where it is on."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def attention_mask(valid_BL: Tensor, *, causal: bool) -> Tensor:
    """Return a bool mask [B, 1, L, L], true where query i may see key j.

    A padded query sees itself, so that no row of the softmax is empty; its output is discarded by the caller.
    """
    length = valid_BL.shape[1]
    positions = torch.arange(length, device=valid_BL.device)
    query, key = positions.unsqueeze(1), positions.unsqueeze(0)
    seen = valid_BL[:, None, None, :]
    if causal:
        seen = seen & (key <= query)
    return seen | (key == query)


def dense_attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, plan: AttentionPlan) -> Tensor:
    """Return softmax attention [B, L, H, D] over full rows, by the fastest kernel that torch has."""
    q_BHLD, k_BHLD, v_BHLD = q_BLHD.transpose(1, 2), k_BLHD.transpose(1, 2), v_BLHD.transpose(1, 2)
    if not plan.cudnn_first:
        return F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=plan.causal).transpose(1, 2)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=plan.causal).transpose(1, 2)


def varlen_attention(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, offsets_B1: Tensor, length: int, *, causal: bool
) -> Tensor:
    """Return attention within the rows that ``offsets`` marks; slots behind the last row are undefined."""
    attend, causal_option, full_option = _varlen_function()
    options = causal_option if causal else full_option
    return attend(q_THD, k_THD, v_THD, offsets_B1, offsets_B1, length, length, **options)


@functools.cache
def _varlen_function() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return torch's function with its options for causal and for full attention: 2.10 and 2.11 spell them apart."""
    from torch.nn.attention import varlen

    if "window_size" in inspect.signature(varlen.varlen_attn).parameters:
        return varlen.varlen_attn, {"window_size": (-1, 0)}, {}
    return varlen.varlen_attn, {"is_causal": True}, {}


class _Rearrange(torch.autograd.Function):
    """Rows in another order, some of them zero. A permutation, so the gradient is a gather too, with no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor, kept: Tensor, kept_inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, kept_inverse)
        return x.index_select(0, source).masked_fill(~kept.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, kept_inverse = ctx.saved_tensors
        return grad.index_select(0, inverse).masked_fill(~kept_inverse.unsqueeze(-1), 0), None, None, None, None


class _GuardGradient(torch.autograd.Function):
    """The identity, with the gradient of unfilled rows set to zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(filled)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (filled,) = ctx.saved_tensors
        return grad.masked_fill(~filled.unsqueeze(-1), 0), None
