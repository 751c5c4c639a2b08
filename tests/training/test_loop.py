import dataclasses
import shutil
import signal
import subprocess
import sys
import time

import polars
import pytest
import torch

from tests.training.conftest import RECIPE, TINY
from zoo import files
from zoo.bundle import WEIGHTS, Bundle
from zoo.errors import BusyError, CheckpointError, ConfigError, TrainingError
from zoo.models.gbla import GBLA
from zoo.training import TrainConfig, loop, recipe, train
from zoo.training.logs import read_log


def run(dataset, out, **settings):
    overrides = settings.pop("overrides", TINY)
    return train("gbla-tiny", data=dataset, out=out, overrides=overrides, progress=False, **{**RECIPE, **settings})


def losses(out):
    return [(row["step"], row["loss"]) for row in read_log(out / "training/log.csv") if row["loss"]]


def test_a_run_leaves_a_bundle_a_log_and_a_curve(dataset, tmp_path):
    bundle = run(dataset, tmp_path)
    assert bundle.file(WEIGHTS).exists() and bundle.file("semantic_ids.safetensors").exists()
    assert len(losses(tmp_path)) == 12
    assert (tmp_path / "training/loss.png").read_bytes().startswith(b"\x89PNG")
    assert bundle.manifest["training"]["steps"] == 12
    assert Bundle.open(tmp_path).config["d_model"] == 16


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(dataset, tmp_path):
    run(dataset, tmp_path / "a")
    run(dataset, tmp_path / "b")
    run(dataset, tmp_path / "c", seed=1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_a_killed_run_goes_on_with_the_losses_it_would_have_had(dataset, tmp_path):
    run(dataset, tmp_path / "whole", steps=60)
    script = f"""
import sys
sys.path.insert(0, {str(sys.path[0])!r})
import torch
torch.set_num_threads({torch.get_num_threads()})  # sums are split by threads, so their number decides the last bit
from tests.training.test_loop import run
from zoo.data import load_dataset
from pathlib import Path
run(load_dataset({str(dataset.path)!r}), Path({str(tmp_path / "killed")!r}), steps=60)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    checkpoint = tmp_path / "killed/training/checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists() and not (tmp_path / "killed/bundle.json").exists(), "the kill came too late to test it"
    run(dataset, tmp_path / "killed", steps=60)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert (tmp_path / "killed" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_an_interrupt_finishes_the_step_and_keeps_it(dataset, tmp_path, monkeypatch):
    original, calls = GBLA.forward, []

    def interrupting(self, *arguments):
        calls.append(1)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(GBLA, "forward", interrupting)
    with pytest.raises(KeyboardInterrupt):
        run(dataset, tmp_path)
    assert len(losses(tmp_path)) == 7
    run(dataset, tmp_path)
    assert len(losses(tmp_path)) == len(calls) == 12


def test_a_finished_run_is_not_run_again(dataset, tmp_path, monkeypatch):
    run(dataset, tmp_path)
    monkeypatch.setattr(GBLA, "forward", None)
    assert run(dataset, tmp_path).manifest["training"]["steps"] == 12


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(dataset, tmp_path, monkeypatch):
    original, calls = GBLA.forward, []

    def diverging(self, *arguments):
        calls.append(1)
        return original(self, *arguments) * (torch.nan if len(calls) == 6 else 1)

    monkeypatch.setattr(GBLA, "forward", diverging)
    with pytest.raises(TrainingError, match="at step 6"):
        run(dataset, tmp_path)
    assert torch.load(tmp_path / "training/checkpoint.pt", weights_only=True)["state"]["step"] == 4


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(dataset, tmp_path, monkeypatch):
    original, calls = GBLA.forward, []

    def diverging(self, *arguments):
        calls.append(1)
        losses_BK = original(self, *arguments)
        if len(calls) == 4:
            losses_BK.register_hook(lambda gradient: gradient * torch.inf)
        return losses_BK

    monkeypatch.setattr(GBLA, "forward", diverging)
    with pytest.raises(TrainingError, match=r"gradient norm is .* at step 4; no checkpoint had been written yet"):
        run(dataset, tmp_path)
    assert len(losses(tmp_path)) == 3


def test_a_checkpoint_of_another_run_is_refused_by_naming_the_difference(dataset, tmp_path):
    run(dataset, tmp_path)
    with pytest.raises(CheckpointError, match="recipe field peak_lr"):
        run(dataset, tmp_path, peak_lr=0.5)
    with pytest.raises(CheckpointError, match="seed 0, not 3"):
        run(dataset, tmp_path, seed=3)
    run(dataset, tmp_path, seed=3, resume=False)


def test_other_events_are_another_run_even_with_the_same_semantic_ids(dataset, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(dataset.path, changed)
    run(dataset, tmp_path / "out")
    table = polars.read_parquet(changed / "events.parquet")
    table.write_parquet(changed / "events.parquet", compression="uncompressed")
    with pytest.raises(CheckpointError, match="events"):
        run(dataclasses.replace(dataset, path=changed), tmp_path / "out")


def test_a_second_run_into_the_same_folder_is_refused(dataset, tmp_path):
    with files.one_writer(tmp_path), pytest.raises(BusyError, match="another process"):
        run(dataset, tmp_path)


def test_missing_or_foreign_best_weights_are_named(dataset, tmp_path):
    run(dataset, tmp_path)
    (tmp_path / "bundle.json").unlink()
    best = tmp_path / "training/best.pt"
    content = best.read_bytes()
    best.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        run(dataset, tmp_path)
    torch.save({"identity": {}, "step": 1, "model": {}}, best)
    with pytest.raises(CheckpointError, match="does not hold"):
        run(dataset, tmp_path)
    best.write_bytes(content)
    run(dataset, tmp_path)


@pytest.mark.parametrize("content", [{}, [], {"state": {"identity": None}}, {"state": {"identity": {}, "x": 1}}])
def test_a_checkpoint_of_another_shape_is_named(dataset, tmp_path, content):
    (tmp_path / "training").mkdir()
    torch.save(content, tmp_path / "training/checkpoint.pt")
    with pytest.raises(CheckpointError, match="damaged"):
        run(dataset, tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "0"])
def test_an_impossible_seed_is_named(dataset, tmp_path, seed):
    with pytest.raises(ConfigError, match="seed"):
        run(dataset, tmp_path, seed=seed)


def test_a_truncated_checkpoint_is_named(dataset, tmp_path):
    run(dataset, tmp_path)
    checkpoint = tmp_path / "training/checkpoint.pt"
    (tmp_path / "bundle.json").unlink()
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        run(dataset, tmp_path)


def test_semantic_ids_that_do_not_fit_the_model_are_named(dataset, tmp_path):
    with pytest.raises(ConfigError, match="--codebook-size 256"):
        run(dataset, tmp_path, overrides={})


def test_unknown_recipe_fields_are_named(dataset, tmp_path):
    with pytest.raises(ConfigError, match="learning_rate"):
        run(dataset, tmp_path, learning_rate=1)
    with pytest.raises(ConfigError, match="precision"):
        run(dataset, tmp_path, precision="fp8")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", "abc"), ("steps", 0), ("batch_size", 2.5), ("eval_every", -1), ("warmup_steps", -5),
        ("peak_lr", float("inf")), ("peak_lr", 0), ("peak_lr", float("nan")), ("weight_decay", -0.1),
        ("final_lr_ratio", 7), ("weight_average", 1.0), ("betas", 0.9), ("betas", (0.9, 1.0)), ("steps", True),
    ],
)  # fmt: skip
def test_a_recipe_value_that_makes_no_sense_is_named(field, value):
    with pytest.raises(ConfigError, match=f"{field} is .*; it must be"):
        recipe("gbla-tiny", overrides={field: value})


def test_betas_may_come_as_a_list():
    assert recipe("gbla-tiny", overrides={"betas": [0.9, 0.95]}).betas == (0.9, 0.95)


def test_the_learning_rate_follows_the_paper():
    plan = recipe("gbla-yandex")
    assert plan.learning_rate(0) == pytest.approx(1e-5)
    assert plan.learning_rate(1500) == pytest.approx((1e-5 + 5e-4) / 2)
    assert plan.learning_rate(3000) == pytest.approx(5e-4)
    assert plan.learning_rate(plan.steps - 1) == pytest.approx(5e-5)
    assert recipe("gbla-yandex", twin="all-softmax").learning_rate(3000) == pytest.approx(7e-4)


def test_a_short_run_warms_up_for_a_quarter_of_it():
    plan = TrainConfig(steps=100, batch_size=1, max_length=1, peak_lr=1.0)
    rates = [plan.learning_rate(step) for step in range(100)]
    assert max(rates) == rates[25] == 1.0 and rates[-1] == pytest.approx(0.1)


def test_a_batch_in_pieces_gives_the_losses_of_the_whole(dataset, tmp_path):
    run(dataset, tmp_path / "whole")
    run(dataset, tmp_path / "pieces", micro_batch_tokens=30)
    whole, pieces = (torch.tensor([float(loss) for _, loss in losses(tmp_path / name)]) for name in ("whole", "pieces"))
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


def test_losses_that_are_read_late_are_the_same_and_none_is_lost(dataset, tmp_path, monkeypatch):
    run(dataset, tmp_path / "each", weight_average=0.9)
    original = loop._Run.__init__

    def late(self, *arguments):
        original(self, *arguments)
        self.read_every = 5

    monkeypatch.setattr(loop._Run, "__init__", late)
    run(dataset, tmp_path / "late", weight_average=0.9)
    assert losses(tmp_path / "late") == losses(tmp_path / "each")
    assert (tmp_path / "late" / WEIGHTS).read_bytes() == (tmp_path / "each" / WEIGHTS).read_bytes()
