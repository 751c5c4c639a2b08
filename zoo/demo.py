"""``zoo demo``: the whole path on MovieLens-100K, from raw events to engines proven equal to the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo import files, verbs
from zoo.bundle import tool_versions
from zoo.errors import ConfigError

PRESETS = {"gbla": "gbla-tiny", "sinkrec": "sinkrec-tiny"}
"""Model -> the preset that its demo trains."""
SUMMARY = "reports/demo.json"


def demo(
    model: str = "gbla",
    *,
    out: Path | str | None = None,
    lengths: Sequence[int] = (64, 128, 256),
    targets: Sequence[str] = ("sm89", "sm120"),
    seed: int = 0,
    steps: int | None = None,
    stage: Callable[[str], None] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run data, training, evaluation, export, engine builds and parity; resumes where an earlier call stopped.

    Args:
        model: ``gbla`` or ``sinkrec``.
        out: folder; the bundle is ``out/bundle``. Default: ``zoo-demo``, for another model ``zoo-demo-MODEL``.
        lengths: history lengths to build engines for.
        targets: GPUs to build for with TensorRT-RTX; none of them needs to be here.
        seed: of the training run.
        steps: training steps, if not the recipe's.
        stage: called with a sentence as each stage begins.
        progress: show the training progress bar.

    Returns:
        The summary that is also written to ``out/bundle/reports/demo.json``: figures, seconds by stage, paths.

    Raises:
        ConfigError: no such model.
        MissingDependencyError: TensorRT-RTX is not installed (checked first, before any work).
        ZooError: whatever a stage raises.
    """
    from engines.flavors import flavor

    if model not in PRESETS:
        raise ConfigError(f"there is no demo of {model!r}; there is one of {' and of '.join(PRESETS)}")
    flavor("rtx")
    preset = PRESETS[model]
    folder = Path(out if out is not None else "zoo-demo" if model == "gbla" else f"zoo-demo-{model}")
    bundle_path = folder / "bundle"
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str, sentence: str) -> Iterator[None]:
        if stage is not None:
            stage(sentence)
        started = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - started, 1)

    with timed("data", "MovieLens-100K: read, clean, split by time, semantic IDs"):
        dataset = verbs.data("ml-100k")
    with timed("train", f"train {preset}"):
        settings = {} if steps is None else {"steps": steps}
        bundle = verbs.train(preset, data=dataset, out=bundle_path, seed=seed, progress=progress, **settings)
    with timed("eval", "rank the whole catalogue for every user, beside two baselines"):
        quality = verbs.eval(bundle, data=dataset, progress=progress)
    with timed("export", "export the parts to ONNX in fp32, fp16 and bf16"):
        exported = verbs.export(bundle)
    with timed("build", f"build engines for lengths {', '.join(map(str, lengths))} on {', '.join(targets)}"):
        engines = verbs.build(bundle, lengths=tuple(lengths), targets=tuple(targets))
    with timed("validate", "compare the exported graphs with the model, check every engine"):
        report = verbs.validate(bundle)

    failed = [check for check in report.checks if not check.ok]
    summary = {
        "ok": report.ok,
        "preset": preset,
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "dataset": {"path": str(dataset.path), "users": dataset.num_users, "items": dataset.num_items},
        "quality": quality.to_json(),
        "exported": [{"part": part.part, "dtype": part.dtype, "bytes": part.size} for part in exported],
        "engines": [record.to_json() for record in engines],
        "parity": {
            "checks": len(report.checks),
            "failed": [f"{check.part} {check.dtype}, {check.subject}: {check.detail}" for check in failed],
            "not_run": report.not_run,
        },
        "paths": {
            "bundle": str(bundle_path),
            "loss_curve": str(bundle_path / "training/loss.png"),
            "parity_report": str(bundle_path / "reports/parity.json"),
            "summary": str(bundle_path / SUMMARY),
        },
        "tools": tool_versions(),
    }
    files.write_json(bundle_path / SUMMARY, summary)
    return summary
