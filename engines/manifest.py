"""The manifest beside each engine: what the engine is, told without TensorRT, and whether the file still is that."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.graph import read_graph
from engines.profile import EXTENTS, Sizes, check_sizes
from zoo import files
from zoo.bundle import Bundle
from zoo.errors import BundleError, ConfigError, ZooError
from zoo.plugins import DOMAIN, OPS
from zoo.signature import Signature, TensorSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine, with its smallest, usual and largest shape."""

    name: str
    dtype: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class EnginePlugin:
    """A plugin that the engine needs when it is loaded, and the number of its layers."""

    name: str
    version: str
    namespace: str
    count: int


@dataclass(frozen=True)
class EngineManifest:
    """What an engine is.

    Attributes:
        schema_version: of this file.
        zoo_version: that built it.
        flavor, version: of TensorRT; an engine runs with that version only.
        target: compute capability that it was built for, such as ``"sm89"``.
        part, dtype, length: which graph, and the history length that it takes; None if its part has none.
        batch: smallest, usual and largest batch.
        beams: most candidates a row.
        inputs, outputs: in order.
        plugins: the ops that must be registered before the engine is loaded.
        onnx, onnx_sha256, opset: the graph that it was built from.
        builder: settings of the TensorRT builder.
        build_seconds: parse and build.
        engine_size, engine_sha256: of the file.
    """

    schema_version: int
    zoo_version: str
    flavor: str
    version: str
    target: str
    part: str
    dtype: str
    length: int | None
    batch: tuple[int, int, int]
    beams: int
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    plugins: tuple[EnginePlugin, ...]
    onnx: str
    onnx_sha256: str
    opset: int
    builder: dict[str, Any]
    build_seconds: float
    engine_size: int
    engine_sha256: str

    @property
    def sizes(self) -> Sizes:
        """The sizes that the engine serves."""
        return Sizes(self.length, self.batch, self.beams)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EngineManifest:
        """Read what ``to_json`` wrote; raises KeyError, TypeError or ValueError on anything else."""
        tensors = {
            kind: tuple(
                EngineTensor(entry["name"], entry["dtype"], *(tuple(entry[extent]) for extent in EXTENTS))
                for entry in value[kind]
            )
            for kind in ("inputs", "outputs")
        }
        plugins = tuple(EnginePlugin(**entry) for entry in value["plugins"])
        manifest = cls(**{**value, **tensors, "plugins": plugins, "batch": tuple(value["batch"])})
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        for name in ("flavor", "version", "target", "part", "dtype", "onnx", "onnx_sha256", "engine_sha256"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}, no text")
        try:
            check_sizes([1 if self.length is None else self.length], self.batch, self.beams)
        except ConfigError as error:
            raise ValueError(str(error)) from error


def load_manifest(path: Path | str) -> EngineManifest:
    """Read a manifest.

    Raises:
        BundleError: missing, damaged or of another schema version.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text())
        if value["schema_version"] != SCHEMA_VERSION:
            raise BundleError(
                f"{path} has schema version {value['schema_version']}; this version reads {SCHEMA_VERSION}; build again"
            )
        return EngineManifest.from_json(value)
    except FileNotFoundError as error:
        raise BundleError(f"there is no {path}; build the engine with `zoo build`") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} is damaged ({type(error).__name__}: {error}); build again") from error


def engine_tensors(specs: tuple[TensorSpec, ...], sizes: Sizes, dtype: str) -> tuple[EngineTensor, ...]:
    """Return what a signature becomes in an engine of these sizes and dtype."""
    return tuple(
        EngineTensor(spec.name, dtype if spec.dtype == "float" else spec.dtype, **sizes.shapes(spec)) for spec in specs
    )


def engine_plugins(counts: Mapping[str, int]) -> tuple[EnginePlugin, ...]:
    """Return the plugins of an engine from the number of layers of each op."""
    return tuple(EnginePlugin(op, str(OPS[op].version), DOMAIN, count) for op, count in sorted(counts.items()))


def check_manifest(bundle: Bundle, path: Path | str) -> list[str]:
    """Return what is wrong with an engine and its manifest, in sentences; empty when nothing is.

    Checked: the file against its size and checksum; the graph that it was built from against the present one; inputs,
    outputs and sizes against the bundle's signature; plugin layers against the ``zoo`` nodes of the graph, once as the
    manifest records them and once as the engine's own bytes do. The engine is not loaded, so no GPU is needed.
    """
    path = Path(path)
    try:
        manifest = load_manifest(path)
    except BundleError as error:
        return [str(error)]
    engine = path.with_suffix(".engine")
    problems = _check_file(engine, manifest)
    intact = not problems
    problems += _check_place(path, manifest)
    signature = bundle.signatures.get(manifest.part)
    if signature is None:
        return [*problems, f"{path.name}: the bundle has no part {manifest.part!r}"]
    problems += _check_tensors(path, manifest, signature)
    try:
        graph = read_graph(bundle.file(manifest.onnx))
    except ZooError as error:
        return [*problems, str(error)]
    except Exception as error:  # protobuf raises its own errors on a damaged file
        return [*problems, f"{manifest.onnx} does not read as ONNX ({error}); export again"]
    recorded_sha256 = bundle.manifest["files"][manifest.onnx]["sha256"]
    if recorded_sha256 != manifest.onnx_sha256:
        problems.append(f"{engine.name} is stale: {manifest.onnx} has changed since it was built; build again")
    if manifest.plugins != engine_plugins(graph.plugins):
        recorded = {plugin.name: plugin.count for plugin in manifest.plugins}
        problems.append(
            f"{path.name} records the plugin layers {recorded}, but {manifest.onnx} has the nodes {graph.plugins}"
        )
    if intact and manifest.flavor == "rtx":
        problems += _check_plugin_bytes(engine, graph.plugins)
    return problems


def plugins_in_engine(path: Path) -> dict[str, int]:
    """Return the number of plugin layers of each op as the serialized engine itself says.

    TensorRT-RTX 1.7 writes, for every plugin layer, the strings name, version and namespace one after the other, each
    after its length in 8 bytes and a tag. A node that became its function body leaves no such record, whatever its
    layers are called. Measured, not documented: other versions may write it otherwise.
    """
    found = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for op, spec in OPS.items():
            name, version, namespace = (_counted_string(text) for text in (op, str(spec.version), DOMAIN))
            rest = re.compile(b"".join((b".{0,32}?", re.escape(version), b".{0,32}?", re.escape(namespace))), re.DOTALL)
            count, position = 0, data.find(name)
            while position >= 0:
                end = position + len(name)
                count += rest.match(data[end : end + 128]) is not None
                position = data.find(name, end)
            if count:
                found[op] = count
    return found


def _counted_string(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def _check_file(engine: Path, manifest: EngineManifest) -> list[str]:
    if not engine.is_file():
        return [f"{engine.name} is missing; build again"]
    size = engine.stat().st_size
    if size != manifest.engine_size:
        return [f"{engine.name} has {size} bytes, but {manifest.engine_size} were written; build again"]
    if files.sha256_of(engine) != manifest.engine_sha256:
        return [f"{engine.name} is damaged: its checksum is not the one that was written; build again"]
    return []


def _check_place(path: Path, manifest: EngineManifest) -> list[str]:
    wanted = engine_path(
        manifest.flavor, manifest.version, manifest.target, manifest.part, manifest.dtype, manifest.sizes
    )
    found = Path(*path.resolve().parts[-4:]).with_suffix(".engine")
    return [] if found == wanted else [f"{found} holds the manifest of {wanted}"]


def engine_path(flavor: str, version: str, target: str, part: str, dtype: str, sizes: Sizes) -> Path:
    """Return the place of an engine within a bundle."""
    return Path("engines", f"{flavor}-{version}", target, f"{part}-{dtype}{sizes.suffix}.engine")


def _check_tensors(path: Path, manifest: EngineManifest, signature: Signature) -> list[str]:
    problems = []
    for kind, specs, found in (
        ("inputs", signature.inputs, manifest.inputs),
        ("outputs", signature.outputs, manifest.outputs),
    ):
        wanted = engine_tensors(specs, manifest.sizes, manifest.dtype)
        if [tensor.name for tensor in found] != [tensor.name for tensor in wanted]:
            names = [[tensor.name for tensor in tensors] for tensors in (found, wanted)]
            problems.append(f"{path.name} has the {kind} {names[0]}, but the bundle says {names[1]}")
            continue
        problems += [
            f"{path.name}: {kind[:-1]} {got.name} is {_described(got)}, but the bundle says {_described(want)}"
            for got, want in zip(found, wanted, strict=True)
            if got != want
        ]
    return problems


def _described(tensor: EngineTensor) -> str:
    return f"{tensor.dtype} {list(tensor.min)} to {list(tensor.max)}"


def _check_plugin_bytes(engine: Path, wanted: Mapping[str, int]) -> list[str]:
    found = plugins_in_engine(engine)
    if found == wanted:
        return []
    return [f"{engine.name} holds the plugin layers {found}, but its graph has the nodes {dict(wanted)}; build again"]
