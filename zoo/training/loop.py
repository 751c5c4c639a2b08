"""The training loop: AdamW, the paper's schedule, clipping, checkpoints with exact resume, best weights kept."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zoo import files
from zoo.bundle import SEMANTIC_IDS, WEIGHTS, Bundle
from zoo.data import Dataset, load_dataset
from zoo.errors import BundleError, ConfigError, TrainingError
from zoo.models import presets
from zoo.models.gbla import GBLA
from zoo.training import checkpoints, logs
from zoo.training.config import TrainConfig, recipe
from zoo.training.metrics import ranks_of, recall
from zoo.training.objectives import Batch, fitted, objective
from zoo.training.progress import bar, stop_after_this_step


def train(
    preset: str,
    *,
    data: Dataset | Path | str,
    out: Path | str,
    twin: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    resume: bool = True,
    device: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> Bundle:
    """Train a preset on a prepared dataset into a bundle.

    Killed or interrupted, the same call goes on from the last checkpoint and computes the losses that it would have
    computed without the interruption (bit by bit, given the same machine and number of threads). Called again after
    the end, it returns the bundle.

    Args:
        preset: a name of ``zoo.models.presets``.
        data: a dataset, or the folder of one.
        out: folder of the bundle; ``training/`` in it holds checkpoint, log.csv and loss.png.
        twin: comparison model of the preset.
        overrides: fields of the model configuration to change.
        seed: draws weights, batches and dropout.
        resume: go on where a run in ``out`` stopped; False starts over.
        device: default: the GPU where there is one.
        progress: show a progress bar on standard error.
        settings: fields of ``TrainConfig`` to change in the preset's recipe.

    Returns:
        The bundle with weights of the best validation (of the last step where there was none), semantic IDs and log.

    Raises:
        ConfigError: unknown preset, twin or field, or semantic IDs that do not fit the model.
        CheckpointError: ``out`` holds a run with other settings or data, or a damaged checkpoint.
        BusyError: another process trains into ``out``.
        TrainingError: the loss is not finite; the last checkpoint is kept.
    """
    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    plan = recipe(preset, twin=twin, overrides=settings)
    config = fitted(presets.resolve(preset, twin=twin, overrides=overrides), dataset, plan)
    out = Path(out)
    identity = {
        "preset": preset,
        "twin": twin,
        **{f"model field {name}": value for name, value in presets.config_to_json(config).items()},
        **{f"recipe field {name}": _plain(value) for name, value in vars(plan).items()},
        "dataset": dataset.name,
        "semantic IDs": files.sha256_of(dataset.path / SEMANTIC_IDS),
        "events": files.sha256_of(dataset.path / "events.parquet"),
        "seed": seed,
    }
    if not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}; it must be a whole number from 0 to 2^63 - 1")
    with files.one_writer(out):
        finished = _finished(out, identity) if resume else None
        if finished is not None:
            if progress:
                print(f"  {out} holds this very run, finished; --restart does it again", file=sys.stderr)
            return finished
        if not resume:
            shutil.rmtree(out / "training", ignore_errors=True)
        run = _Run(config, plan, dataset, out, identity, seed, device)
        started = time.perf_counter()
        run.to_the_end(show=progress)
        return run.bundle(preset, twin, time.perf_counter() - started)


_READ_EVERY = 25
"""Steps between two readings of the losses of a GPU: each waits until the GPU has caught up."""


class _Unread(NamedTuple):
    """A step whose loss and gradient norm lie where they were computed."""

    step: int
    rate: float
    examples: int
    loss: Tensor
    norm: Tensor


class _Run:
    """One training run on one device."""

    def __init__(
        self,
        config: Any,
        plan: TrainConfig,
        dataset: Dataset,
        out: Path,
        identity: dict[str, Any],
        seed: int,
        device: str | None,
    ) -> None:
        self.config, self.plan, self.dataset, self.out = config, plan, dataset, out
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.manual_seed(seed)
        self.model: presets.Model = presets.build(config).to(self.device)
        self.optimizer = _optimizer(self.model, plan)
        self.parts: dict[str, checkpoints.Stateful] = {"model": self.model, "optimizer": self.optimizer}
        self.average: AveragedModel | None = None
        if plan.weight_average:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(plan.weight_average))
            self.parts["average"] = self.average
        self.objective = objective(config, dataset, plan, seed)
        path = out / checkpoints.CHECKPOINT
        if path.exists():
            self.state = checkpoints.load(path, identity, self.parts, self.device)
        else:
            self.state = checkpoints.State(identity)
        draw = np.random.default_rng(0)
        users = min(plan.eval_users, dataset.num_users)
        self.eval_users = np.sort(draw.choice(dataset.num_users, users, replace=False))
        self.log = logs.Log(out / logs.LOG, self.state.step)
        self.unread: list[_Unread] = []
        self.read_every = _READ_EVERY if self.device.type == "cuda" else 1
        self.read_at = time.perf_counter()
        self.loss = math.nan

    def to_the_end(self, *, show: bool) -> None:
        """Train from the present step to the last one."""
        self.model.train()
        self.read_at = time.perf_counter()
        batches = self.objective.from_step(self.state.step)
        try:
            with stop_after_this_step() as stop, bar(self.plan.steps, self.state.step, show) as tell:
                while self.state.step < self.plan.steps:
                    self._step(next(batches))
                    step = self.state.step
                    last = step == self.plan.steps or stop.is_set()
                    validates = self.plan.eval_every and (step % self.plan.eval_every == 0 or step == self.plan.steps)
                    saves = step % self.plan.checkpoint_every == 0 or last
                    if validates or saves or len(self.unread) >= self.read_every:
                        self._read()
                    if validates:
                        self._validate()
                    if not self.unread:
                        tell(step, self._status())
                    if saves:
                        self._checkpoint()
                    if stop.is_set():
                        raise KeyboardInterrupt
        finally:
            self.log.close()

    def bundle(self, preset: str, twin: str | None, seconds: float) -> Bundle:
        """Write the bundle with the best weights."""
        if self.state.best_step:
            checkpoints.load_best(self.out / checkpoints.BEST, self.state, self.kept)
        logs.draw_curve(
            self.out / logs.LOG, self.out / logs.CURVE, f"{preset} on {self.dataset.name}", self.objective.unit
        )
        signatures = {part.name: part.signature for part in self.model.parts()}
        bundle = Bundle.create(self.out, config=presets.config_to_json(self.config), signatures=signatures)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.kept.state_dict().items()}
        with files.replacing(self.out / WEIGHTS) as temporary:
            save_file(weights, temporary)
        with files.replacing(self.out / SEMANTIC_IDS) as temporary:
            shutil.copyfile(self.dataset.path / SEMANTIC_IDS, temporary)
        rows = [row for row in logs.read_log(self.out / logs.LOG) if row["loss"]]
        summary = {
            "dataset": self.dataset.name,
            "dataset_path": str(self.dataset.path),
            "recipe": {name: _plain(value) for name, value in vars(self.plan).items()},
            "max_length": self.plan.max_length,
            "identity": self.state.identity,
            "seed": self.state.identity["seed"],
            "steps": self.state.step,
            "epochs": self.state.step / self.objective.steps_per_epoch,
            "final_loss": float(rows[-1]["loss"]) if rows else None,
            "best_valid_recall@10": self.state.best_metric if self.state.best_metric >= 0 else None,
            "best_step": self.state.best_step or self.state.step,
            "seconds_of_last_run": round(seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }
        bundle.update([WEIGHTS, SEMANTIC_IDS], preset=preset, twin=twin, training=summary)
        return bundle

    @property
    def kept(self) -> presets.Model:
        """The model that is validated and kept: the average of the weights where the recipe has one."""
        return self.model if self.average is None else cast(presets.Model, self.average.module)

    def _step(self, batch: Batch) -> None:
        """Make one optimiser step; nothing here waits for a GPU."""
        rate = self.plan.learning_rate(self.state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        targets = batch.targets
        losses = []
        for piece in batch.pieces(self.plan.micro_batch_tokens):
            loss = self._loss(piece.to(self.device), targets)
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.grad_clip)
        self.optimizer.step()
        if self.average is not None:
            self._update_average(self.average)
        self.state.step += 1
        self.unread.append(_Unread(self.state.step, rate, len(batch.lengths), sum(losses[1:], losses[0]), norm))

    def _update_average(self, average: AveragedModel) -> None:
        """Do what ``AveragedModel.update_parameters`` does, without the copy of a counter to the GPU that waits."""
        if average.n_averaged == 0:
            average.update_parameters(self.model)
            return
        pairs = zip(average.module.parameters(), self.model.parameters(), strict=True)
        averaged, present = zip(*((a.detach(), p.detach()) for a, p in pairs), strict=True)
        assert average.multi_avg_fn is not None
        average.multi_avg_fn(averaged, present, average.n_averaged)
        for kept, buffer in zip(average.module.buffers(), self.model.buffers(), strict=True):
            kept.copy_(buffer)
        average.n_averaged += 1

    def _read(self) -> None:
        """Read and log the losses of the steps since the last reading.

        Raises:
            TrainingError: one of them, or its gradient norm, is not finite. No checkpoint holds weights that it
                changed: nothing is validated or saved before its steps are read.
        """
        if not self.unread:
            return
        values = torch.stack([value for row in self.unread for value in (row.loss, row.norm)]).tolist()
        seconds = (time.perf_counter() - self.read_at) / len(self.unread)
        for row, loss, norm in zip(self.unread, values[::2], values[1::2], strict=True):
            for what, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise self._diverged(what, value, row.step)
            self.loss = loss
            self.log.write(
                step=row.step,
                epoch=(row.step - 1) // self.objective.steps_per_epoch,
                loss=loss,
                learning_rate=row.rate,
                grad_norm=norm,
                examples_per_second=row.examples / seconds,
            )
        self.unread.clear()
        self.read_at = time.perf_counter()

    def _diverged(self, what: str, value: float, step: int) -> TrainingError:
        """Name what is not finite and where the last good state is."""
        self.log.flush()
        path = self.out / checkpoints.CHECKPOINT
        kept = f"the checkpoint before it is kept in {path}" if path.exists() else "no checkpoint had been written yet"
        return TrainingError(
            f"the {what} is {value} at step {step}; {kept}: lower peak_lr or grad_clip in another --out"
        )

    def _status(self) -> str:
        best = f"{self.state.best_metric:.4f}" if self.state.best_metric >= 0 else "not yet validated"
        rate = self.plan.learning_rate(self.state.step - 1)
        return f"loss {self.loss:.3f}  lr {rate:.1e}  best Recall@10 {best}"

    def _loss(self, batch: Batch, targets: float) -> Tensor:
        """Return the batch's share of a mean loss over ``targets`` targets."""
        bf16 = self.plan.precision == "bf16" or (self.plan.precision == "auto" and self.device.type == "cuda")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return self.objective.loss(self.model, batch, targets)

    def _validate(self) -> None:
        ranked = self.objective.rank(self.kept, self.eval_users, "valid", 20)
        metric = recall(ranks_of(ranked, self.dataset.targets("valid")[self.eval_users]), 10)
        self.log.write(step=self.state.step, **{"valid_recall@10": metric}, **self.objective.health(self.model))
        if metric > self.state.best_metric:
            self.state.best_metric, self.state.best_step = metric, self.state.step
            checkpoints.save_best(self.out / checkpoints.BEST, self.state, self.kept)

    def _checkpoint(self) -> None:
        self.log.flush()
        checkpoints.save(self.out / checkpoints.CHECKPOINT, self.state, self.parts, self.device)


def _optimizer(model: presets.Model, plan: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW that decays projection matrices only: no norms, biases, embeddings or convolutions."""
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    if isinstance(model, GBLA):
        decayed.add(id(model.heads))
    groups = [
        {"params": [p for p in model.parameters() if id(p) in decayed], "weight_decay": plan.weight_decay},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.start_lr, betas=plan.betas, fused=True)


def _finished(out: Path, identity: Mapping[str, Any]) -> Bundle | None:
    """Return the bundle in ``out`` if exactly this run has written it."""
    try:
        bundle = Bundle.open(out)
        bundle.file(WEIGHTS)
    except BundleError:
        return None
    return bundle if bundle.manifest.get("training", {}).get("identity") == identity else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
