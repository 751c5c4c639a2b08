"""What the TensorRT creators report, against the OpSpecs that they are made from."""

import importlib.util

import numpy as np
import pytest

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.plugins import DOMAIN, OPS
from zoo.plugins.tensorrt import contract, plugin_fields, recorded_problems, register_creators

ATTENTION = OPS["GatedBidirectionalLinearAttention"]
CONVOLUTION = OPS["CausalShortConv"]
ATTRIBUTES = {"num_heads": 4, "head_dim": 64, "eps": 1e-6, "key_gate": True, "gated_norm": True}


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
    return ATTRIBUTES if spec is ATTENTION else {"activation": "silu"}


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
def test_the_output_has_the_dtype_of_the_floating_inputs(trt, spec, dtype):
    (creator,) = (creator for creator in register_creators(trt) if creator.name == spec.name)
    plugin = creator.create_plugin("node", plugin_fields(trt, spec, example(spec)), None)
    kind = getattr(trt.DataType, dtype)
    assert plugin.get_output_data_types([kind, kind, trt.DataType.INT32]) == [kind]


def test_only_linear_tensors_of_one_floating_dtype_and_int32_lengths_are_supported(trt, spec):
    (creator,) = (creator for creator in register_creators(trt) if creator.name == spec.name)
    plugin = creator.create_plugin("node", plugin_fields(trt, spec, example(spec)), None)

    def tensor(dtype, layout=trt.TensorFormat.LINEAR):
        dynamic = trt.DynamicPluginTensorDesc()
        dynamic.desc.type, dynamic.desc.format = dtype, layout
        return dynamic

    half, single, whole = (tensor(getattr(trt.DataType, name)) for name in ("HALF", "FLOAT", "INT32"))

    def supported(*tensors):
        return [plugin.supports_format_combination(index, tensors, 3) for index in range(4)]

    assert supported(half, half, whole, half) == [True] * 4
    assert supported(half, single, half, single) == [True, False, False, False]
    assert supported(whole, half, whole, half)[0] is False
    assert supported(tensor(trt.DataType.HALF, trt.TensorFormat.CHW32), half, whole, half)[0] is False


def test_output_shapes_come_from_inputs_or_attributes():
    assert contract.output_sources(CONVOLUTION, 0) == [(0, 0), (0, 1), (0, 2)]
    assert contract.output_sources(ATTENTION, 0) == [(0, 0), (0, 1), None]
    sizes = contract.bind_sizes(ATTENTION, ATTRIBUTES, [[-1, 128, 1032], [4, 64], [7]])
    assert (sizes["B"], sizes["L"], sizes["E"]) == (7, 128, 256)


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
    ],
)
def test_a_shape_that_does_not_fit_names_the_input(spec, shapes, words):
    with pytest.raises(ShapeError, match=words):
        contract.bind_sizes(spec, example(spec), shapes)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        (["float16", "float32", "int32"], "input weight is float32, but x is float16"),
        (["float16", "float16", "int64"], "input lengths is int64, but must be int32"),
        (["int32", "int32", "int32"], "input x is int32, but must be one of float16"),
    ],
)
def test_a_dtype_that_does_not_fit_names_the_input(dtypes, words):
    with pytest.raises(DTypeError, match=words):
        contract.check_dtypes(CONVOLUTION, dtypes)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="activation is 'gelu', but must be one of none, silu"):
        contract.checked_attributes(CONVOLUTION, {"activation": "gelu"})
