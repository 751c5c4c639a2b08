"""What the tests of the gated delta rule share: inputs, extremes, and the tolerance rule over outputs and gradients."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from validate.tolerance import deviation
from zoo.kernels import gated_delta_rule
from zoo.kernels.gated_delta_rule.chunked import gated_delta_rule_chunked, gated_delta_rule_chunked_backward
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.ragged import accumulation_dtype

NAMES = Inputs._fields


def draw_inputs(batch, length, heads, key_dim, value_dim, *, with_state=True, key_size=1.0):
    """float64; keys of unit length times ``key_size``, so that no write overshoots."""
    q, k = (torch.randn(batch, length, heads, key_dim, dtype=torch.float64) for _ in range(2))
    v = torch.randn(batch, length, heads, value_dim, dtype=torch.float64)
    log_decay = -torch.rand(batch, length, heads, dtype=torch.float64)
    beta = torch.rand(batch, length, heads, dtype=torch.float64)
    state = torch.randn(batch, heads, key_dim, value_dim, dtype=torch.float64) if with_state else None
    return Inputs(q, key_size * torch.nn.functional.normalize(k, dim=-1), v, log_decay, beta, state)


def as_lengths(lengths, device="cpu"):
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def each(inputs, change):
    """Change every tensor, and leave out an initial state that is None."""
    return Inputs(*(None if x is None else change(x) for x in inputs))


def poisoned(inputs, lengths):
    """The same inputs with NaN at padding."""
    return Inputs(*(poison(x, lengths) for x in inputs[:5]), inputs.initial_state)


def poison(x, lengths):
    x = x.clone()
    for row, valid in enumerate(lengths):
        x[row, max(valid, 0) :] = torch.nan
    return x


def in_dtype(inputs, dtype):
    """As a model holds them: log decay in float32, the rest narrow, the state in the dtype of sums."""
    q, k, v, log_decay, beta, state = inputs
    wide = accumulation_dtype(dtype)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    return Inputs(q, k, v, log_decay.to(wide), beta, None if state is None else state.to(wide))


def in_float64(inputs):
    return each(inputs, torch.Tensor.double)


def disturbed(inputs):
    """The same inputs with errors of the size of float32 roundings."""
    eps = torch.finfo(torch.float32).eps
    return each(inputs, lambda x: x * (1 + eps * torch.empty_like(x).uniform_(-1, 1)))


def run_op(inputs, lengths, grads=None, *, normalize=False):
    """Return o and the final state, and with ``grads`` (of both, either None) the gradients by name."""
    leaves = each(inputs, lambda x: x.detach().clone().requires_grad_(grads is not None))
    outputs = gated_delta_rule(*leaves, as_lengths(lengths, inputs.q.device), normalize=normalize)
    if grads is None:
        return outputs
    given = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    found = torch.autograd.grad([y for y, _ in given], list(wanted.values()), [grad for _, grad in given])
    return [y.detach() for y in outputs], dict(zip(wanted, found, strict=True))


def draw_grads(inputs):
    batch, _, heads, key_dim = inputs.q.shape
    state_shape = batch, heads, key_dim, inputs.v.shape[3]
    state_dtype = accumulation_dtype(inputs.q.dtype)
    return torch.randn_like(inputs.v), torch.randn(state_shape, dtype=state_dtype, device=inputs.q.device)


def by_name(result):
    (o, state), gradients = result
    return {"o": o, "state": state, **{f"grad {name}": x for name, x in gradients.items()}}


class NarrowProducts(TorchFunctionMode):
    """Rounds what matrices are multiplied to a 16-bit dtype, as tensor cores take it; sums stay float32."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = [x.to(self.dtype).to(x.dtype) for x in args]
        return function(*args, **(kwargs or {}))


def run_chunked(inputs, lengths, grads=None, *, normalize=False, narrow=False):
    """As ``run_op``, of the chunked form; ``narrow``: with the operands of products rounded to the dtype of q."""
    rest = as_lengths(lengths, inputs.q.device), inputs.q.shape[3] ** -0.5, normalize
    with NarrowProducts(inputs.q.dtype) if narrow and inputs.q.dtype.itemsize == 2 else contextlib.nullcontext():
        outputs = gated_delta_rule_chunked(inputs, *rest)
        if grads is None:
            return outputs
        grad_o = torch.zeros_like(inputs.v) if grads[0] is None else grads[0]
        found = gated_delta_rule_chunked_backward(grad_o, grads[1], inputs, *rest)
    return outputs, {name: g for name, g, x in zip(NAMES, found, inputs, strict=True) if x is not None}


def judge(found, ref64, low, dtype, rounded=()):
    """Hold outputs and gradients by name to the tolerance rule, float32 ones too in ``dtype``, that of q.

    The low-precision results may be exact by luck. So four times what float32 roundings of the inputs do to the float64
    results, ``rounded``, is granted on top where given, as the floor of any float32 sum.
    """
    for name, wanted in ref64.items():
        x = found[name]
        assert x.isfinite().all(), f"{name} is not finite"
        judged = deviation(x, wanted, low[name].to(dtype), dtype)
        floor = [deviation(other[name], wanted, wanted, dtype) for other in rounded]
        assert judged.rms <= judged.rms_allowed + 4 * max((d.rms for d in floor), default=0), f"{name}: {judged}"
        assert judged.max <= judged.max_allowed + 4 * max((d.max for d in floor), default=0), f"{name}: {judged}"


def assert_zero_at_padding(found, lengths):
    """Demand it of o and of the gradients of all sequences."""
    for name, x in found.items():
        if name not in ("state", "grad initial_state"):
            for row, valid in enumerate(lengths):
                assert (x[row, max(valid, 0) :] == 0).all(), f"{name} is not zero at the padding of row {row}"


def constant_decay(value):
    return lambda inputs: inputs._replace(log_decay=torch.full_like(inputs.log_decay, value))


def decay_at(positions, value):
    def change(inputs):
        log_decay = inputs.log_decay / 10
        log_decay[:, [t for t in positions if t < log_decay.shape[1]]] = value
        return inputs._replace(log_decay=log_decay)

    return change


def constant_beta(value):
    return lambda inputs: inputs._replace(beta=torch.full_like(inputs.beta, value))


def one_repeated_key(inputs):
    """Every key the same, every write whole, nothing forgotten: A is all ones below the diagonal."""
    return Inputs(
        inputs.q,
        inputs.k[:, :1].expand_as(inputs.k),
        inputs.v,
        torch.zeros_like(inputs.log_decay),
        torch.ones_like(inputs.beta),
        inputs.initial_state,
    )


def keys_of_length(size):
    """Keys of this length, and queries as much shorter."""
    return lambda inputs: inputs._replace(k=size * inputs.k, q=size * inputs.q)


EXTREMES = {
    "everything is forgotten at each step": constant_decay(-20.0),
    "nothing is forgotten": constant_decay(0.0),
    "nothing is written": constant_beta(0.0),
    "everything is written": constant_beta(1.0),
    "one repeated key": one_repeated_key,
    "short keys": keys_of_length(1e-3),
    "keys near zero": keys_of_length(1e-8),
    "strong decay in the middle of a chunk": decay_at([3, 31, 90], -300.0),
    "decay beyond any float in the middle of a chunk": decay_at([3, 31, 90], -1e6),
    "infinite decay in the middle of a chunk": decay_at([3, 31, 90], -torch.inf),
    "infinite decay at the borders of chunks": decay_at([0, 63, 64, 127, 129], -torch.inf),
    "infinite decay at each step": constant_decay(-torch.inf),
}


def packed_views(inputs):
    """q, k and v as columns of one tensor whose heads lie 2 K + V columns apart, log decay and beta as of another."""
    qkv = torch.cat(inputs[:3], 3)
    q, k, v = qkv.split([x.shape[3] for x in inputs[:3]], 3)
    gates = torch.stack([inputs.log_decay, inputs.beta.to(inputs.log_decay.dtype)], 3)
    return Inputs(q, k, v, gates[..., 0], gates[..., 1], inputs.initial_state)


VIEWS = {
    "one packed tensor": packed_views,
    "H before T": lambda inputs: each(inputs, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "T before B": lambda inputs: each(inputs, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "width first": lambda inputs: each(inputs, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)),
    "an odd offset": lambda inputs: each(inputs, lambda x: torch.cat([x[..., :1], x], -1)[..., 1:]),
    "every other position": lambda inputs: each(inputs, lambda x: x.repeat_interleave(2, 1)[:, ::2]),
}
