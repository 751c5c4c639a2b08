"""One node of an op as a model of its own, run by ONNX Runtime and by ONNX's reference evaluator; ragged inputs."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from zoo.plugins import DOMAIN
from zoo.plugins.bodies import function_body
from zoo.plugins.onnx_schema import plugin_attributes, register_schemas

ELEMENTS = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}


FIXED = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


def one_node(spec, attributes, dtype, opset=23, sizes=None):
    """Return a model of one node with its function body; ``sizes`` fixes or renames letters of the spec."""
    register_schemas()
    sizes = sizes or {}

    def value(rule):
        return helper.make_tensor_value_info(
            rule.name,
            ELEMENTS[dtype] if rule.dtype == "T" else FIXED[rule.dtype],
            [sizes.get(letter, letter) for letter in rule.shape],
        )

    inputs, outputs = [value(rule) for rule in spec.inputs], [value(rule) for rule in spec.outputs]
    names = [rule.name for rule in spec.inputs], [rule.name for rule in spec.outputs]
    node = helper.make_node(spec.name, *names, domain=DOMAIN, **attributes, **plugin_attributes(spec))
    model = helper.make_model(
        helper.make_graph([node], "one_node", inputs, outputs),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, spec.version)],
        functions=[function_body(spec, attributes, opset)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def in_onnx_runtime(model, *tensors):
    """Return the outputs, alone where there is one."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return _alone([torch.from_numpy(value) for value in session.run(None, feeds)])


def in_reference_evaluator(model, *tensors):
    """Return the outputs, alone where there is one."""

    def array(tensor):
        return (
            tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            if tensor.dtype == torch.bfloat16
            else tensor.numpy()
        )

    names = [value.name for value in model.graph.input]

    def tensor(value):
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(value).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(value))

    with np.errstate(over="ignore"):
        outputs = ReferenceEvaluator(model).run(None, dict(zip(names, map(array, tensors), strict=True)))
    return _alone([tensor(value) for value in outputs])


def _alone(outputs):
    return outputs[0] if len(outputs) == 1 else outputs


def assert_as_good_as_pytorch(out, ref64, ref_lo):
    """At most twice the error of PyTorch in the same dtype, and a few units of its rounding."""
    assert out.dtype == ref_lo.dtype and out.shape == ref_lo.shape
    assert out.isfinite().all()
    if out.numel():
        unit = torch.finfo(out.dtype).eps * max(1.0, float(ref64.abs().max()))
        allowed = 2 * float((ref_lo.double() - ref64).abs().max()) + 4 * unit
        assert float((out.double() - ref64).abs().max()) <= allowed


def poisoned(x, lengths):
    padding = torch.arange(x.shape[1]) >= lengths.unsqueeze(-1)
    return x.masked_fill(padding.view(*padding.shape, *(1,) * (x.dim() - 2)), torch.nan)


@st.composite
def ragged(draw, sizes=(0, 1, 2, 3, 7, 13)):
    length = draw(st.sampled_from(sizes))
    lengths = draw(st.lists(st.integers(-1, length + 1), min_size=1, max_size=3))
    return length, torch.tensor(lengths, dtype=torch.int32), draw(st.integers(0, 2**31))
