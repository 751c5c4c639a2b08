"""One training step of a preset against its all-softmax twin: forward, backward, AdamW, in bf16 autocast, full rows."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gate, limits, tables, timing
from benchmarks.shapes import numbers_of
from zoo.errors import ConfigError
from zoo.layers import AttentionPlan
from zoo.layers.attention_plan import attention_mask
from zoo.models import presets
from zoo.models.gbla import GBLA

OURS, TWIN = "ours", "all-softmax"
BACKENDS = ("cudnn", "flash")
GATE_SHAPE = (4, 512)
GATE_GRADIENTS = (
    "items.projection.weight",
    "encoder.0.mixer.qkv.weight",
    "encoder.1.mixer.projection.weight",
    "decoder.0.cross_key_value.weight",
)


def measure(
    preset: str = "gbla-yandex",
    shapes: str = "8x8192,32x2048",
    hash_rows: int = 2**16,
    targets: int = 1,
    steps: int = 6,
    compile: str = "no,layers",
    flash_shapes: str = "8x8192",
) -> Iterator[dict[str, Any]]:
    """Yield a row a shape and way of running: milliseconds a step and peak memory of the preset and its twin.

    The softmax layers of both are timed with cuDNN's attention, and at some shapes with FlashAttention-2 too; the
    better of the two is reported, for each side its own.

    Args:
        preset: of the zoo.
        shapes: comma-separated BxL.
        hash_rows: rows of the item table: fewer than a preset's, so that AdamW is not what is measured.
        targets: targets K a history.
        steps: timed steps.
        compile: comma-separated: ``no`` (eager), ``layers`` (torch.compile of each layer).
        flash_shapes: comma-separated BxL at which FlashAttention-2 is timed too; cuDNN is faster.
    """
    device = timing.require_cuda("train_step")
    for way in compile.split(","):
        if way not in ("no", "layers"):
            raise ConfigError(f"compile is {way!r}; use no, layers or both with a comma")
    overrides = {"hash_rows": hash_rows, "dropout": 0.0}
    configs = {
        OURS: presets.resolve(preset, overrides=overrides),
        TWIN: presets.resolve(preset, twin="all-softmax", overrides=overrides),
    }
    shares = {name: _admit(name, config, targets, device) for name, config in configs.items()}
    for shape in shapes.split(","):
        batch, length = numbers_of("train_step", shape, "BxT", "8x8192")
        sides: dict[str, dict[str, Any]] = {name: {} for name in configs}
        for way in compile.split(","):
            for name, config in configs.items():
                # The better kernel of the eager step serves the compiled one too.
                every = list(BACKENDS if shape in flash_shapes.split(",") else BACKENDS[:1])
                backends = [sides[name]["attention"]] if sides[name] else every
                runs = [
                    _time_steps(config, batch, length, targets, steps, device, attention=backend, compiled=way != "no")
                    for backend in backends
                ]
                sides[name] = {**min(runs, key=lambda run: run["step_ms"]["median"]), "all_runs": runs}
            ratio = limits.ratio(sides[TWIN]["step_ms"]["median"], sides[OURS]["step_ms"]["median"])
            yield {
                "preset": preset,
                "batch": batch,
                "length": length,
                "targets": targets,
                "hash_rows": hash_rows,
                "compile": way,
                **{side: dict(found) for side, found in sides.items()},
                "twin_over_ours": ratio,
                "tolerance_used": shares,
            }


def _time_steps(
    config: Any,
    batch: int,
    length: int,
    targets: int,
    steps: int,
    device: torch.device,
    *,
    attention: str,
    compiled: bool,
) -> dict[str, Any]:
    """Return step time and peak memory of one model; the one before it is swept away first."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model = presets.build(config, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    batches = [_batch(config, batch, length, targets, device) for _ in range(2)]
    if compiled:
        for layer in (*model.encoder, *model.decoder):
            layer.compile(dynamic=False)
    with _attention(model, attention):
        step_ms, peak = timing.time_steps(lambda index: _step(model, optimizer, batches[index % 2]), steps)
    return {"attention": attention, "step_ms": step_ms._asdict(), "peak_gib": peak}


def _step(model: GBLA, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    optimizer.zero_grad(set_to_none=True)
    _losses(model, batch, all_full=True).mean().backward()
    optimizer.step()


def _losses(model: GBLA, batch: tuple[Tensor, Tensor, Tensor], *, all_full: bool) -> Tensor:
    with torch.autocast(model.start.device.type, torch.bfloat16, enabled=model.start.dtype == torch.float32):
        return model(*batch, all_full=all_full)


def _batch(config: Any, batch: int, length: int, targets: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(0, 2**31 - 1, (batch, length), device=device),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        torch.randint(0, config.codebook_size, (batch, targets, config.num_digits), device=device),
    )


@contextmanager
def _attention(model: GBLA, backend: str) -> Iterator[None]:
    """Let the dense plan of a model's softmax layers use this kernel first."""
    plan = model.attention_plan

    def chosen(valid_BL: Tensor, *, all_full: bool = False) -> Any:
        return plan(valid_BL, all_full=all_full)._replace(cudnn_first=backend == "cudnn")

    model.attention_plan = chosen  # type: ignore[method-assign]
    try:
        # The plan's own order wins inside the softmax layers when cuDNN comes first.
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True
        ):
            yield
    finally:
        del model.attention_plan


@contextmanager
def _reference_paths(model: GBLA) -> Iterator[None]:
    """Let a model use the kernels' references and masked attention."""
    causal = model.config.direction == "causal"

    def masked(valid_BL: Tensor, *, all_full: bool = False) -> AttentionPlan:
        return AttentionPlan("mask", "the reference", causal, mask_B1LL=attention_mask(valid_BL, causal=causal))

    model.attention_plan = masked  # type: ignore[method-assign]
    try:
        with gate.reference_kernels():
            yield
    finally:
        del model.attention_plan


def _admit(name: str, config: Any, targets: int, device: torch.device) -> dict[str, float]:
    """Check losses and some gradients of the fast paths against the whole model in float64, where masks are used."""
    torch.manual_seed(0)
    model = presets.build(config, device=device)
    batch = _batch(config, *GATE_SHAPE, max(targets, 8), device)
    found = _loss_and_gradients(model, batch, all_full=True)
    wide = copy.deepcopy(model).double()
    with _reference_paths(wide):
        ref64 = _loss_and_gradients(wide, batch, all_full=False)
    with _reference_paths(model):
        low = _loss_and_gradients(model, batch, all_full=False)
    del model, wide
    torch.cuda.empty_cache()
    as_bf16 = {key: value.to(torch.bfloat16) for key, value in found.items()}
    return gate.admit(name, as_bf16, ref64, low)


def _loss_and_gradients(model: GBLA, batch: tuple[Tensor, Tensor, Tensor], *, all_full: bool) -> dict[str, Tensor]:
    losses = _losses(model, batch, all_full=all_full)
    chosen = {name: p for name, p in model.named_parameters() if name in GATE_GRADIENTS}
    grads = torch.autograd.grad(losses.mean(), list(chosen.values()))
    return {"losses": losses, **{f"gradient of {name}": grad for name, grad in zip(chosen, grads, strict=True)}}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = ["B", "L", "compile", "ours ms", "twin ms", "twin / ours", "ours GiB", "twin GiB", "kernel ours, twin"]
    lines = [
        [
            row["batch"],
            row["length"],
            row["compile"],
            row[OURS]["step_ms"]["median"],
            row[TWIN]["step_ms"]["median"],
            tables.times(row["twin_over_ours"]),
            row[OURS]["peak_gib"],
            row[TWIN]["peak_gib"],
            f"{row[OURS]['attention']}, {row[TWIN]['attention']}",
        ]
        for row in rows
    ]
    first = rows[0]
    notes = [
        f"{first['preset']} with {first['hash_rows']} hash rows and its all-softmax twin; forward, backward and fused "
        "AdamW, bf16 autocast, full rows. Softmax layers run with cuDNN and, where all_runs in the JSON says so, with "
        "FlashAttention-2 too; the better one counts."
    ]
    return tables.render(headers, lines, notes)
