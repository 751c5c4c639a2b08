"""TensorRT plugin creators made from the OpSpecs: one generic creator class and one generic plugin class.

The classes are made for a module of the nvinfer1 API (TensorRT, TensorRT-RTX, the lean runtime), because each has base
classes of its own. TensorRT holds no Python reference to what it is given, so every creator, plugin and field
collection is kept alive here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.plugins.spec import DOMAIN, FLOATS, OPS, AttributeSpec, OpSpec
from zoo.plugins.tensorrt import contract

_DTYPES = {"float16": "HALF", "bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32", "int64": "INT64"}
_lock = threading.Lock()
_creators: dict[str, list[Any]] = {}
_plugin_classes: dict[str, type] = {}


def register_creators(trt: Any) -> list[Any]:
    """Register a creator for every op with the plugin registry of ``trt``, once a process, and return the creators.

    An op that the registry already has under the same name, version and namespace, from a C++ library for example,
    stays with that creator.

    Args:
        trt: a module with the nvinfer1 API: ``tensorrt``, ``tensorrt_rtx_bindings`` or ``tensorrt_lean_bindings``.
    """
    with _lock:
        if trt.__name__ not in _creators:
            _creators[trt.__name__] = [_creator_class(trt)(spec) for spec in OPS.values()]
        registry = trt.get_plugin_registry()
        for creator in _creators[trt.__name__]:
            key = (creator.name, creator.plugin_version, creator.plugin_namespace)
            if registry.get_creator(*key) is None:
                registry.register_creator(creator, creator.plugin_namespace)
        return list(_creators[trt.__name__])


def recorded_problems(creators: Sequence[Any]) -> list[str]:
    """Return, and forget, what went wrong in the callbacks of these creators and their plugins, each message once.

    TensorRT prints an exception of a Python callback on standard error and reports only that the call failed.
    """
    problems = [problem for creator in creators for problem in creator.problems]
    for creator in creators:
        creator.problems.clear()
    return list(dict.fromkeys(problems))


def field_type(trt: Any, attribute: AttributeSpec) -> Any:
    """Return the plugin field type that carries an attribute."""
    kinds = trt.PluginFieldType
    return {"int": kinds.INT32, "bool": kinds.INT32, "float": kinds.FLOAT32, "string": kinds.CHAR}[attribute.kind]


def plugin_fields(trt: Any, spec: OpSpec, attributes: Mapping[str, Any]) -> Any:
    """Return the attributes as a PluginFieldCollection; the caller keeps it alive while TensorRT may read it."""
    return trt.PluginFieldCollection(
        [
            trt.PluginField(
                attribute.name, _encoded(attribute.kind, attributes[attribute.name]), field_type(trt, attribute)
            )
            for attribute in spec.attributes
        ]
    )


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the message of an exception that leaves a callback, for ``recorded_problems``."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            self.problems.append(str(error))
            raise

    return call


@functools.cache
def _encoded(kind: str, value: Any) -> np.ndarray:
    """Return a value as field data, cached because a PluginField holds the bare address of its array."""
    if kind == "string":
        return np.frombuffer(str(value).encode(), dtype=np.int8)
    return np.array([value], dtype=np.float32 if kind == "float" else np.int32)


def _decoded(attribute: AttributeSpec, data: Any) -> Any:
    array = np.asarray(data)
    if attribute.kind == "string":
        return array.tobytes().rstrip(b"\0").decode()
    return array.reshape(-1)[0].item()


def _dtype_name(trt: Any, dtype: Any) -> str:
    for name, member in _DTYPES.items():
        if dtype == getattr(trt.DataType, member):
            return name
    return str(dtype)


def _creator_class(trt: Any) -> type:
    plugin_class = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):
        """The creator of one op."""

        def __init__(self, spec: OpSpec) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.spec = spec
            self.name = spec.name
            self.plugin_version = str(spec.version)
            self.plugin_namespace = DOMAIN
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(a.name, np.array([]), field_type(trt, a)) for a in spec.attributes]
            )
            self.plugins: list[Any] = []
            self.problems: list[str] = []

        @_recorded
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            kinds = {attribute.name: attribute for attribute in self.spec.attributes}
            values = {field.name: _decoded(kinds[field.name], field.data) for field in fields if field.name in kinds}
            plugin = plugin_class(self, contract.checked_attributes(self.spec, values))
            self.plugins.append(plugin)
            return plugin

    return Creator


def _plugin_class(trt: Any) -> type:
    if trt.__name__ in _plugin_classes:
        return _plugin_classes[trt.__name__]

    # The lean runtime has no build interface.
    build = (trt.IPluginV3OneBuild,) if hasattr(trt, "IPluginV3OneBuild") else ()
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, *build, trt.IPluginV3OneRuntime)

    class Plugin(*bases):  # type: ignore[misc]
        """One node: an op with its attributes."""

        def __init__(self, creator: Any, attributes: dict[str, Any]) -> None:
            for base in bases:
                base.__init__(self)
            self.creator = creator
            self.problems = creator.problems
            self.spec = spec = creator.spec
            self.attributes = attributes
            self.plugin_name = spec.name
            self.plugin_version = str(spec.version)
            self.plugin_namespace = DOMAIN
            self.num_outputs = len(spec.outputs)
            self.fields = plugin_fields(trt, spec, attributes)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            twin = type(self)(self.creator, self.attributes)
            self.creator.plugins.append(twin)
            return twin

        def get_fields_to_serialize(self) -> Any:
            return self.fields

        @_recorded
        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            contract.check_dtypes(self.spec, [_dtype_name(trt, dtype) for dtype in input_types])
            rules = zip(self.spec.inputs, input_types, strict=True)
            shared = next(dtype for rule, dtype in rules if rule.dtype == "T")
            return [
                shared if rule.dtype == "T" else getattr(trt.DataType, _DTYPES[rule.dtype])
                for rule in self.spec.outputs
            ]

        @_recorded
        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            sizes = contract.bind_sizes(self.spec, self.attributes, [_constants(dims) for dims in inputs])
            shapes = []
            for index, rule in enumerate(self.spec.outputs):
                shape = trt.DimsExprs(len(rule.shape))
                for axis, source in enumerate(contract.output_sources(self.spec, index)):
                    known = sizes[rule.shape[axis]]
                    if source is None or known != contract.UNKNOWN:
                        shape[axis] = builder.constant(known)
                    else:
                        shape[axis] = inputs[source[0]][source[1]]
                shapes.append(shape)
            return shapes

        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            descriptor = tensors[position].desc
            if descriptor.format != trt.TensorFormat.LINEAR:
                return False
            rules = (*self.spec.inputs, *self.spec.outputs)
            if rules[position].dtype != "T":
                return descriptor.type == getattr(trt.DataType, _DTYPES[rules[position].dtype])
            first = next(index for index, rule in enumerate(rules) if rule.dtype == "T")
            if position == first:
                return _dtype_name(trt, descriptor.type) in FLOATS
            return descriptor.type == tensors[first].desc.type

        @_recorded
        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            contract.check_dtypes(self.spec, [_dtype_name(trt, tensor.desc.type) for tensor in inputs])
            for extent in ("min", "max"):
                contract.bind_sizes(self.spec, self.attributes, [list(getattr(tensor, extent)) for tensor in inputs])

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            return None

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return 0

        @_recorded
        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            contract.check_dtypes(self.spec, [_dtype_name(trt, tensor.type) for tensor in inputs])
            contract.bind_sizes(self.spec, self.attributes, [list(tensor.dims) for tensor in inputs])

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        @_recorded
        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            from zoo.plugins.tensorrt.execution import device_tensor, run_on_stream

            descriptors = [*input_desc, *output_desc]
            tensors = [
                device_tensor(pointer, list(tensor.dims), _dtype_name(trt, tensor.type))
                for tensor, pointer in zip(descriptors, [*inputs, *outputs], strict=True)
            ]
            count = len(self.spec.inputs)
            run_on_stream(self.spec, list(self.attributes.values()), tensors[:count], tensors[count:], stream)

    _plugin_classes[trt.__name__] = Plugin
    return Plugin


def _constants(dims: Any) -> list[int]:
    """Return the sizes of a DimsExprs, UNKNOWN where they are not constants."""
    sizes = []
    for axis in range(len(dims)):
        size = dims[axis]
        sizes.append(size.get_constant_value() if size.is_constant() else contract.UNKNOWN)
    return sizes
