"""One ONNX file to one serialized engine: parse, check, profile, build. Writes nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.flavors import Flavor
from engines.graph import GraphFacts
from engines.messages import Messages, logger
from engines.profile import Sizes
from zoo.errors import EngineBuildError
from zoo.plugins import DOMAIN
from zoo.plugins.tensorrt import recorded_problems, register_creators
from zoo.signature import Signature, TensorSpec

DTYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}
"""Dtype of a bundle's graph -> the nvinfer1 name of its floating tensors, those that are float32 in all aside."""

BUILDER_SETTINGS = {"strongly_typed": True, "tf32": False, "attention_decomposable": True}
"""What every engine is built with; recorded in its manifest."""

_TENSORS = {**DTYPES, "int32": "INT32", "int64": "INT64"}

_building = threading.Lock()
"""One build at a time in a process: a build uses every core, and TensorRT keeps one logger for all of them."""


@dataclass(frozen=True)
class CompiledEngine:
    """A serialized engine.

    Attributes:
        data: TensorRT's own buffer; a memoryview of it copies nothing.
        plugins: number of plugin layers of each op.
        settings: builder settings that shaped the engine.
        seconds: parse and build.
    """

    data: Any
    plugins: dict[str, int]
    settings: dict[str, Any]
    seconds: float


def compile_engine(
    flavor: Flavor, onnx: Path, graph: GraphFacts, signature: Signature, sizes: Sizes, *, target: str, dtype: str
) -> CompiledEngine:
    """Build one engine.

    Raises:
        EngineBuildError: the graph does not parse or build, its inputs and outputs are not those of ``signature``, or a
            ``zoo`` node became something else than a plugin layer; the message carries what TensorRT said.
    """
    trt = flavor.module
    name = f"{onnx.stem}, {sizes}, {target}"
    with _building:
        log, messages = logger(trt)
        messages.clear()
        creators = register_creators(trt)
        recorded_problems(creators)
        started = time.perf_counter()
        builder = trt.Builder(log)
        network = builder.create_network(_network_flags(trt))
        parser = trt.OnnxParser(network, log)  # owns the weights: it lives until the engine is built
        if not parser.parse_from_file(str(onnx)):
            raise EngineBuildError(f"{name}: {_parse_errors(parser, recorded_problems(creators))}")
        plugins = _check_plugins(trt, network, graph, name)
        _check_tensors(trt, network, signature, dtype, name)
        _let_attention_decompose(trt, network)
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        flavor.configure_target(config, target)
        config.add_optimization_profile(_profile(builder, signature, sizes))
        data = builder.build_serialized_network(network, config)
        if data is None:
            raise EngineBuildError(f"{name}: {_build_errors(messages, recorded_problems(creators))}")
        return CompiledEngine(data, plugins, dict(BUILDER_SETTINGS), time.perf_counter() - started)


def _network_flags(trt: Any) -> int:
    # TensorRT 11 has strongly typed networks only, and may drop the flag.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(index) for index in range(network.num_layers)]


def _check_plugins(trt: Any, network: Any, graph: GraphFacts, name: str) -> dict[str, int]:
    """Return the plugin layers of each op; raise unless there is exactly one for every ``zoo`` node."""
    taken: Counter[str] = Counter()
    for layer in _layers(network):
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer
            plugin = layer.plugin
            if not hasattr(plugin, "plugin_name"):  # made by a C++ library
                plugin = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
            taken[plugin.plugin_name] += 1
    if dict(taken) != graph.plugins:
        raise EngineBuildError(
            f"{name}: the graph has {_counted(graph.plugins)} as {DOMAIN} nodes, but TensorRT made "
            f"{_counted(taken)} into plugin layers; the others fell back to their ONNX function bodies, which is slow. "
            f"The nodes need plugin_namespace={DOMAIN!r} and the version of a registered plugin; export again"
        )
    return dict(sorted(taken.items()))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(counts.items())) or "none"


def _check_tensors(trt: Any, network: Any, signature: Signature, dtype: str, name: str) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    for kind, specs, tensors in (("inputs", signature.inputs, inputs), ("outputs", signature.outputs, outputs)):
        wanted, found = [spec.name for spec in specs], [tensor.name for tensor in tensors]
        if found != wanted:
            raise EngineBuildError(f"{name}: the graph has the {kind} {found}, but the bundle says {wanted}")
        for spec, tensor in zip(specs, tensors, strict=True):
            _check_tensor(trt, spec, tensor, dtype, name)


def _check_tensor(trt: Any, spec: TensorSpec, tensor: Any, dtype: str, name: str) -> None:
    wanted = getattr(trt.DataType, _TENSORS[dtype if spec.dtype == "float" else spec.dtype])
    if tensor.dtype != wanted:
        raise EngineBuildError(f"{name}: {spec.name} is {tensor.dtype} in the graph, but the bundle says {wanted}")
    found = tuple(tensor.shape)
    expected = tuple(-1 if isinstance(dim, str) else dim for dim in spec.shape)
    # An output dimension that TensorRT could not work out is -1 in the network and fixed in the signature.
    if len(found) != len(expected) or any(
        got != want and not (got == -1 and not tensor.is_network_input)
        for got, want in zip(found, expected, strict=True)
    ):
        raise EngineBuildError(
            f"{name}: {spec.name} has shape {list(found)} in the graph (-1 is dynamic), but the bundle says "
            f"{list(spec.shape)}; export again"
        )


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Allow softmax attention in several kernels where there is no single one, as for float32 in TensorRT-RTX."""
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    for layer in _layers(network):
        if kind is not None and layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _profile(builder: Any, signature: Signature, sizes: Sizes) -> Any:
    profile = builder.create_optimization_profile()
    for spec in signature.inputs:
        if any(isinstance(dim, str) for dim in spec.shape):
            shapes = sizes.shapes(spec)
            profile.set_shape(spec.name, shapes["min"], shapes["opt"], shapes["max"])
    return profile


def _parse_errors(parser: Any, problems: Sequence[str]) -> str:
    found = []
    for index in range(min(parser.num_errors, 3)):
        error = parser.get_error(index)
        node = error.node_name() or f"number {error.node()}"
        found.append(f"node {node} ({error.node_operator()}): {' '.join(error.desc().split())}")
    return "; ".join((*problems, *found)) or "the graph does not parse, and TensorRT gave no reason"


def _build_errors(messages: Messages, problems: Sequence[str]) -> str:
    said = "; ".join(filter(None, (*problems, messages.first_errors())))
    if "OutOfMemory" in said:
        said += (
            "; a softmax layer in fp32 holds length x length weights for every head and row of the largest batch: "
            "build in fp16 or bf16, or with a smaller --batch or length"
        )
    return said or "TensorRT built nothing and gave no reason"
