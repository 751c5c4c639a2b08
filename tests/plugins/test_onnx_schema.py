import onnx
import pytest
import torch
from onnx import defs

from zoo.kernels import causal_short_conv
from zoo.plugins import DOMAIN, OPS
from zoo.plugins.bodies import function_body
from zoo.plugins.onnx_schema import PLUGIN_ATTRIBUTES, onnx_schema, register_schemas

SPECS = pytest.mark.parametrize("spec", OPS.values(), ids=OPS)

TORCH_KINDS = {"int": "int", "float": "float", "bool": "bool", "string": "str"}
ONNX_TYPES = {"T": "T", "float32": "tensor(float)", "int32": "tensor(int32)"}
ONNX_KINDS = {"int": "INT", "float": "FLOAT", "bool": "INT", "string": "STRING"}


def test_registering_twice_does_no_harm():
    register_schemas()
    register_schemas()
    for spec in OPS.values():
        assert defs.get_schema(spec.name, spec.version, DOMAIN).since_version == spec.version


@SPECS
def test_pytorch_sees_the_inputs_and_attributes_of_the_spec_in_order(spec):
    schema = getattr(torch.ops.zoo, spec.torch_name).default._schema
    assert [(argument.name, str(argument.type)) for argument in schema.arguments] == [
        *((rule.name, "Optional[Tensor]" if rule.optional else "Tensor") for rule in spec.inputs),
        *((attribute.name, TORCH_KINDS[attribute.kind]) for attribute in spec.attributes),
    ]
    assert [str(result.type) for result in schema.returns] == ["Tensor"] * len(spec.outputs)


@SPECS
def test_onnx_sees_the_tensors_of_the_spec_in_order(spec):
    schema = onnx_schema(spec)
    assert (schema.name, schema.domain, schema.since_version) == (spec.name, DOMAIN, spec.version)
    for found, rules in ((schema.inputs, spec.inputs), (schema.outputs, spec.outputs)):
        assert [(parameter.name, parameter.type_str) for parameter in found] == [
            (rule.name, ONNX_TYPES[rule.dtype]) for rule in rules
        ]
    (constraint,) = schema.type_constraints
    assert set(constraint.allowed_type_strs) == {"tensor(float16)", "tensor(bfloat16)", "tensor(float)"}


@SPECS
def test_onnx_sees_the_attributes_of_the_spec_and_those_of_the_plugin(spec):
    schema = onnx_schema(spec)
    wanted = {attribute.name: (ONNX_KINDS[attribute.kind], True) for attribute in spec.attributes}
    wanted |= dict.fromkeys(PLUGIN_ATTRIBUTES, ("STRING", False))
    assert {name: (a.type.name, a.required) for name, a in schema.attributes.items()} == wanted


@SPECS
def test_the_function_body_declares_what_the_schema_declares(spec):
    attributes = {"activation": "silu", "key_gate": True, "gated_norm": True, "normalize": True}
    body = function_body(spec, attributes, 23)
    schema = onnx_schema(spec)
    assert (body.domain, body.name) == (DOMAIN, spec.name)
    assert list(body.input) == [parameter.name for parameter in schema.inputs]
    assert list(body.output) == [parameter.name for parameter in schema.outputs]
    assert set(body.attribute) == set(schema.attributes)
    assert [(opset.domain, opset.version) for opset in body.opset_import] == [("", 23)]


def test_the_choices_of_a_string_attribute_are_those_that_the_op_takes():
    (activation,) = OPS["CausalShortConv"].attributes
    x, weight, lengths = torch.randn(1, 3, 2), torch.randn(2, 4), torch.tensor([3], dtype=torch.int32)
    for choice in activation.choices:
        causal_short_conv(x, weight, lengths, activation=choice)


def test_a_node_without_its_attributes_is_rejected_by_the_checker():
    register_schemas()
    node = onnx.helper.make_node("CausalShortConv", ["x", "weight", "lengths"], ["y"], domain=DOMAIN)
    context = onnx.checker.DEFAULT_CONTEXT
    context.opset_imports = {"": 23, DOMAIN: 1}
    with pytest.raises(onnx.checker.ValidationError, match="activation"):
        onnx.checker.check_node(node, context)
