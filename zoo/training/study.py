"""Train a preset and its twins with several seeds, side by side on the GPUs of one machine, and compare them.

    python -m zoo.training.study --preset gbla-ml1m --twins all --seeds 0,1,2 --data prepared/ml-1m --out runs/study

Every run is a process of its own: ``zoo train``, then ``zoo eval``, into ``OUT/<twin>-seed<seed>``. Called again, the
study skips what is finished and resumes what is not. A run that fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zoo import console, files
from zoo.bundle import Bundle
from zoo.data import load_dataset
from zoo.errors import ConfigError, ZooError
from zoo.models import presets
from zoo.training import study_table
from zoo.training.config import recipe
from zoo.training.evaluate import RANKS, RECALL_KS, REPORT
from zoo.training.logs import LOG
from zoo.training.progress import stop_after_this_step

BASE = "base"
"""What the preset itself is called among its twins."""

_GRACE_SECONDS = 20.0
_HEARTBEAT_SECONDS = 30.0


@dataclass(frozen=True)
class Plan:
    """What a study trains; the same recipe for every twin.

    Attributes:
        preset: a name of ``zoo.models.presets``.
        twins: comparison models; ``base`` is the preset itself.
        seeds: of weights, batches and dropout.
        data: folder of a prepared dataset.
        settings: fields of the training recipe to change.
        overrides: fields of the model to change.
        beams: beam width of the evaluation.
        once: more twins, of which only the first seed is trained.
    """

    preset: str
    twins: tuple[str, ...]
    seeds: tuple[int, ...]
    data: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    beams: int = 100
    once: tuple[str, ...] = ()

    def runs(self) -> list[tuple[str, int]]:
        """Return (twin, seed) in the order of starting: every twin has its first seed before any has its second."""
        first = [(twin, seed) for seed in self.seeds[:1] for twin in (*self.twins, *self.once)]
        return first + [(twin, seed) for seed in self.seeds[1:] for twin in self.twins]

    def fixed(self) -> dict[str, Any]:
        """Return what must be equal for results to share a folder."""
        config = recipe(self.preset, overrides=self.settings)
        return json.loads(
            json.dumps(
                {
                    "preset": self.preset,
                    "data": load_dataset(self.data).name,
                    "recipe": vars(config),
                    "overrides": dict(self.overrides),
                    "beams": self.beams,
                }
            )
        )


Commands = Callable[[Plan, str, int, Path], Sequence[Sequence[str]]]
"""(plan, twin, seed, folder) -> command lines, run one after the other; each must end with exit status 0."""


def zoo_commands(plan: Plan, twin: str, seed: int, folder: Path) -> list[list[str]]:
    """Return the command lines of one run: train, then evaluate."""
    zoo = [sys.executable, "-m", "zoo.cli"]
    train = [*zoo, "train", plan.preset, "--data", str(plan.data), "--out", str(folder), "--seed", str(seed), "--json"]
    train += [] if twin == BASE else ["--twin", twin]
    for option, fields in (("--train-set", plan.settings), ("--set", plan.overrides)):
        train += [word for name, value in fields.items() for word in (option, f"{name}={json.dumps(value)}")]
    return [train, [*zoo, "eval", str(folder), "--data", str(plan.data), "--beams", str(plan.beams), "--json"]]


@dataclass
class _Running:
    twin: str
    seed: int
    gpu: str
    folder: Path
    waiting: list[Sequence[str]]
    started: float
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"{self.twin} seed {self.seed}"


def run_study(
    plan: Plan,
    out: Path | str,
    *,
    gpus: Sequence[str] = (),
    processes_per_gpu: int = 1,
    deadline: float | None = None,
    stop_after: float | None = None,
    commands: Commands = zoo_commands,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Train and evaluate every (twin, seed) of a plan.

    Args:
        plan: what to train.
        out: folder of the study: a bundle a run, study.json, ranks.npz and study.md.
        gpus: values of CUDA_VISIBLE_DEVICES, one a GPU; none for the CPU.
        processes_per_gpu: runs side by side on each GPU (on the CPU where there is none).
        deadline: seconds after which no run starts.
        stop_after: seconds after which running ones are stopped; they keep a checkpoint and can be resumed.
        commands: what a run is.
        tell: takes progress lines.

    Returns:
        The content of study.json: plan, machine, and a state, metrics and seconds for every run.

    Raises:
        ConfigError: a twin, preset, field or number that makes no sense, or ``out`` holds another study.
        KeyboardInterrupt: SIGINT or SIGTERM came; the running ones were stopped, and what there is was written.
    """
    _check(plan, processes_per_gpu)
    out = files.make_folder(out)
    started = time.monotonic()
    with files.one_writer(out), stop_after_this_step() as interrupted:
        study = _Study(plan, out, [*gpus] or [""], processes_per_gpu, commands, tell, started)
        study.run(deadline, stop_after, interrupted)
        content = study.write()
    if interrupted.is_set():
        raise KeyboardInterrupt
    return content


class _Study:
    """The state of one call of ``run_study``."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        gpus: list[str],
        processes_per_gpu: int,
        commands: Commands,
        tell: Callable[[str], None],
        started: float,
    ) -> None:
        self.plan, self.out, self.gpus, self.per_gpu = plan, out, gpus, processes_per_gpu
        self.commands, self._tell, self.started = commands, tell, started
        self.fixed = plan.fixed()
        self.running: list[_Running] = []
        self.results: dict[tuple[str, int], dict[str, Any]] = {}
        self.heartbeat = time.monotonic()
        self.machine = _machine(gpus)
        previous = _previous(out / study_table.STUDY)
        different = [name for name, value in self.fixed.items() if name in previous and previous[name] != value]
        if different:
            raise ConfigError(
                f"{out} holds a study with another {different[0]}; choose another --out, or delete that folder"
            )
        for row in previous.get("runs", ()):
            ranks = out / f"{row['twin']}-seed{row['seed']}" / RANKS
            if row["state"] == "done" and ranks.exists():
                self.results[row["twin"], row["seed"]] = row

    def run(self, deadline: float | None, stop_after: float | None, interrupted: threading.Event) -> None:
        """Start runs where a place is free, and look after them until none is left, time is up or a signal came."""
        waiting = [run for run in self.plan.runs() if run not in self.results]
        if len(waiting) < len(self.plan.runs()):
            self.tell(f"{len(self.plan.runs()) - len(waiting)} runs are finished already")
        try:
            while waiting or self.running:
                elapsed = time.monotonic() - self.started
                if interrupted.is_set():
                    self.tell(f"interrupted: stopping {len(self.running)} runs")
                    return
                if deadline is not None and elapsed > deadline and waiting:
                    self.tell(f"deadline of {deadline:.0f} s: {len(waiting)} runs are not started")
                    waiting = []
                if stop_after is not None and elapsed > stop_after:
                    self.tell(f"stopping {len(self.running)} runs after {stop_after:.0f} s")
                    return
                while waiting and len(self.running) < len(self.gpus) * self.per_gpu:
                    self.start(*waiting.pop(0))
                for run in [run for run in self.running if run.process.poll() is not None]:
                    self.ended(run)
                self.beat(len(waiting))
                time.sleep(0.05)
        finally:
            self.stop()

    def start(self, twin: str, seed: int) -> None:
        """Start a run on the GPU with the fewest."""
        gpu = min(self.gpus, key=lambda gpu: sum(run.gpu == gpu for run in self.running))
        folder = files.make_folder(self.out / f"{twin}-seed{seed}")
        first, *rest = self.commands(self.plan, twin, seed, folder)
        self.running.append(
            _Running(twin, seed, gpu, folder, rest, time.monotonic(), self.spawn(first, gpu, folder, "wb"))
        )
        self.tell(f"start {self.running[-1].name}{f' on GPU {gpu}' if gpu else ''}")

    def spawn(self, command: Sequence[str], gpu: str, folder: Path, mode: str) -> subprocess.Popen[bytes]:
        """Start one command of a run with its share of the processors, writing to run.log."""
        threads = max(1, (os.cpu_count() or 1) // (len(self.gpus) * self.per_gpu))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}
        with (folder / "run.log").open(mode) as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def ended(self, run: _Running) -> None:
        """Go on with the next command of a run, or take its result."""
        status = run.process.returncode
        if status == 0 and run.waiting:
            run.process = self.spawn(run.waiting.pop(0), run.gpu, run.folder, "ab")
            return
        self.running.remove(run)
        row = {"twin": run.twin, "seed": run.seed, "seconds": round(time.monotonic() - run.started, 1)}
        try:
            if status:
                raise ValueError(f"exit status {status}: {_last_line(run.folder / 'run.log')}")
            self.results[run.twin, run.seed] = row | {"state": "done"} | _result(run.folder)
            recall = self.results[run.twin, run.seed]["metrics"][study_table.model_of(self.fixed)]["Recall@10"]
            self.tell(f"done {run.name}: Recall@10 {recall:.4f} in {row['seconds']:.0f} s")
        except (OSError, ValueError, KeyError, ZooError) as error:
            reason = f"{type(error).__name__}: {error}" if not status else str(error)
            self.results[run.twin, run.seed] = row | {"state": "failed", "reason": reason}
            self.tell(f"FAILED {run.name}: {reason}; see {run.folder / 'run.log'}")
        self.write()

    def stop(self) -> None:
        """Interrupt what is running, so that it writes a checkpoint; after a grace time, kill it."""
        for run in self.running:
            run.process.terminate()
        until = time.monotonic() + _GRACE_SECONDS
        for run in self.running:
            try:
                run.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()
            seconds = round(time.monotonic() - run.started, 1)
            self.results[run.twin, run.seed] = {
                "twin": run.twin, "seed": run.seed, "state": "stopped", "seconds": seconds,
            }  # fmt: skip
        self.running.clear()

    def beat(self, waiting: int) -> None:
        """Say now and then how far the running ones are."""
        if time.monotonic() - self.heartbeat > _HEARTBEAT_SECONDS:
            self.heartbeat = time.monotonic()
            steps = ", ".join(f"{run.name} step {_logged_step(run.folder)}" for run in self.running)
            self.tell(f"{len(self.running)} running, {waiting} waiting: {steps}")

    def write(self) -> dict[str, Any]:
        """Write study.json, ranks.npz and study.md, whole, and return the first."""
        rows = [
            self.results.get(run, {"twin": run[0], "seed": run[1], "state": "not started"}) for run in self.plan.runs()
        ]
        content = {
            **self.fixed,
            "command": f"python -m zoo.training.study {shlex.join(sys.argv[1:])}",
            "date": time.strftime("%Y-%m-%d"),
            "machine": self.machine,
            "processes_per_gpu": self.per_gpu,
            "seconds": round(time.monotonic() - self.started, 1),
            "runs": rows,
        }
        files.write_json(self.out / study_table.STUDY, content)
        ranks = {
            study_table.key(row["twin"], row["seed"]): np.load(self.out / f"{row['twin']}-seed{row['seed']}" / RANKS)
            for row in rows
            if row["state"] == "done"
        }
        with files.replacing(self.out / study_table.RANKS) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **{name: value.astype(np.int16) for name, value in ranks.items()})
        files.write_bytes(self.out / study_table.PAGE, study_table.page(content, ranks).encode())
        return content

    def tell(self, line: str) -> None:
        """Print a line after the seconds since the start."""
        self._tell(f"[{time.monotonic() - self.started:4.0f} s] {line}")


def _check(plan: Plan, processes_per_gpu: int) -> None:
    """Name what does not exist or makes no sense before anything starts."""
    if not plan.twins or not plan.seeds:
        raise ConfigError("a study needs at least one twin and one seed")
    if len(set(plan.runs())) < len(plan.runs()):
        twins, seeds = ", ".join((*plan.twins, *plan.once)), ", ".join(map(str, plan.seeds))
        raise ConfigError(
            f"the twins {twins} or the seeds {seeds} name one twice; two runs cannot share a folder, so give each once"
        )
    if processes_per_gpu < 1:
        raise ConfigError(f"processes per GPU is {processes_per_gpu}, and nothing would ever start; use 1 or more")
    if plan.beams < max(RECALL_KS):
        raise ConfigError(f"{plan.beams} beams cannot give Recall@{max(RECALL_KS)}; use {max(RECALL_KS)} or more")
    for twin in (*plan.twins, *plan.once):
        presets.resolve(plan.preset, twin=None if twin == BASE else twin, overrides=plan.overrides)
    recipe(plan.preset, overrides=plan.settings)


def _result(folder: Path) -> dict[str, Any]:
    """Read what a finished run has left in its bundle."""
    report = json.loads((folder / REPORT).read_text())
    training = Bundle.open(folder).manifest["training"]
    return {
        "metrics": report["metrics"],
        "users": report["users"],
        "illegal_share": report["illegal_share"],
        "by_left_out": report.get("by_left_out", {}),
        "training_seconds": training["seconds_of_last_run"],
        "final_loss": training["final_loss"],
        "best_step": training["best_step"],
        "best_valid_recall@10": training["best_valid_recall@10"],
    }


def _machine(gpus: Sequence[str]) -> dict[str, Any]:
    import platform

    import torch

    found = torch.cuda.is_available() and any(gpus)
    return {
        "gpus": [torch.cuda.get_device_name(0)] * len(gpus) if found else [],
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _logged_step(folder: Path) -> str:
    """Return the last step of a run's log, which is written when the run saves or validates."""
    log = folder / LOG
    lines = log.read_text().splitlines() if log.exists() else []
    return lines[-1].split(",")[0] if len(lines) > 1 else "-"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _previous(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        study = json.loads(path.read_text())
        if all({"twin", "seed", "state"} <= set(row) for row in study["runs"]):
            return dict(study)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path} is damaged; delete it and run the same command: finished runs are only read again")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line; exit status 1 where a run is missing."""
    parser = argparse.ArgumentParser(prog="python -m zoo.training.study", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", required=True)
    parser.add_argument("--twins", default="all", help="comma-separated; base is the preset itself; all (default)")
    parser.add_argument("--once", default="", help="comma-separated twins to train with the first seed only")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--data", required=True, type=Path, help="folder that `zoo data` wrote")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, help="optimiser steps; default: the preset's recipe")
    parser.add_argument("--train-set", action="append", metavar="FIELD=VALUE", help="change the recipe; repeatable")
    parser.add_argument("--set", action="append", metavar="FIELD=VALUE", help="change the model; repeatable")
    parser.add_argument("--beams", type=int, default=100)
    parser.add_argument("--gpus", help="comma-separated; default: all; '' for the CPU")
    parser.add_argument("--processes-per-gpu", type=int, default=1)
    parser.add_argument("--deadline", type=float, help="seconds after which no run starts")
    parser.add_argument("--stop-after", type=float, help="seconds after which running ones are stopped")
    given = parser.parse_args(arguments)
    try:
        settings = console.overrides(given.train_set, "--train-set")
        if given.steps is not None:
            settings["steps"] = given.steps
        twins = _twins(given.preset, given.twins)
        seeds = console.integers("--seeds", given.seeds)
        plan = Plan(
            given.preset, tuple(twins), tuple(seeds), given.data, settings, console.overrides(given.set), given.beams,
            console.words("--once", given.once or None) or (),
        )  # fmt: skip
        study = run_study(
            plan, given.out, gpus=_gpus(given.gpus), processes_per_gpu=given.processes_per_gpu,
            deadline=given.deadline, stop_after=given.stop_after,
        )  # fmt: skip
    except ZooError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept, run the same command to go on", file=sys.stderr)
        return 130
    print((given.out / study_table.PAGE).read_text())
    return 0 if all(row["state"] == "done" for row in study["runs"]) else 1


def _twins(preset: str, option: str) -> list[str]:
    if option != "all":
        return option.split(",")
    model = presets.PRESETS[preset][0] if preset in presets.PRESETS else next(iter(presets.TWINS))
    return [BASE, *presets.TWINS[model]]


def _gpus(option: str | None) -> list[str]:
    import torch

    if option is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return [name for name in option.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
