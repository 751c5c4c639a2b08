"""What the TensorRT creators report, against the OpSpecs that they are made from."""

import importlib.util

import numpy as np
import pytest

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.plugins import DOMAIN, OPS
from zoo.plugins.tensorrt import contract, plugin_fields, recorded_problems, register_creators

ATTENTION = OPS["GatedBidirectionalLinearAttention"]
CONVOLUTION = OPS["CausalShortConv"]
DELTA = OPS["GatedDeltaRule"]
ATTRIBUTES = {"num_heads": 4, "head_dim": 64, "eps": 1e-6, "key_gate": True, "gated_norm": True}
EXAMPLES = {
    ATTENTION.name: ATTRIBUTES,
    CONVOLUTION.name: {"activation": "silu"},
    DELTA.name: {"scale": 0.125, "normalize": True},
}
FIXED = {"float32": "FLOAT", "int32": "INT32"}


@pytest.fixture(scope="module")
def trt():
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("tensorrt_rtx_bindings is not installed: pip install 'trt-zoo[rtx]'")
    from engines.flavors import flavor

    return flavor("rtx").module


@pytest.fixture(params=OPS.values(), ids=OPS.keys())
def spec(request):
    return request.param


def example(spec):
    """Attributes of the spec's kinds."""
    return EXAMPLES[spec.name]


def kinds(trt, rules, dtype):
    """The TensorRT dtype of each tensor of a node whose floating dtype is ``dtype``."""
    return [getattr(trt.DataType, dtype if rule.dtype == "T" else FIXED[rule.dtype]) for rule in rules]


def plugin_of(trt, spec):
    (creator,) = (creator for creator in register_creators(trt) if creator.name == spec.name)
    return creator.create_plugin("node", plugin_fields(trt, spec, example(spec)), None)


def test_the_registry_has_every_op_under_the_specs_name_version_and_namespace(trt, spec):
    creators = {creator.name: creator for creator in register_creators(trt)}
    found = trt.get_plugin_registry().get_creator(spec.name, str(spec.version), DOMAIN)
    assert found is not None
    creator = creators[spec.name]
    assert (creator.plugin_version, creator.plugin_namespace) == (str(spec.version), DOMAIN)


def test_field_names_and_types_are_the_specs_attributes_in_order(trt, spec):
    (creator,) = (creator for creator in register_creators(trt) if creator.name == spec.name)
    types = {"int": "INT32", "bool": "INT32", "float": "FLOAT32", "string": "CHAR"}
    wanted = [(a.name, getattr(trt.PluginFieldType, types[a.kind])) for a in spec.attributes]
    assert [(field.name, field.type) for field in creator.field_names] == wanted


def test_registering_twice_gives_the_same_creators(trt):
    assert register_creators(trt) == register_creators(trt)


def test_a_plugin_serializes_the_fields_that_it_was_made_from_and_its_clone_too(trt, spec):
    (creator,) = (creator for creator in register_creators(trt) if creator.name == spec.name)
    fields = plugin_fields(trt, spec, example(spec))
    plugin = creator.create_plugin("node", fields, None)
    for one in (plugin, plugin.clone()):
        assert one.attributes == pytest.approx(example(spec))
        written = {field.name: np.asarray(field.data).tobytes() for field in one.get_fields_to_serialize()}
        assert list(written) == [attribute.name for attribute in spec.attributes]
        assert written == {field.name: np.asarray(field.data).tobytes() for field in fields}
        assert (one.plugin_name, one.plugin_version, one.plugin_namespace) == (spec.name, str(spec.version), DOMAIN)
        assert one.num_outputs == len(spec.outputs)


def test_a_node_without_an_attribute_is_refused_by_name_and_the_message_is_kept(trt):
    creators = register_creators(trt)
    (creator,) = (creator for creator in creators if creator.name == ATTENTION.name)
    recorded_problems(creators)
    with pytest.raises(ConfigError, match="the node has no num_heads, head_dim"):
        creator.create_plugin("node", trt.PluginFieldCollection([]), None)
    (problem,) = recorded_problems(creators)
    assert "num_heads" in problem
    assert recorded_problems(creators) == []


@pytest.mark.parametrize("dtype", ["HALF", "BF16", "FLOAT"])
def test_each_output_has_its_own_dtype_or_that_of_the_floating_inputs(trt, spec, dtype):
    inputs, outputs = (kinds(trt, rules, dtype) for rules in (spec.inputs, spec.outputs))
    assert plugin_of(trt, spec).get_output_data_types(inputs) == outputs


def test_the_state_of_a_half_precision_node_is_float32(trt):
    half, single, whole = (getattr(trt.DataType, name) for name in ("HALF", "FLOAT", "INT32"))
    inputs = [half, half, half, single, half, single, whole]
    assert plugin_of(trt, DELTA).get_output_data_types(inputs) == [half, single]


def test_only_linear_tensors_of_the_dtypes_of_the_spec_are_supported(trt, spec):
    plugin = plugin_of(trt, spec)
    rules = (*spec.inputs, *spec.outputs)

    def tensor(dtype, layout=trt.TensorFormat.LINEAR):
        dynamic = trt.DynamicPluginTensorDesc()
        dynamic.desc.type, dynamic.desc.format = dtype, layout
        return dynamic

    def supported(dtypes, first_layout=trt.TensorFormat.LINEAR):
        tensors = [tensor(dtypes[0], first_layout), *map(tensor, dtypes[1:])]
        return [plugin.supports_format_combination(index, tensors, len(spec.inputs)) for index in range(len(rules))]

    right = kinds(trt, rules, "HALF")
    assert supported(right) == [True] * len(rules)
    assert supported([trt.DataType.INT32, *right[1:]])[0] is False
    assert supported(right, trt.TensorFormat.CHW32)[0] is False
    for index in range(1, len(rules)):
        for wrong in {trt.DataType.HALF, trt.DataType.FLOAT, trt.DataType.INT32} - {right[index]}:
            assert supported([*right[:index], wrong, *right[index + 1 :]])[index] is False


def test_output_shapes_come_from_inputs_or_attributes():
    assert contract.output_sources(CONVOLUTION, 0) == [(0, 0), (0, 1), (0, 2)]
    assert contract.output_sources(ATTENTION, 0) == [(0, 0), (0, 1), None]
    sizes = contract.bind_sizes(ATTENTION, ATTRIBUTES, [[-1, 128, 1032], [4, 64], [7]])
    assert (sizes["B"], sizes["L"], sizes["E"]) == (7, 128, 256)
    assert contract.output_sources(DELTA, 0) == [(0, 0), (0, 1), (0, 2), (2, 3)]
    assert contract.output_sources(DELTA, 1) == [(0, 0), (0, 2), (0, 3), (2, 3)]


@pytest.mark.parametrize(
    ("spec", "shapes", "words"),
    [
        (
            ATTENTION,
            [[2, 5, 1030], [4, 64], [2]],
            r"input packed has shape \[2, 5, 1030\], 1030 columns, but P must",
        ),
        (ATTENTION, [[2, 5, 1032], [4, 32], [2]], r"input norm_weight .* 32 columns, but D must be 64 for num_heads=4"),
        (ATTENTION, [[2, 5, 1032], [4, 64], [3]], r"input lengths has shape \[3\].* B must be 2 to agree with packed"),
        (
            ATTENTION,
            [[2, 5, 1032], [4, 64], [2, 1]],
            r"input lengths has 2 dimensions, shape \[2, 1\], but needs",
        ),
        (
            CONVOLUTION,
            [[2, -1, 16], [24, 4], [2]],
            r"input weight .* 24 in dimension 0, but C must be 16 to agree",
        ),
        (
            DELTA,
            [[2, 5, 3, 8], [2, 5, 3, 8], [2, 5, 3, 16], [2, 5, 3], [2, 5, 3], [2, 3, 16, 8], [2]],
            r"input initial_state has shape \[2, 3, 16, 8\], 16 in dimension 2, but K must be 8 to agree with q",
        ),
    ],
)
def test_a_shape_that_does_not_fit_names_the_input(spec, shapes, words):
    with pytest.raises(ShapeError, match=words):
        contract.bind_sizes(spec, example(spec), shapes)


@pytest.mark.parametrize(
    ("spec", "dtypes", "words"),
    [
        (
            CONVOLUTION,
            ["float16", "float32", "int32"],
            "input weight is float32, but x is float16; x, weight of a node",
        ),
        (CONVOLUTION, ["float16", "float16", "int64"], "input lengths is int64, but must be int32"),
        (CONVOLUTION, ["int32", "int32", "int32"], "input x is int32, but must be one of float16"),
        (DELTA, [*["float16"] * 6, "int32"], "input log_decay is float16, but must be float32"),
        (
            DELTA,
            ["float16", "float16", "float16", "float32", "float16", "float16", "int32"],
            "input initial_state is float16, but must be float32",
        ),
        (
            DELTA,
            ["float16", "float16", "float16", "float32", "float32", "float32", "int32"],
            "input beta is float32, but q is float16; q, k, v, beta of a node must have one dtype",
        ),
    ],
)
def test_a_dtype_that_does_not_fit_names_the_input(spec, dtypes, words):
    with pytest.raises(DTypeError, match=words):
        contract.check_dtypes(spec, dtypes)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="activation is 'gelu', but must be one of none, silu"):
        contract.checked_attributes(CONVOLUTION, {"activation": "gelu"})
