"""What the recurrence of SinkRec keeps while a few items repeat, against the plain gated delta rule; on a CPU.

A history of this task is drawn from one catalogue, so that no item tells its part by itself:

    early     P pairs, a key and the value that follows it, each once
    gap       D other items, again and again, in random order
    late      the keys again, in random order, each followed by its value

The item after a late key is known from one event before the gap, and from nothing else. Attention is left out (group
T), events are equally far apart in time, and all models of a seed train on the same histories in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import tables
from zoo.errors import ConfigError
from zoo.models import presets
from zoo.models.sink import Sink, sink
from zoo.models.sinkrec import SinkRec
from zoo.models.sinkrec_config import TWINS, SinkRecConfig

if TYPE_CHECKING:
    from zoo.sink_view import Panel

OURS, PLAIN = "sinkrec", "plain-gated-deltanet"
SIZES: dict[str, Any] = {
    "group": "T", "num_loops": 1, "num_heads": 2, "value_dim": 32, "dropout": 0.0,
}  # fmt: skip
"""Changes to sinkrec-tiny: one recurrence."""
BATCH, PEAK_LR, SECONDS = 32, 1e-2, 60
"""Histories a step, learning rate, and seconds between two events."""
EVALUATED, INSPECTED = 256, 32
"""Histories, never trained on, of which hits are counted and sinks measured."""


@dataclass(frozen=True)
class Task:
    """Sizes of the task: items of the catalogue, pairs, repeated items, and late rounds through all keys."""

    items: int = 32
    pairs: int = 4
    distractors: int = 4
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.items < 2 * self.pairs + self.distractors or min(self.pairs, self.distractors, self.rounds) < 1:
            raise ConfigError(
                f"a catalogue of {self.items} items does not hold {self.pairs} pairs and {self.distractors} repeated "
                "items; all are 1 or more, and the catalogue has room for them"
            )


class Planted(NamedTuple):
    """Histories of the task.

    Attributes:
        items: int64 [B, L].
        keys: int64 [A], positions of late keys; the item after each is the answer.
    """

    items: Tensor
    keys: Tensor


def plant(task: Task, gap: int, batch: int, generator: torch.Generator) -> Planted:
    """Draw histories of 2P + gap + 2P x rounds events."""
    parts = torch.rand(batch, task.items, generator=generator).argsort(1)
    keys, values, others = parts[:, : 2 * task.pairs + task.distractors].split(
        [task.pairs, task.pairs, task.distractors], dim=1
    )

    def walk() -> Tensor:
        order = torch.rand(batch, task.pairs, generator=generator).argsort(1)
        return torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)

    repeated = others.gather(1, torch.randint(task.distractors, (batch, gap), generator=generator))
    items = torch.cat([walk(), repeated, *(walk() for _ in range(task.rounds))], dim=1)
    return Planted(items, torch.arange(2 * task.pairs + gap, items.shape[1], 2))


def measure(
    models: str = f"{OURS},{PLAIN}",
    seeds: str = "0,1,2",
    steps: int = 800,
    key_dim: int = 16,
    distractors: int = 4,
    gap: int = 64,
    gaps: str = "0,64,128,256",
) -> Iterator[dict[str, Any]]:
    """Yield a row a seed: how often each model finds the value, and what its writes do.

    Args:
        models: comma-separated twins of sinkrec-tiny, ``sinkrec`` being itself; the first one needs a memory, whose
            codes all are measured with.
        seeds: comma-separated; they draw weights and histories.
        steps: optimiser steps of each model.
        key_dim: width K of a key.
        distractors: D, items that repeat.
        gap: longest gap in training, and the one that sinks are measured at.
        gaps: comma-separated, gaps that hits are counted at.

    Raises:
        ConfigError: no such twin, a first model without a memory, or a task that does not fit its catalogue.
    """
    task, names = Task(distractors=distractors), models.split(",")
    configs = {name: configuration(name, task, key_dim) for name in names}
    if not configs[names[0]].memory:
        raise ConfigError(
            f"the first model is {names[0]}, which has no memory for codes to come from; name {OURS} first"
        )
    for seed in tables.integers(seeds):
        trained, seconds = {}, {}
        for name, config in configs.items():
            started = time.perf_counter()
            trained[name] = train(config, task, steps, gap, seed)
            seconds[name] = time.perf_counter() - started
        sinks = {name: found_sinks(model, trained[names[0]], task, gap) for name, model in trained.items()}
        yield {
            "seed": seed, "steps": steps, "gap": gap, **vars(task), "key_dim": key_dim,
            "models": {
                name: {
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "train_seconds": seconds[name],
                    "hit@1": {str(g): hits(model, task, g) for g in tables.integers(gaps)},
                    **_summary(sinks[name], task, gap),
                    "history": {
                        **sinks[name][0]._asdict(),
                        "influence": sinks[name][0].influence.tolist(),
                        "codes": sinks[name][0].codes.tolist(),
                    },
                }
                for name, model in trained.items()
            },
        }  # fmt: skip


def configuration(name: str, task: Task, key_dim: int) -> SinkRecConfig:
    """Return the configuration of one model of the comparison.

    Raises:
        ConfigError: no such twin.
    """
    if name not in (OURS, *TWINS):
        raise ConfigError(f"there is no model {name!r} to compare; choose {OURS} or a twin: {', '.join(TWINS)}")
    overrides = {**SIZES, "num_items": task.items, "key_dim": key_dim}
    config = presets.resolve("sinkrec-tiny", twin=None if name == OURS else name, overrides=overrides)
    assert isinstance(config, SinkRecConfig)
    return config


def train(config: SinkRecConfig, task: Task, steps: int, gap: int, seed: int) -> SinkRec:
    """Train a model on gaps that grow from none to ``gap``: the loss is that of the answers, and the memory's own."""
    torch.manual_seed(seed)
    model: SinkRec = presets.build(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1, (step + 1) / 50) * min(1, 2.02 - 2 * done)
        most = round(gap * min(1.0, max(0.0, 3 * done - 1)))
        drawn = int(torch.randint(most + 1, (), generator=generator))
        items, keys = plant(Task(task.items, task.pairs, task.distractors, rounds=3), drawn, BATCH, generator)
        losses = model(items, *_times_and_lengths(items))
        loss = losses.next_item[:, keys].mean()
        loss = (
            loss + config.commitment_weight * losses.commitment + config.reconstruction_weight * losses.reconstruction
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def hits(model: SinkRec, task: Task, gap: int) -> float:
    """Return how often the value that followed a key has the highest score after it, 0 to 1; by chance 1 / items."""
    items, keys = plant(task, gap, EVALUATED, torch.Generator().manual_seed(1))
    found = []
    for key in keys.tolist():
        known = items[:, : key + 1]
        user, _ = model.prefill(known, *_times_and_lengths(known))
        found.append(model.score(user).argmax(-1) == items[:, key + 1])
    return float(torch.stack(found).double().mean())


def found_sinks(model: SinkRec, memory: SinkRec, task: Task, gap: int) -> list[Sink]:
    """Measure histories, with the codes of the model that has the memory."""
    items, _ = plant(task, gap, INSPECTED, torch.Generator().manual_seed(2))
    times, lengths = _times_and_lengths(items)
    with torch.no_grad():
        codes = memory.codes(items, lengths)[:, :, 0]
    return [sink(model, *row) for row in zip(items, times, codes, strict=True)]


def panel(name: str, found: Mapping[str, Any]) -> Panel:
    """Return the history of a model's result as a part of a picture."""
    from zoo.sink_view import Panel  # reads data, which measuring does not need

    history = found["history"]
    influence = torch.tensor(history["influence"], dtype=torch.float64)
    return Panel(name, Sink(influence, torch.tensor(history["codes"]), history["code"], history["ratio"]))


def _summary(sinks: Sequence[Sink], task: Task, gap: int) -> dict[str, float]:
    """Return means over histories: the sink ratio, and the share of the influence that the repeated events have."""
    first = 2 * task.pairs
    length = len(sinks[0].codes)
    repeats = [float(found.influence[first : first + gap].sum() / found.influence.sum()) for found in sinks]
    early = [float(found.influence[:first].sum() / found.influence.sum()) for found in sinks]
    most = [float((found.codes == found.code).double().mean()) for found in sinks]
    return {
        "sink_ratio": _mean([found.ratio for found in sinks]),
        "code_share_of_events": _mean(most),
        "repeats_share_of_influence": _mean(repeats),
        "repeats_share_of_events": gap / length,
        "early_share_of_influence": _mean(early),
    }


def _times_and_lengths(items: Tensor) -> tuple[Tensor, Tensor]:
    batch, length = items.shape
    return torch.arange(length).repeat(batch, 1) * SECONDS, torch.full((batch,), length, dtype=torch.int32)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text: of each model the mean over seeds, and the least and most."""
    first = rows[0]
    names = list(first["models"])
    gaps = list(first["models"][names[0]]["hit@1"])
    headers = ["model", *(f"hit@1, gap {gap}" for gap in gaps), "sink ratio", "influence of repeats", "of early pairs"]
    lines = []
    for name in names:
        of = [row["models"][name] for row in rows]
        columns = [[model["hit@1"][gap] for model in of] for gap in gaps]
        columns += [[model[field] for model in of] for field in _SHARES]
        lines.append([name, *map(_spread, columns)])
    ours = [row["models"][names[0]] for row in rows]
    repeats = tables.share(first["models"][names[0]]["repeats_share_of_events"])
    most = tables.share(_mean([model["code_share_of_events"] for model in ours]))
    notes = [
        f"Mean over {len(rows)} seeds (least to most), {first['steps']} steps each; {first['pairs']} pairs, "
        f"{first['distractors']} repeated items, catalogue of {first['items']}, K {first['key_dim']}, trained on gaps "
        f"of up to {first['gap']}. Chance: {1 / first['items']:.2f}. At gap {first['gap']}, where influence is "
        f"measured, the repeated events are {repeats} of a history, those of the most frequent code {most}."
    ]
    return tables.render(headers, lines, notes)


_SHARES = ("sink_ratio", "repeats_share_of_influence", "early_share_of_influence")


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
