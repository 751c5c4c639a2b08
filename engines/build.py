"""``build``: one TensorRT engine a part, length and target, from the exported graphs of a bundle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.compile import BUILDER_SETTINGS, DTYPES, CompiledEngine, compile_engine
from engines.flavors import Flavor
from engines.flavors import flavor as flavor_named
from engines.graph import GraphFacts, read_graph
from engines.manifest import (
    SCHEMA_VERSION,
    EngineManifest,
    engine_path,
    engine_plugins,
    engine_tensors,
    load_manifest,
)
from engines.profile import Sizes, check_sizes
from zoo import __version__, files
from zoo.bundle import Bundle
from zoo.errors import BundleError, ConfigError
from zoo.signature import Signature

BUILT, UP_TO_DATE = "built", "up to date"
"""The statuses of a record."""

_ABANDONED_SECONDS = 600
"""A partial file this old belongs to a build that was killed: writing one takes seconds."""


@dataclass(frozen=True)
class EngineRecord:
    """One engine of a bundle after a build.

    Attributes:
        path: of the engine; its manifest lies beside it as .json.
        manifest: what it is.
        status: ``"built"`` or ``"up to date"``.
    """

    path: Path
    manifest: EngineManifest
    status: str

    @property
    def seconds(self) -> float:
        """Seconds that its build took, now or when it was built."""
        return self.manifest.build_seconds

    @property
    def size(self) -> int:
        """Bytes of the engine file."""
        return self.manifest.engine_size

    def to_json(self) -> dict[str, Any]:
        """Return the manifest with path and status."""
        return {**self.manifest.to_json(), "path": str(self.path), "status": self.status}


@dataclass(frozen=True)
class _Job:
    """One engine to build, and everything that its manifest will say before it is built."""

    flavor: Flavor
    target: str
    part: str
    dtype: str
    sizes: Sizes
    signature: Signature
    onnx: str
    onnx_path: Path
    onnx_sha256: str
    graph: GraphFacts

    def manifest(self, *, seconds: float, size: int, sha256: str) -> EngineManifest:
        return EngineManifest(
            schema_version=SCHEMA_VERSION,
            zoo_version=__version__,
            flavor=self.flavor.name,
            version=self.flavor.version,
            target=self.target,
            part=self.part,
            dtype=self.dtype,
            length=self.sizes.length,
            batch=self.sizes.batch,
            beams=self.sizes.beams,
            inputs=engine_tensors(self.signature.inputs, self.sizes, self.dtype),
            outputs=engine_tensors(self.signature.outputs, self.sizes, self.dtype),
            plugins=engine_plugins(self.graph.plugins),
            onnx=self.onnx,
            onnx_sha256=self.onnx_sha256,
            opset=self.graph.opset,
            builder=dict(BUILDER_SETTINGS),
            build_seconds=seconds,
            engine_size=size,
            engine_sha256=sha256,
        )


def build(
    bundle: Bundle | Path | str,
    *,
    flavor: str = "rtx",
    lengths: Sequence[int] = (64, 128, 256),
    batch: Sequence[int] = (1, 8, 32),
    beams: int = 50,
    targets: Sequence[str] | None = None,
    dtype: str = "fp16",
    parts: Sequence[str] | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[EngineRecord]:
    """Build one engine a part, length and target, with a plugin layer for every custom op.

    A part that no history goes into, such as SinkRec's step of one event, has one engine for all lengths.

    Engines whose graph, settings and versions have not changed, and whose files are whole, are left as they are.

    Args:
        bundle: with graphs exported in ``dtype``.
        flavor: ``"rtx"``, which needs no GPU, or ``"tensorrt"``, which builds on and for the GPU that is here.
        lengths: history lengths; each engine takes exactly one.
        batch: smallest, usual and largest batch.
        beams: most candidates a row that the decoder scores.
        targets: compute capabilities such as ``"sm89"``; by default sm89 and sm120 (rtx), the present GPU (tensorrt).
        dtype: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        parts: of the model; by default all.
        force: build what is up to date, too.
        progress: called with a phrase, engines done and engines in all.

    Returns:
        One record an engine, in the order part, length, target.

    Raises:
        ConfigError: a flavor, target, size, dtype or part that does not exist.
        MissingDependencyError: the flavor is not installed.
        BundleError: no bundle, nothing exported, or a graph that is not the one that bundle.json describes.
        EngineBuildError: TensorRT could not build an engine, or a custom op did not become a plugin layer.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    all_sizes = check_sizes(lengths, batch, beams)
    chosen = _chosen_parts(bundle, parts)
    for part in chosen:
        _check_exported(bundle, part, dtype)
    trt_flavor = flavor_named(flavor)
    chosen_targets = trt_flavor.check_targets(targets)

    records: list[EngineRecord] = []
    sizes_of = {part: tuple(dict.fromkeys(sizes.of(bundle.signatures[part]) for sizes in all_sizes)) for part in chosen}
    total = sum(map(len, sizes_of.values())) * len(chosen_targets)
    for part in chosen:
        onnx = f"onnx/{part}-{dtype}.onnx"
        onnx_path = _verified(bundle, onnx)
        graph = read_graph(onnx_path)
        for sizes in sizes_of[part]:
            for target in chosen_targets:
                if progress is not None:
                    progress(f"{part} {dtype}, {sizes}, {target}", len(records), total)
                onnx_sha256 = bundle.manifest["files"][onnx]["sha256"]
                signature = bundle.signatures[part]
                job = _Job(trt_flavor, target, part, dtype, sizes, signature, onnx, onnx_path, onnx_sha256, graph)
                records.append(_build_one(bundle, job, force=force))
    return records


def _chosen_parts(bundle: Bundle, parts: Sequence[str] | None) -> tuple[str, ...]:
    known = tuple(bundle.signatures)
    if parts is None:
        return known
    for part in parts:
        if part not in known:
            raise ConfigError(f"the bundle has no part {part!r}; it has {', '.join(known)}")
    return tuple(part for part in known if part in parts)


def _check_exported(bundle: Bundle, part: str, dtype: str) -> None:
    if bundle.has(f"onnx/{part}-{dtype}.onnx"):
        return
    present = [other for other in DTYPES if bundle.has(f"onnx/{part}-{other}.onnx")]
    found = f"only in {', '.join(present)}" if present else "not at all"
    raise BundleError(
        f"{bundle.path}: part {part} is not exported in {dtype} ({found}); "
        f"run `zoo export {bundle.path} --dtypes {dtype}`"
    )


def _verified(bundle: Bundle, onnx: str) -> Path:
    """Return the path of a graph after checking it and the weights beside it."""
    path = bundle.file(onnx)
    if f"{onnx}.data" in bundle.manifest["files"]:
        bundle.file(f"{onnx}.data")
    return path


def _build_one(bundle: Bundle, job: _Job, *, force: bool) -> EngineRecord:
    path = bundle.path / engine_path(job.flavor.name, job.flavor.version, job.target, job.part, job.dtype, job.sizes)
    if not force:
        current = _current_manifest(path, job)
        if current is not None:
            return EngineRecord(path, current, UP_TO_DATE)
    _remove_abandoned(path)
    compiled = compile_engine(
        job.flavor, job.onnx_path, job.graph, job.signature, job.sizes, target=job.target, dtype=job.dtype
    )
    return EngineRecord(path, _write(path, job, compiled), BUILT)


def _current_manifest(path: Path, job: _Job) -> EngineManifest | None:
    """Return the manifest of the engine that lies there, if it is the one that the job would build."""
    try:
        found = load_manifest(path.with_suffix(".json"))
    except BundleError:
        return None
    wanted = job.manifest(seconds=found.build_seconds, size=found.engine_size, sha256=found.engine_sha256)
    if found != wanted or not path.is_file() or path.stat().st_size != found.engine_size:
        return None
    return found if files.sha256_of(path) == found.engine_sha256 else None


def _write(path: Path, job: _Job, compiled: CompiledEngine) -> EngineManifest:
    """Write the engine, then its manifest, each whole or not at all.

    Killed between the two, the old manifest does not describe the new engine, so the next build builds it again.
    """
    data = memoryview(compiled.data)
    files.write_bytes(path, data)
    manifest = job.manifest(seconds=round(compiled.seconds, 3), size=data.nbytes, sha256=files.sha256_of(path))
    files.write_json(path.with_suffix(".json"), manifest.to_json())
    return manifest


def _remove_abandoned(path: Path) -> None:
    for partial in path.parent.glob(f".{path.stem}.*.partial"):
        if time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
            partial.unlink(missing_ok=True)
