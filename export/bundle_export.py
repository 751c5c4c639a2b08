"""All parts of a bundle's model, in every dtype, to ONNX files in the bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from export.onnx_export import DEFAULT_OPSET, DTYPES, OnnxPart, data_path, export_part
from zoo import __version__, files
from zoo.bundle import WEIGHTS, Bundle, tool_versions
from zoo.errors import BundleError, ConfigError
from zoo.models.loading import load_model
from zoo.models.parts import Part
from zoo.plugins.spec import OPS

OPSETS = range(18, 26)
"""Operator sets that export and match in ONNX Runtime."""

_TOOLS = ("torch", "onnx", "onnxscript")
"""Packages whose version an exported graph depends on."""


def export(
    bundle: Bundle | Path | str,
    *,
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16"),
    opset: int = DEFAULT_OPSET,
    parts: Sequence[str] | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[OnnxPart]:
    """Write ``onnx/<part>-<dtype>.onnx`` for every part and dtype, and record them in the bundle.

    A file that is there, unchanged, and was made from the same weights with the same settings and tools is kept. Files
    of an earlier export that no longer fit the weights are dropped from the bundle's ``export`` section.

    Args:
        bundle: with weights.
        dtypes: ``fp32``, ``fp16`` and ``bf16``, or some of them.
        opset: ONNX operator set.
        parts: names of parts; all by default.
        force: export again even where nothing changed.
        progress: called with a phrase, files done and files in all.

    Returns:
        One OnnxPart per file, in order of dtype and part.

    Raises:
        BundleError: no bundle, or weights that are missing, damaged or of another configuration.
        ConfigError: an unknown dtype or part, or an opset that the exporter does not write.
        BusyError: another process exports into the bundle.
        ExportError: a part cannot be exported; the message names the submodule and why.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    if isinstance(dtypes, str) or not dtypes:
        raise ConfigError(f"dtypes is {dtypes!r}; give one or more of {', '.join(DTYPES)}, as a tuple")
    if isinstance(parts, str) or (parts is not None and not parts):
        raise ConfigError(f"parts is {parts!r}; give one or more names as a tuple, or leave it out for all")
    if opset not in OPSETS:
        raise ConfigError(f"opset is {opset!r}; the exporter writes opsets {OPSETS.start} to {OPSETS.stop - 1}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; choose among {', '.join(DTYPES)}")
    names = list(bundle.signatures)
    for name in parts or ():
        if name not in names:
            raise ConfigError(f"{bundle.path} has no part {name!r}; it has {', '.join(names)}")
    wanted = [(name, dtype) for dtype in dict.fromkeys(dtypes) for name in names if not parts or name in parts]
    with files.one_writer(bundle.path, lock=".export.lock"):
        bundle.reload()
        return _export_all(bundle, wanted, opset, force, progress)


def _export_all(
    bundle: Bundle,
    wanted: Sequence[tuple[str, str]],
    opset: int,
    force: bool,
    progress: Callable[[str, int, int], None] | None,
) -> list[OnnxPart]:
    bundle.file(WEIGHTS)
    origin = _origin(bundle, opset)
    model_parts: dict[str, Part] = {}
    exported: list[OnnxPart] = []
    for done, (name, dtype) in enumerate(wanted):
        if progress is not None:
            progress(f"{name} {dtype}", done, len(wanted))
        found = None if force else _up_to_date(bundle, name, dtype, origin)
        if found is None:
            if not model_parts:
                model_parts = _checked_parts(bundle)
            found = export_part(model_parts[name], bundle.path / _file(name, dtype), dtype=dtype, opset=opset)
            _record(bundle, found, origin)
        exported.append(found)
    if progress is not None:
        progress("exported", len(wanted), len(wanted))
    return exported


def _file(part: str, dtype: str) -> str:
    return f"onnx/{part}-{dtype}.onnx"


def _origin(bundle: Bundle, opset: int) -> dict[str, Any]:
    """Return everything that an exported file depends on."""
    versions = tool_versions()
    return {
        "weights": bundle.manifest["files"][WEIGHTS]["sha256"],
        "config": bundle.config,
        "opset": opset,
        "ops": {spec.name: spec.version for spec in OPS.values()},
        "tools": {name: versions[name] for name in _TOOLS if name in versions},
        "zoo_version": __version__,
    }


def _checked_parts(bundle: Bundle) -> dict[str, Part]:
    parts = {part.name: part for part in load_model(bundle).parts()}
    if {name: part.signature for name, part in parts.items()} != bundle.signatures:
        raise BundleError(f"the parts or signatures in {bundle.path} are not those of this version; make it again")
    return parts


def _up_to_date(bundle: Bundle, part: str, dtype: str, origin: dict[str, Any]) -> OnnxPart | None:
    """Return the recorded file if it is there, unchanged, and of the same origin."""
    record = bundle.manifest.get("export", {}).get("parts", {}).get(f"{part}-{dtype}")
    if record is None or record.get("made_from") != origin:
        return None
    name = _file(part, dtype)
    try:
        path = bundle.file(name)
        if record["external_data"]:
            bundle.file(name + ".data")
    except BundleError:
        return None
    return OnnxPart(
        part=part,
        dtype=dtype,
        path=path,
        opset=record["opset"],
        ops=record["ops"],
        nodes=record["nodes"],
        size=record["bytes"],
        external_data=record["external_data"],
        seconds=record["seconds"],
        up_to_date=True,
    )


def _record(bundle: Bundle, exported: OnnxPart, origin: dict[str, Any]) -> None:
    """Add a file to the bundle; entries of another origin leave the export section, for they no longer belong."""
    earlier = bundle.manifest.get("export", {}).get("parts", {})
    parts = {name: record for name, record in earlier.items() if record.get("made_from") == origin}
    parts[f"{exported.part}-{exported.dtype}"] = {
        "part": exported.part,
        "dtype": exported.dtype,
        "opset": exported.opset,
        "ops": exported.ops,
        "nodes": exported.nodes,
        "bytes": exported.size,
        "external_data": exported.external_data,
        "seconds": exported.seconds,
        "made_from": origin,
    }
    present = {record["dtype"] for record in parts.values()}
    name = _file(exported.part, exported.dtype)
    bundle.update(
        [name, *([data_path(Path(name)).as_posix()] if exported.external_data else [])],
        export={
            "opset": exported.opset,
            "dtypes": [dtype for dtype in DTYPES if dtype in present],
            "ops": {op: OPS[op].version for record in parts.values() for op in record["ops"]},
            "parts": parts,
        },
    )
