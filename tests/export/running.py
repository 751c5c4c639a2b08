"""Small modules to export, and exported files run by ONNX Runtime and by ONNX's reference evaluator."""

import copy

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn.functional import softplus

from export.onnx_export import DTYPES, floating_dtype
from validate.tolerance import deviation
from zoo.kernels import gated_delta_rule
from zoo.models import presets
from zoo.models.parts import Part
from zoo.signature import BATCH, LENGTH, Signature, TensorSpec

WIDTH = 4


def small_part(module, name="small", width=WIDTH):
    """A part with one input and one output [batch, length, width]."""
    shape = (BATCH, LENGTH, width)
    signature = Signature((TensorSpec("x", "float", shape),), (TensorSpec("y", "float", shape),))
    return Part(name, module, signature)


class Memory(nn.Module):
    """Layers of the gated delta rule, each (heads, key width, value width); the first may take the state."""

    def __init__(self, *layers, takes_state=True):
        super().__init__()
        self.layers, self.takes_state = layers, takes_state
        widths = [WIDTH, *(heads * value_dim for heads, _, value_dim in layers)]
        self.projections = nn.ModuleList(
            nn.Linear(width, heads * (2 * key_dim + value_dim + 2))
            for width, (heads, key_dim, value_dim) in zip(widths, layers, strict=False)
        )

    def forward(self, x, lengths, state=None):
        final_state = None
        for index, (heads, key_dim, value_dim) in enumerate(self.layers):
            parts = self.projections[index](x).unflatten(-1, (heads, -1)).split((key_dim, key_dim, value_dim, 2), -1)
            decay, beta = parts[3].unbind(-1)
            o, final = gated_delta_rule(*parts[:3], -softplus(decay), beta.sigmoid(), state, lengths, normalize=True)
            x, state, final_state = o.flatten(2), None, final if final_state is None else final_state
        return x, final_state

    def part(self, name="memory", state="state", final_state="final_state"):
        heads, key_dim, value_dim = self.layers[0]
        shape = (BATCH, heads, key_dim, value_dim)
        width = self.layers[-1][0] * self.layers[-1][2]
        states = [TensorSpec(state, "fp32", shape)] if self.takes_state else []
        inputs = (
            TensorSpec("x", "float", (BATCH, LENGTH, WIDTH)),
            TensorSpec("lengths", "int32", (BATCH,), limit=LENGTH),
            *states,
        )
        outputs = TensorSpec("y", "float", (BATCH, LENGTH, width)), TensorSpec(final_state, "fp32", shape)
        return Part(name, self, Signature(inputs, outputs))


def tiny(twin=None, **overrides):
    torch.manual_seed(0)
    return presets.build(presets.resolve("gbla-tiny", twin=twin, overrides=overrides)).eval()


def part_of(model, name):
    return next(part for part in model.parts() if part.name == name)


class Nested(nn.Module):
    """``layers.1.gate`` is the given module, called with a keyword argument inside a ModuleList."""

    def __init__(self, gate):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)), _Layer(gate)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = gate

    def forward(self, x):
        return self.gate(self.linear(x), scale=x)


class OnnxRuntime:
    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, *tensors):
        names = [value.name for value in self.session.get_inputs()]
        feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(value) for value in self.session.run(None, feeds)]


class Reference:
    def __init__(self, path):
        model = onnx.load(path)
        self.names = [value.name for value in model.graph.input]
        self.evaluator = ReferenceEvaluator(model)

    def __call__(self, *tensors):
        arrays = [t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()
                  for t in tensors]  # fmt: skip
        with np.errstate(over="ignore"):
            outputs = self.evaluator.run(None, dict(zip(self.names, arrays, strict=True)))
        return [torch.from_numpy(np.ascontiguousarray(value).astype(np.float64)) for value in outputs]


def assert_parity(run, part, dtype, inputs):
    """The tolerance rule of docs/parity.md, on every output."""
    outputs = run(*inputs)
    ref64 = _in_torch(part, torch.float64, inputs)
    ref_lo = _in_torch(part, DTYPES[dtype], inputs)
    for spec, out, exact, low in zip(part.signature.outputs, outputs, ref64, ref_lo, strict=True):
        found = deviation(out, exact, low, DTYPES[dtype])
        # The rule's factor bounds typical errors; on a handful of values chance needs room.
        assert found.rms <= 2 * found.rms_allowed and found.max <= 2 * found.max_allowed, (spec.name, found)


@torch.no_grad()
def _in_torch(part, dtype, inputs):
    module = copy.deepcopy(part.module).to(dtype).eval()
    given = zip(part.signature.inputs, inputs, strict=True)
    outputs = module(*(x.to(floating_dtype(spec, dtype)) if x.is_floating_point() else x for spec, x in given))
    return outputs if isinstance(outputs, tuple) else (outputs,)


def encoder_inputs(batch, length):
    lengths = torch.tensor([length, 0, 1, length // 2][:batch], dtype=torch.int32)
    return torch.randint(0, 2**31, (batch, length)), lengths.clamp(max=length)


def decoder_inputs(model, batch, length, beams, digit, dtype):
    ids, lengths = encoder_inputs(batch, length)
    with torch.no_grad():
        encoded = model.encode(ids, lengths)
    codes = torch.randint(0, 256, (batch, beams, 4))
    return encoded.keys.to(dtype), encoded.values.to(dtype), lengths, codes, torch.tensor([digit])
