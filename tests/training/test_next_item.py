"""SinkRec's objective: whole histories in, every later event a target, the catalogue ranked by score."""

import csv
import signal

import numpy as np
import pytest
import torch

from zoo.errors import ConfigError
from zoo.models import presets
from zoo.models.loading import load_model
from zoo.models.sinkrec import SinkRec
from zoo.training import evaluate, recipe, train
from zoo.training.batches import SequenceBatches, timed_histories
from zoo.training.loop import _Run
from zoo.training.metrics import ranks_of
from zoo.training.ranking import rank_users_by_score, target_ranks

SMALL = {"d_model": 32, "num_heads": 2, "key_dim": 16, "value_dim": 16, "head_dim": 16, "mlp_width": 64}
SMALL |= {"memory_dim": 16, "codebook_size": 8, "window": 8, "num_loops": 1, "group": "TA"}
SETTINGS = {"batch_size": 32, "max_length": 10, "peak_lr": 5e-3, "warmup_steps": 20, "progress": False}


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """The walks are learnable: the next item follows from the last one."""
    out = tmp_path_factory.mktemp("trained")
    return train("sinkrec-tiny", data=dataset, out=out, overrides=SMALL, steps=150, eval_every=50, **SETTINGS)


@pytest.mark.parametrize("max_length", [2, 3, 7, 1000])
def test_every_event_but_a_users_first_is_a_target_once_an_epoch(dataset, max_length):
    batches = SequenceBatches(dataset, batch_size=5, max_length=max_length)
    wanted = {
        (int(dataset.timestamps[t]), int(dataset.items[t]))
        for start, length in zip(dataset.user_offsets, dataset.train_lengths(), strict=False)
        for t in range(start + 1, start + length)
    }
    found = []
    taken = batches.from_step(0)
    for _ in range(batches.steps_per_epoch):
        batch = next(taken)
        assert batch.items.shape[1] <= max_length and batch.targets == float((batch.lengths - 1).sum())
        for row, length in enumerate(batch.lengths):
            found += zip(batch.times[row, 1:length].tolist(), batch.items[row, 1:length].tolist(), strict=True)
    assert set(found) == wanted
    assert len(found) == sum(max(0, length - 1) for length in dataset.train_lengths())


def test_a_batch_in_pieces_has_the_same_targets(dataset):
    batch = next(SequenceBatches(dataset, batch_size=16, max_length=12).from_step(0))
    pieces = list(batch.pieces(30))
    assert len(pieces) > 1 and sum(piece.targets for piece in pieces) == batch.targets
    assert all(piece.items.numel() <= 30 or len(piece.lengths) == 1 for piece in pieces)
    (whole,) = batch.pieces(0)
    assert torch.equal(whole.items, batch.items) and torch.equal(whole.times, batch.times)


def test_histories_come_with_their_times(dataset):
    users, ends = np.array([3, 0]), dataset.history_end("test")[[3, 0]]
    items, times, lengths = timed_histories(dataset, users, ends, 4)
    for row, end in enumerate(ends):
        assert items[row, : lengths[row]].tolist() == dataset.items[end - lengths[row] : end].tolist()
        assert times[row, : lengths[row]].tolist() == dataset.timestamps[end - lengths[row] : end].tolist()


def test_a_trained_model_beats_popularity_where_order_decides(trained, dataset):
    report = evaluate(trained, data=dataset, progress=False)
    assert set(report.metrics) == {"sinkrec", "popularity", "last item"} and report.illegal_share == 0
    assert report.metrics["sinkrec"]["Recall@5"] > 1.5 * report.metrics["popularity"]["Recall@5"], report.metrics


def test_the_ranking_leaves_out_what_a_user_had_and_does_not_depend_on_the_batch(trained, dataset):
    model, users = load_model(trained), np.array([7, 0, 12, 3])
    together, alone = (
        rank_users_by_score(model, dataset, users, "test", max_length=10, most=500, batch_size=size) for size in (4, 1)
    )
    assert np.array_equal(together, alone) and together.shape == (4, 500)
    for row, user in enumerate(users):
        had = dataset.items[dataset.user_offsets[user] : dataset.history_end("test")[user]]
        ranked = together[row][together[row] >= 0]
        assert not set(had) & set(ranked) and len(ranked) == len(set(ranked)) == dataset.num_items - len(set(had))


def test_ranks_by_what_is_left_out_are_those_of_the_rankings(dataset):
    config = presets.resolve("sinkrec-tiny", overrides={**SMALL, "num_items": dataset.num_items})
    model, users = presets.build(config).eval(), np.arange(dataset.num_users)
    ranks = target_ranks(model, dataset, users, "test", max_length=3)
    for policy, exclude in (("history", True), ("nothing", False)):
        ranked = rank_users_by_score(model, dataset, users, "test", max_length=3, most=500, exclude_seen=exclude)
        found = ranks_of(ranked, dataset.targets("test"))
        assert np.array_equal(ranks[policy], np.where(found == 500, dataset.num_items, found))
    assert (ranks["history"] <= ranks["read"]).all() and (ranks["read"] <= ranks["nothing"]).all()
    assert (ranks["history"] < ranks["read"]).any() and (ranks["read"] < ranks["nothing"]).any()


def test_the_report_gives_the_metrics_by_what_is_left_out(trained, dataset):
    report = evaluate(trained, data=dataset, progress=False)
    assert report.by_left_out["history"] == report.metrics["sinkrec"]
    whole = evaluate(trained, data=dataset, progress=False, exclude_seen=False)
    assert whole.metrics["sinkrec"] == report.by_left_out["nothing"] and whole.by_left_out == report.by_left_out


@pytest.mark.parametrize("max_length", [4, 13])
def test_the_sasrec_twin_sees_all_that_it_is_trained_on(dataset, tmp_path, max_length):
    settings = {**SETTINGS, "max_length": max_length, "steps": 1, "eval_every": 0}
    sizes = {name: value for name, value in SMALL.items() if name not in ("num_loops", "group")}
    model = load_model(train("sinkrec-tiny", twin="sasrec", data=dataset, out=tmp_path, overrides=sizes, **settings))
    assert model.config.window == max_length and model.config.mixers == "AAAA"
    items = torch.randint(dataset.num_items, (1, max_length))
    first = items.clone()
    first[0, 0] = (first[0, 0] + 1) % dataset.num_items
    times, length = torch.zeros_like(items), torch.tensor([max_length], dtype=torch.int32)
    with torch.no_grad():
        assert not torch.equal(model.users(items, times, length), model.users(first, times, length))


def test_the_published_setup_trains_on_the_validation_event_too(dataset):
    batches = SequenceBatches(dataset, batch_size=5, max_length=1000, held_out=1)
    taken = batches.from_step(0)
    rows = [row for _ in range(batches.steps_per_epoch) for row in _rows(next(taken))]
    valid, test = (
        {(int(dataset.items[end]), int(dataset.timestamps[end])) for end in dataset.history_end(split)}
        for split in ("valid", "test")
    )
    assert valid == {row[-1] for row in rows} and not test & {event for row in rows for event in row}
    with pytest.raises(ConfigError, match="held_out 1"):
        recipe("sinkrec-tiny", overrides={"held_out": 1})
    assert recipe("sinkrec-tiny", overrides={"held_out": 1, "eval_every": 0}).held_out == 1


def _rows(batch):
    for items, times, length in zip(batch.items.tolist(), batch.times.tolist(), batch.lengths.tolist(), strict=True):
        yield list(zip(items[:length], times[:length], strict=True))


def test_averaged_weights_are_kept_with_the_codebooks_of_now(dataset, tmp_path, monkeypatch):
    """Codebooks are averages already; those of the first step would say nothing."""
    runs, end = [], _Run.bundle
    monkeypatch.setattr(_Run, "bundle", lambda self, *rest: runs.append(self) or end(self, *rest))
    settings = {**SETTINGS, "steps": 5, "eval_every": 0, "weight_average": 0.9}
    train("sinkrec-tiny", data=dataset, out=tmp_path, overrides=SMALL, **settings)
    (run,) = runs
    buffers = dict(run.kept.named_buffers())
    assert buffers and all(torch.equal(buffer, buffers[name]) for name, buffer in run.model.named_buffers())
    assert not torch.equal(run.kept.items.weight, run.model.items.weight)


def test_the_log_tells_how_the_codebooks_are(trained):
    with (trained.path / "training/log.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["valid_recall@10"]]
    assert len(rows) == 3
    assert all(1 < float(row["codebook_perplexity"]) <= 8 and 0 <= float(row["dead_codes"]) < 1 for row in rows)
    assert all(float(row["commitment"]) > 0 for row in rows)


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(dataset, tmp_path, monkeypatch):
    """Codebooks, their moving averages and the draws of k-means and dropout included."""
    run = {"data": dataset, "overrides": {**SMALL, "dropout": 0.1}, "eval_every": 0, "steps": 6, **SETTINGS}
    whole = load_model(train("sinkrec-tiny", out=tmp_path / "whole", **run)).state_dict()
    forward, calls = SinkRec.forward, []

    def interrupting(self, *arguments):
        calls.append(None)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SinkRec, "forward", interrupting)
        train("sinkrec-tiny", out=tmp_path / "parts", **run)
    assert len(calls) == 4 and not (tmp_path / "parts/bundle.json").exists()
    again = load_model(train("sinkrec-tiny", out=tmp_path / "parts", **run)).state_dict()
    assert all(torch.equal(x, again[name]) for name, x in whole.items())


def test_a_history_of_one_event_is_refused(dataset):
    with pytest.raises(ConfigError, match="max_length is 1"):
        SequenceBatches(dataset, batch_size=2, max_length=1)
