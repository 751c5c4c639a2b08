"""Every verb of the command line as a Python function of the same name and arguments.

    from zoo import verbs
    dataset = verbs.data("ml-100k")
    bundle = verbs.train("gbla-tiny", data=dataset, out="bundles/tiny")
    verbs.export(bundle)
    verbs.build(bundle, lengths=(64, 128), targets=("sm89",))
    assert verbs.validate(bundle).ok

This module joins all stages, so it may import any of them and nothing imports it; each is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.bundle import SEMANTIC_IDS, WEIGHTS, Bundle
from zoo.errors import BundleError

if TYPE_CHECKING:
    from engines.build import EngineRecord
    from export.onnx_export import OnnxPart
    from validate.report import Report
    from zoo.data import Dataset
    from zoo.training.evaluate import EvalReport


@dataclass(frozen=True)
class PresetRow:
    """One line of ``zoo list``: parameters in all and by top-level module, without allocating any."""

    name: str
    model: str
    config: Mapping[str, Any]
    mixers: str
    parameters: Mapping[str, int]

    @property
    def total(self) -> int:
        """Parameters in all."""
        return self.parameters["total"]

    def megabytes(self, bytes_per_parameter: int) -> float:
        """Return the size of the weights in 10^6 bytes."""
        return self.total * bytes_per_parameter / 1e6


def list(*, twins: bool = False) -> tuple[PresetRow, ...]:  # named after its command-line verb
    """Return the presets of the zoo, and with ``twins`` each preset's comparison models too."""
    from zoo.models import presets

    rows = []
    for name, (model, config) in presets.PRESETS.items():
        variants: dict[str, Any] = {name: config}
        if twins:
            variants |= {f"{name}:{twin}": presets.resolve(name, twin=twin) for twin in presets.TWINS[model]}
        for label, variant in variants.items():
            fields = presets.config_to_json(variant)
            rows.append(PresetRow(label, model, fields, variant.mixers, presets.parameter_counts(variant)))
    return tuple(rows)


def data(source: Path | str, **settings: Any) -> Dataset:
    """Prepare a public or own data set: read, clean, split by time, give every item a semantic ID.

    Takes the arguments of ``zoo.data.prepare`` and raises what it raises.
    """
    from zoo.data import prepare

    return prepare(source, **settings)


def init(
    preset: str,
    out: Path | str,
    *,
    twin: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Bundle:
    """Write a bundle with random weights, to try export, build and parity at real sizes before training.

    Raises:
        ConfigError: no such preset, twin or field.
        BundleError: ``out`` already holds a bundle.
    """
    import torch
    from safetensors.torch import save_file

    from zoo import files
    from zoo.models import presets

    out = files.make_folder(out)
    if (out / "bundle.json").exists():
        raise BundleError(f"{out} already holds a bundle; choose another folder or remove it")
    config = presets.resolve(preset, twin=twin, overrides=overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = presets.build(config)
    signatures = {part.name: part.signature for part in model.parts()}
    bundle = Bundle.create(out, config=presets.config_to_json(config), signatures=signatures)
    with files.replacing(out / WEIGHTS) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary)
    bundle.update([WEIGHTS], preset=preset, twin=twin, training={"weights": "random", "seed": seed})
    return bundle


def train(preset: str, **settings: Any) -> Bundle:
    """Train a preset on a prepared data set into a bundle; resumes where a killed run stopped.

    Takes the arguments of ``zoo.training.train`` and raises what it raises.
    """
    from zoo.training import train as run

    return run(preset, **settings)


def eval(bundle: Bundle | Path | str, **settings: Any) -> EvalReport:  # named after its command-line verb
    """Rank the whole catalogue for every user and compare with two baselines.

    Takes the arguments of ``zoo.training.evaluate.evaluate`` and raises what it raises.
    """
    from zoo.training.evaluate import evaluate

    return evaluate(bundle, **settings)


def export(bundle: Bundle | Path | str, **settings: Any) -> Any:
    """Write one ONNX graph a part and dtype into the bundle.

    Takes the arguments of ``export.export`` and raises what it raises.
    """
    from export import export as run

    parts: tuple[OnnxPart, ...] = tuple(run(bundle, **settings))
    return parts


def build(bundle: Bundle | Path | str, **settings: Any) -> Any:
    """Build one TensorRT engine a part, length and target into the bundle; does nothing where nothing changed.

    Takes the arguments of ``engines.build`` and raises what it raises.
    """
    from engines.build import build as run

    records: tuple[EngineRecord, ...] = tuple(run(bundle, **settings))
    return records


def validate(bundle: Bundle | Path | str, **settings: Any) -> Report:
    """Check the exported graphs against the model and the engines against their manifests.

    Takes the arguments of ``validate.validate`` and raises what it raises.
    """
    from validate import validate as run

    return run(bundle, **settings)


def inspect(bundle: Bundle | Path | str, /, **settings: Any) -> dict[str, Any]:
    """Return what a bundle holds: configuration, signatures, files, and the manifest of each engine.

    A word in place of a bundle asks for something else: ``"kernels"`` for the implementation that each custom op takes,
    with the arguments of ``inspect_kernels``, ``"sink"`` for what the writes of a history do, with those of
    ``inspect_sink``. A bundle in a folder of such a name is ``"./kernels"`` or a ``Path``.
    """
    if bundle == "kernels":
        return inspect_kernels(**settings)
    if bundle == "sink":
        return inspect_sink(**settings)
    if settings:
        raise TypeError(f"inspecting a bundle takes no {', '.join(settings)}")
    from engines.manifest import load_manifest

    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    manifests = map(load_manifest, bundle.path.glob("engines/*/*/*.json"))
    ordered = sorted(manifests, key=lambda found: (found.part, found.dtype, found.length or 0, found.target))
    engines = [manifest.to_json() for manifest in ordered]
    return {"path": str(bundle.path), **bundle.manifest, "engines": engines, "semantic_ids": bundle.has(SEMANTIC_IDS)}


def inspect_kernels(
    preset: str = "gbla-yandex", *, device: str | None = None, capability: int | None = None
) -> dict[str, Any]:
    """Return which implementation each custom op takes at a preset's sizes, in each dtype, why, and how it launches.

    Args:
        preset: of the zoo.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...; default: the GPU if there is one, else the CPU.
        capability: answer for a GPU of this compute capability instead, 90 for 9.0; none need be here.

    Raises:
        ConfigError: no such preset, or no such device here.
    """
    import torch

    from zoo.kernels import choices
    from zoo.models import presets

    config = presets.resolve(preset)
    sizes = choices.OpSizes(config.d_model, config.conv_width, config.head_dim)
    found = choices.choices(sizes, device=device, capability=capability)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "preset": preset,
        "sizes": asdict(sizes),
        "device": (device or here) if capability is None else f"a GPU of compute capability {capability / 10:.1f}",
        "ops": [asdict(choice) for choice in found],
    }


def inspect_sink(bundle: Bundle | Path | str, **settings: Any) -> dict[str, Any]:
    """Measure and draw what the writes of one user's history do to a SinkRec's readouts, and to another model's.

    Takes the arguments of ``zoo.sink_view.inspect_sink``, raises what it raises, and returns the JSON form of its
    report.
    """
    from zoo.sink_view import inspect_sink as run

    return run(bundle, **settings).to_json()


def demo(model: str = "gbla", **settings: Any) -> dict[str, Any]:
    """Run the whole path on MovieLens-100K: data, training, evaluation, export, engines, parity.

    Takes the arguments of ``zoo.demo.demo`` and raises what it raises.
    """
    from zoo.demo import demo as run

    return run(model, **settings)
