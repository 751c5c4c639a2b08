"""``zoo::gated_delta_rule``: registration with torch.library and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.errors import DTypeError, ShapeError
from zoo.kernels.gated_delta_rule import launch
from zoo.kernels.gated_delta_rule.chunked import gated_delta_rule_chunked, gated_delta_rule_chunked_backward
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.gated_delta_rule.walks import Solved
from zoo.kernels.ragged import FLOAT_DTYPES, accumulation_dtype, check_batch, check_device, check_tensors

_NAME = "gated_delta_rule"


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    lengths: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over a ragged batch (arXiv 2412.06464; the package docstring has the formulas).

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64. Padded positions of all sequences may hold anything,
            NaN included.
        k: [B, T, H, K] in the dtype of ``q``.
        v: [B, T, H, V] in the dtype of ``q``.
        log_decay: [B, T, H], any floating dtype; log a_t, at most 0 for a memory that forgets.
        beta: [B, T, H], any floating dtype; how much of a write is done, between 0 and 1.
        initial_state: [B, H, K, V] float32 (float64 if ``q`` is); None for zeros.
        lengths: int32 [B], valid positions of each row, clamped to [0, T].
        scale: factor on o; K^-0.5 if None.
        normalize: divide each q_t and k_t by sqrt(|x|^2 + 1e-6) first.

    Returns:
        o [B, T, H, V] in the dtype of ``q``, zero at padded positions, and the state after the last valid position
        [B, H, K, V] in the dtype of ``initial_state``. Differentiable once in all six tensors. Kernels may leave out
        what has faded to below 2^-64 of itself (float32; 2^-40 in 16 bits).

    Raises:
        ShapeError, DTypeError, ConfigError: an argument does not fit; the message names it.
    """
    given = {} if initial_state is None else {"initial_state": initial_state}
    check_tensors(_NAME, q=q, k=k, v=v, log_decay=log_decay, beta=beta, lengths=lengths, **given)
    if isinstance(scale, Tensor):
        raise DTypeError(f"{_NAME}: scale is a tensor, whose gradient would be lost; multiply o by it instead")
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    arguments = q, k, v, log_decay, beta, initial_state, lengths, scale, normalize
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:6])
    # An exported graph holds the op that has an ONNX form.
    if learns and not torch.compiler.is_exporting():
        o, state, *_ = torch.ops.zoo.gated_delta_rule_training(*arguments)
        return o, state
    return torch.ops.zoo.gated_delta_rule(*arguments)


@torch.library.custom_op(f"zoo::{_NAME}", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    lengths: Tensor,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    o, state, _ = _run(Inputs(q, k, v, log_decay, beta, initial_state), lengths, scale, normalize, keep=False)
    return o, state


@torch.library.custom_op(f"zoo::{_NAME}_training", mutates_args=())
def _training(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    lengths: Tensor,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op with what ``solve`` found, which its backward would otherwise compute again; of the reference all NaN.

    Its size is that of the kernels': compiled graphs are cached, and a cache outlives the choice of the two. (All of
    one call, forward and backward, must run under one choice.) It is flat, because torch.compile would guard on every
    dimension that may be 1, such as the chunks. Norms are empty if keys are not normalised.
    """
    inputs = Inputs(q, k, v, log_decay, beta, initial_state)
    o, state, solved = _run(inputs, lengths, scale, normalize, keep=True)
    if solved is None:
        solved = Solved(*(part.fill_(torch.nan) for part in launch.empty_solved(k, normalize)))
    return o, state, *_kept(solved, normalize)


def _run(
    inputs: Inputs, lengths: Tensor, scale: float, normalize: bool, *, keep: bool
) -> tuple[Tensor, Tensor, Solved | None]:
    """Run the kernels or the reference; ``keep`` asks for what the kernels of the gradients will want again."""
    _check(inputs, lengths)
    check_batch(_NAME, "q", inputs.q, lengths)
    if launch.choose(inputs).ok:
        lengths, solved = lengths.contiguous(), None
        if keep and launch.choose_backward(inputs).ok:
            solved = launch.solve(inputs, lengths, normalize)
        return *launch.forward(inputs, lengths, scale, normalize, solved=solved), solved
    # The reference multiplies float32 matrices; an autocast around the op must not narrow them.
    with torch.autocast(inputs.q.device.type, enabled=False):
        return *gated_delta_rule_chunked(inputs, lengths, scale, normalize), None


def _kept(solved: Solved, normalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return flat tensors of which no two are one, as an op must: without ``normalize`` the norms are the gates."""
    norms = solved.norms if normalize else solved.gates.new_empty(0)
    return solved.inverse.flatten(), solved.gates.flatten(), norms.flatten(), solved.bounds.flatten()


@torch.library.custom_op(f"zoo::{_NAME}_backward", mutates_args=())
def _backward(
    grad_o: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    lengths: Tensor,
    inverse: Tensor,
    gates: Tensor,
    norms: Tensor,
    bounds: Tensor,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and of the initial state, the last even where that is None.

    ``inverse`` to ``bounds`` are what the forward kept, or empty.
    """
    inputs = Inputs(q, k, v, log_decay, beta, initial_state)
    if launch.choose_backward(inputs).ok:
        kept = inverse, gates, norms if normalize else gates, bounds
        solved = launch.shaped_solved(kept, k) if inverse.numel() else None
        gradients = launch.backward(grad_o, grad_state, inputs, lengths.contiguous(), scale, normalize, solved=solved)
    else:
        with torch.autocast(q.device.type, enabled=False):
            gradients = gated_delta_rule_chunked_backward(grad_o, grad_state, inputs, lengths, scale, normalize)
    dq, dk, dv, dlog_decay, dbeta, dstate = gradients
    assert dstate is not None
    return dq, dk, dv, dlog_decay, dbeta, dstate


@_forward.register_fake
def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, lengths = Inputs(*arguments[:6]), arguments[6]
    _check(inputs, lengths)
    return torch.empty(inputs.v.shape, dtype=inputs.q.dtype, device=inputs.q.device), _empty_state(inputs)


@_training.register_fake
def _training_fake(*arguments: Any) -> tuple[Tensor, ...]:
    normalize = arguments[8]
    return *_forward_fake(*arguments), *_kept(launch.empty_solved(arguments[1], normalize), normalize)


@_backward.register_fake
def _backward_fake(grad_o: Tensor, grad_state: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*arguments[:6])
    like = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:5]]
    return *like, _empty_state(inputs)


def _empty_state(inputs: Inputs) -> Tensor:
    batch, _, heads, key_dim = inputs.q.shape
    shape = batch, heads, key_dim, inputs.v.shape[3]
    return torch.empty(shape, dtype=accumulation_dtype(inputs.q.dtype), device=inputs.q.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, ctx.normalize = inputs
    ctx.set_materialize_grads(False)
    kept = output[2:]
    if kept:
        ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *(kept or (tensors[1].new_empty(0) for _ in Solved._fields)))


def _autograd(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    inputs, rest = saved[:6], saved[6:]
    if grad_o is None:
        grad_o = torch.zeros_like(inputs[2])
    *gradients, state = torch.ops.zoo.gated_delta_rule_backward(
        grad_o, grad_state, *inputs, *rest, ctx.scale, ctx.normalize
    )
    return *gradients, state if inputs[5] is not None else None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
_training.register_autograd(_autograd, setup_context=_setup_context)


def _check(inputs: Inputs, lengths: Tensor) -> None:
    q, k, v, log_decay, beta, state = inputs
    if q.dim() != 4:
        raise ShapeError(f"{_NAME}: q has shape {list(q.shape)}, but four dimensions [B, T, H, K] are needed")
    if q.dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{_NAME}: q has dtype {q.dtype}; give it float16, bfloat16, float32 or float64")
    if lengths.dtype != torch.int32:
        raise DTypeError(f"{_NAME}: lengths has dtype {lengths.dtype}; convert it with lengths.to(torch.int32)")
    if lengths.dim() != 1:
        raise ShapeError(f"{_NAME}: lengths has shape {list(lengths.shape)}, but one length a row is needed: [B]")
    batch, length, heads, key_dim = q.shape
    value_dim = v.shape[-1] if v.dim() == 4 else -1
    if min(heads, key_dim) < 1 or value_dim == 0:
        raise ShapeError(f"{_NAME}: q {list(q.shape)} and v {list(v.shape)} need at least one head, key and value")
    shapes: dict[str, tuple[Tensor, list[Any]]] = {
        "k": (k, [batch, length, heads, key_dim]),
        "v": (v, [batch, length, heads, "V" if value_dim < 0 else value_dim]),
        "log_decay": (log_decay, [batch, length, heads]),
        "beta": (beta, [batch, length, heads]),
    }
    if state is not None:
        shapes["initial_state"] = (state, [batch, heads, key_dim, value_dim])
    for name, (x, shape) in shapes.items():
        check_device(_NAME, name, x, q)
        if list(x.shape) != shape:
            raise ShapeError(
                f"{_NAME}: {name} has shape {list(x.shape)}, but q of {list(q.shape)} needs {shape}".replace("'", "")
            )
    check_device(_NAME, "lengths", lengths, q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise DTypeError(f"{_NAME}: {name} has dtype {x.dtype} and q {q.dtype}; q, k and v share one dtype")
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x.dtype not in FLOAT_DTYPES:
            raise DTypeError(f"{_NAME}: {name} has dtype {x.dtype}; give it a floating dtype")
    wanted = accumulation_dtype(q.dtype)
    if state is not None and state.dtype != wanted:
        raise DTypeError(f"{_NAME}: initial_state has dtype {state.dtype}, but with q in {q.dtype} it must be {wanted}")
