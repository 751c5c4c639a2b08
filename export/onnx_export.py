"""One part of a model to one ONNX file.

The steps, each of which may refuse with ExportError: capture with torch.export, translate to ONNX with the custom ops
as ``zoo`` nodes, attach their function bodies, write beside the target, check what was written, rename.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.diagnosis import explain_failure
from export.quiet import quiet
from export.translation import translation_table
from export.weights import label_initializers
from zoo import __version__, files
from zoo.errors import ConfigError, ExportError
from zoo.models.parts import Part
from zoo.plugins.bodies import function_body, structural_attributes
from zoo.plugins.onnx_schema import register_schemas
from zoo.plugins.spec import DOMAIN, OPS
from zoo.signature import Signature, TensorSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FLOATING = ("float", "fp32")
"""What a signature calls its floating tensors."""

DEFAULT_OPSET = 23
"""The first with ``Attention`` and ``RMSNormalization``, which keep softmax attention one node for TensorRT."""

LIMIT = 2_000_000_000
"""Weights of more bytes than this go to <name>.onnx.data beside the file: a protobuf holds at most 2 GiB."""

_SMALLEST_EXAMPLE = 11
"""Dynamic dimensions are traced at this size and the next odd ones."""


@dataclass(frozen=True)
class OnnxPart:
    """One exported graph.

    Attributes:
        part: name of the part.
        dtype: ``fp32``, ``fp16`` or ``bf16``.
        path: the .onnx file.
        opset: standard operator set.
        ops: number of nodes of each ``zoo`` op.
        nodes: number of nodes in all.
        size: bytes, external data included.
        external_data: whether the weights lie in <path>.data.
        seconds: that the export took.
        up_to_date: whether it was there already and nothing was done.
    """

    part: str
    dtype: str
    path: Path
    opset: int
    ops: dict[str, int]
    nodes: int
    size: int
    external_data: bool
    seconds: float
    up_to_date: bool = False


def export_part(part: Part, path: Path | str, *, dtype: str, opset: int = DEFAULT_OPSET) -> OnnxPart:
    """Write one part as ONNX.

    Args:
        part: its module is not changed; dropout and the like are switched off in the graph.
        path: of the .onnx file; it is replaced whole or, on failure, left alone.
        dtype: ``fp32``, ``fp16`` or ``bf16``, of weights and of floating inputs and outputs.
        opset: ONNX operator set.

    Raises:
        ConfigError: an unknown dtype.
        ExportError: the module cannot be exported, naming the submodule and why, or the graph is not what the
            signature says.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    started = time.perf_counter()
    path = Path(path)
    module = converted(part.module, DTYPES[dtype])
    sizes = _example_sizes(part)
    inputs = tuple(_example(spec, sizes, DTYPES[dtype]) for spec in part.signature.inputs)
    calls = _op_calls(part, module, inputs)

    model, used = _onnx_model(part, module, inputs, sizes, opset)
    _attach_bodies(part.name, model, opset)
    label_initializers(model, {name: value for name, value in module.state_dict().items() if name in used})
    _tidy(part.name, model)
    external = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value) > LIMIT
    nodes = Counter(node.op_type for node in model.graph if node.domain == DOMAIN)
    if nodes != calls:
        raise ExportError(
            f"{part.name}: the graph has {dict(nodes)} nodes of domain {DOMAIN!r}, but the module calls {dict(calls)}; "
            "an op was dropped or merged on the way to ONNX"
        )
    size = _write(model, path, external=external, check=lambda file: _check_file(part, file, dtype))
    total = sum(1 for _ in model.graph)
    return OnnxPart(
        part.name, dtype, path, opset, dict(nodes), total, size, external, round(time.perf_counter() - started, 2)
    )


def floating_dtype(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a floating tensor of a part that runs in ``dtype``: states stay in float32 or rise above."""
    return torch.promote_types(dtype, torch.float32) if spec.dtype == "fp32" else dtype


def data_path(path: Path) -> Path:
    """Return where the weights of a large graph lie: beside it."""
    return path.with_name(path.name + ".data")


def converted(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in evaluation mode with floating tensors in ``dtype``; tensors that need no change are shared."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = parameter.detach()
        memo[id(parameter)] = nn.Parameter(value.to(dtype) if value.is_floating_point() else value, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to(dtype) if buffer.is_floating_point() else buffer
    return copy.deepcopy(module, memo).eval()


def _example_sizes(part: Part) -> dict[str, int]:
    """Return a size for each symbol, distinct and unlike any fixed size, so that a confusion of the two shows."""
    specs = (*part.signature.inputs, *part.signature.outputs)
    symbols = dict.fromkeys(dim for spec in part.signature.inputs for dim in spec.shape if isinstance(dim, str))
    taken = {dim for spec in specs for dim in spec.shape} | {dim for p in part.module.parameters() for dim in p.shape}
    free = (size for size in count(_SMALLEST_EXAMPLE, 2) if size not in taken)
    return {symbol: next(free) for symbol in symbols}


def _example(spec: TensorSpec, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
    """Return a valid input: small random floats, or ones where integers are wanted (zero where one is out of range)."""
    shape = spec.resolved_shape(sizes)
    if spec.dtype in FLOATING:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(floating_dtype(spec, dtype))
    return torch.full(shape, 0 if spec.limit == 1 else 1, dtype=getattr(torch, spec.dtype))


class _CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = {getattr(torch.ops.zoo, spec.torch_name).default: spec.name for spec in OPS.values()}
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ops:
            self.calls[self.ops[func]] += 1
        return func(*args, **(kwargs or {}))


def _op_calls(part: Part, module: nn.Module, inputs: tuple[Tensor, ...]) -> Counter[str]:
    """Run the module once and return how often it calls each custom op."""
    try:
        with torch.no_grad(), _CountCalls() as counter:
            outputs = module(*inputs)
    except Exception as error:
        shapes = ", ".join(str(list(value.shape)) for value in inputs)
        raise ExportError(f"{part.name} does not run in PyTorch on inputs of shapes {shapes}: {error}") from error
    given, wanted = len(outputs) if isinstance(outputs, tuple) else 1, len(part.signature.outputs)
    if given != wanted:
        raise ExportError(f"{part.name} returns {given} tensors, but its signature names {wanted}")
    return counter.calls


def _onnx_model(
    part: Part, module: nn.Module, inputs: tuple[Tensor, ...], sizes: Mapping[str, int], opset: int
) -> tuple[ir.Model, set[str]]:
    """Return the model and the names of the weights that it reads."""
    dims = {symbol: torch.export.Dim(symbol, min=1) for symbol in sizes}
    shapes = tuple(
        {i: dims[dim] for i, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in part.signature.inputs
    )
    try:
        return to_onnx(module, inputs, shapes, opset, part.signature)
    except Exception as error:
        reason = explain_failure(
            module, inputs, sizes.values(), error, lambda child, args, dynamic: to_onnx(child, args, dynamic, opset)
        )
        raise ExportError(f"{part.name} cannot be exported: {reason}") from error


def to_onnx(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Any,
    opset: int,
    signature: Signature | None = None,
) -> tuple[ir.Model, set[str]]:
    """Capture a module and translate it; return the ONNX model and the names of the weights that it reads."""
    register_schemas()
    with quiet(), torch.no_grad():
        captured = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        program = torch.onnx.export(
            captured,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dynamic_shapes,
            input_names=[spec.name for spec in signature.inputs] if signature else None,
            output_names=[spec.name for spec in signature.outputs] if signature else None,
            custom_translation_table=translation_table(),
            verbose=False,
        )
    assert program is not None
    readers = {node.name for node in captured.graph.nodes if node.op == "placeholder" and node.users}
    origins = {**captured.graph_signature.inputs_to_parameters, **captured.graph_signature.inputs_to_buffers}
    return program.model, {name for placeholder, name in origins.items() if placeholder in readers}


def _attach_bodies(part: str, model: ir.Model, opset: int) -> None:
    """Give the model a function for every custom op in it."""
    structures: dict[str, dict[str, Any]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        spec = OPS[node.op_type]
        structure = structural_attributes(spec, {name: attribute.value for name, attribute in node.attributes.items()})
        if structures.setdefault(spec.name, structure) != structure:
            raise ExportError(
                f"{part}: {spec.name} is used with {structures[spec.name]} and with {structure} in one graph, "
                "but a graph has one function body for each op; put the layers in two parts"
            )
    for name, structure in structures.items():
        function = ir.serde.deserialize_function(function_body(OPS[name], structure, opset))
        model.functions[function.identifier()] = function


def _tidy(name: str, model: ir.Model) -> None:
    """Name the graph and drop the exporter's notes, which hold source paths of this machine."""
    model.producer_name, model.producer_version = "trt-zoo", __version__
    model.graph.name = name
    for node in model.graph:
        node.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()


def _write(model: ir.Model, path: Path, *, external: bool, check: Callable[[Path], None]) -> int:
    """Write beside ``path``, check, rename; return the bytes written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{path.name}.", ".partial"
    for left_by_a_killed_export in path.parent.glob(f"{prefix}*{suffix}"):
        shutil.rmtree(left_by_a_killed_export, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, suffix=suffix, dir=path.parent) as folder:
        file = Path(folder) / path.name
        ir.save(model, file, external_data=data_path(path).name if external else None)
        check(file)
        size = file.stat().st_size
        # The old graph goes first, so that a kill in between never leaves it with the new graph's weights.
        if external or data_path(path).exists():
            path.unlink(missing_ok=True)
        if external:
            size += data_path(file).stat().st_size
            with files.replacing(data_path(path)) as temporary:
                data_path(file).replace(temporary)
        else:
            data_path(path).unlink(missing_ok=True)
        with files.replacing(path) as temporary:
            file.replace(temporary)
    return size


def _check_file(part: Part, path: Path, dtype: str) -> None:
    """Check the file as onnx does, and its inputs and outputs against the signature."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"{part.name}: onnx.checker rejects the exported graph: {error}") from error
    graph = onnx.load(path, load_external_data=False).graph
    for kind, values, specs in (
        ("input", graph.input, part.signature.inputs),
        ("output", graph.output, part.signature.outputs),
    ):
        names, wanted = [value.name for value in values], [spec.name for spec in specs]
        if names != wanted:
            raise ExportError(f"{part.name}: the graph's {kind}s are {names}, but the signature says {wanted}")
        for value, spec in zip(values, specs, strict=True):
            _check_tensor(part.name, kind, value.type.tensor_type, spec, dtype)


_ELEMENT_TYPES = {
    "fp32": onnx.TensorProto.FLOAT,
    "fp16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
}


def _check_tensor(part: str, kind: str, found: onnx.TypeProto.Tensor, spec: TensorSpec, dtype: str) -> None:
    shape = [dim.dim_param or dim.dim_value for dim in found.shape.dim]
    fixed = [want for want, dim in zip(spec.shape, shape, strict=False) if isinstance(want, str) and dim != want]
    if shape != list(spec.shape):
        why = f"dimension {fixed[0]!r} was specialised during export" if fixed else "the signature is wrong"
        raise ExportError(
            f"{part}: {kind} {spec.name} has shape {shape} in the graph, but {list(spec.shape)} is wanted; {why}"
        )
    wanted = dtype if spec.dtype == "float" else spec.dtype
    if found.elem_type != _ELEMENT_TYPES[wanted]:
        given = onnx.TensorProto.DataType.Name(found.elem_type)
        raise ExportError(f"{part}: {kind} {spec.name} is {given} in the graph, but {wanted} is wanted")
