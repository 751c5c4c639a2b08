"""``validate``: every check of a bundle that this machine can make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from engines.manifest import check_manifest, load_manifest
from export.onnx_export import DTYPES
from export.weights import compare_weights
from validate.executors import Executor, OrtExecutor, TorchExecutor
from validate.parity import check_parity, sentence
from validate.report import Check, Report
from zoo import files
from zoo.bundle import Bundle, tool_versions
from zoo.errors import BundleError, ConfigError
from zoo.models.loading import load_model
from zoo.models.parts import Part

REPORT = "reports/parity.json"
_DEFAULT_LONGEST = 256
_NO_BF16 = "ONNX Runtime has no bfloat16 MatMul on the CPU"


def validate(
    bundle: Bundle | Path | str,
    *,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Check that the exported graphs compute what the model computes and that the engines are what they claim.

    For each part, dtype and length: PyTorch in float64 against the exported file, run through the function bodies of
    the custom ops, under the tolerance rule of ``validate.tolerance``. For each exported file: its weights against the
    checkpoint, bit by bit. For each engine: file, checksums, inputs and outputs, plugin layers.

    Args:
        bundle: with an export; engines are checked where there are any.
        lengths: history lengths to try; by default 1, an odd one, and the longest engine (or 256).
        dtypes: of the exported graphs; by default all that the bundle holds.
        seed: draws the inputs.
        progress: called with a phrase, checks done and checks in all.

    Returns:
        The report, which is also written to reports/parity.json in the bundle.

    Raises:
        BundleError: nothing is exported, or the bundle is damaged.
        ConfigError: a length or dtype that makes no sense.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    started = time.perf_counter()
    exported = bundle.manifest.get("export")
    if not exported:
        raise BundleError(f"{bundle.path} has no exported graphs; run `zoo export {bundle.path}` first")
    dtypes = _chosen_dtypes(exported["dtypes"], dtypes)
    manifests = _manifests(bundle)
    lengths = _chosen_lengths(lengths, manifests)
    parts = load_model(bundle).parts()
    total = len(dtypes) * len(parts) * (1 + len(lengths)) + len(manifests)

    checks = [*_check_files(bundle), *_check_parts(bundle, parts)]
    for phrase, found in _all_checks(bundle, parts, dtypes, lengths, manifests, seed):
        checks += found
        if progress is not None:
            progress(phrase, min(len(checks), total), total)

    not_run = ["engines were not executed: this machine has no CUDA device"] if manifests else []
    if "bf16" in dtypes:
        not_run.append(f"bf16 graphs ran in float32, rounded to bf16 after every node: {_NO_BF16}")
    report = Report(str(bundle.path), tuple(checks), tuple(not_run), tool_versions(), time.perf_counter() - started)
    files.write_json(bundle.path / REPORT, report.to_json())
    return report


def _all_checks(
    bundle: Bundle,
    parts: Sequence[Part],
    dtypes: Sequence[str],
    lengths: Sequence[int],
    manifests: list[Path],
    seed: int,
) -> Iterator[tuple[str, list[Check]]]:
    exact = {part.name: TorchExecutor(part, torch.float64) for part in parts}
    for dtype in dtypes:
        executors: dict[str, Executor] = {}
        low = {part.name: TorchExecutor(part, DTYPES[dtype]) for part in parts}
        for part in parts:
            name = f"onnx/{part.name}-{dtype}.onnx"
            phrase = f"{part.name} {dtype}"
            try:
                path = bundle.file(name)
                executors[part.name] = OrtExecutor(path, part.signature, dtype)
            except Exception as error:  # a damaged graph may fail in any way; the report must name it and go on
                yield phrase, [Check("file", part.name, dtype, name, False, sentence(error))]
                continue
            yield phrase, [_check_weights(path, name, part, dtype)]
        for length in lengths:
            found = list(check_parity(parts, exact, low, executors, dtype, length, seed))
            yield f"{dtype}, length {length}", found
    for path in manifests:
        yield path.stem, [_check_engine(bundle, path)]


def _manifests(bundle: Bundle) -> list[Path]:
    """Return where the manifest of every engine is or should be: an engine without one fails its check."""
    found = bundle.path.glob("engines/*/*/*")
    return sorted({path.with_suffix(".json") for path in found if path.suffix in (".json", ".engine")})


def _check_files(bundle: Bundle) -> Iterator[Check]:
    """Check the recorded files that no other check reads: weights, semantic IDs, reports of earlier stages."""
    for name in bundle.manifest["files"]:
        if not name.startswith("onnx/"):
            try:
                bundle.file(name)
            except BundleError as error:
                yield Check("file", "bundle", "", name, False, str(error))


def _check_parts(bundle: Bundle, parts: Sequence[Part]) -> Iterator[Check]:
    if {part.name: part.signature for part in parts} != bundle.signatures:
        detail = "the parts or signatures in bundle.json are not those of the model; make the bundle again"
        yield Check("file", "bundle", "", "bundle.json", False, detail)


def _check_weights(path: Path, name: str, part: Part, dtype: str) -> Check:
    problems = compare_weights(path, part.module.state_dict(), dtype)
    detail = "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
    return Check("weights", part.name, dtype, name, not problems, detail)


def _check_engine(bundle: Bundle, path: Path) -> Check:
    subject = str(path.relative_to(bundle.path).with_suffix(".engine"))
    problems = check_manifest(bundle, path)
    part, dtype = "?", "?"
    try:
        manifest = load_manifest(path)
        part, dtype = manifest.part, manifest.dtype
    except BundleError:
        pass  # check_manifest has said so
    return Check("engine", part, dtype, subject, not problems, "; ".join(problems))


def _chosen_dtypes(available: Sequence[str], wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is not None and (isinstance(wanted, str) or not wanted):
        raise ConfigError(f"dtypes is {wanted!r}; give one or more of {', '.join(available)} as a tuple")
    for dtype in wanted or ():
        if dtype not in available:
            raise ConfigError(f"the bundle has no {dtype} graphs; it has {', '.join(available)}")
    return tuple(wanted or available)


def _chosen_lengths(wanted: Sequence[int] | None, manifests: Sequence[Path]) -> tuple[int, ...]:
    if wanted is not None:
        if isinstance(wanted, int) or not wanted or any(not isinstance(length, int) for length in wanted):
            raise ConfigError(f"lengths is {wanted!r}; give one or more whole numbers as a tuple")
        if min(wanted) < 1:
            raise ConfigError(f"a length of {min(wanted)} was asked for; lengths start at 1")
        return tuple(sorted(set(wanted)))
    built = []
    for path in manifests:
        try:
            built.append(load_manifest(path).length)
        except BundleError:
            continue  # reported by its own check
    longest = max((length for length in built if length is not None), default=_DEFAULT_LONGEST)
    return tuple(sorted({1, longest // 3 | 1, longest}))
