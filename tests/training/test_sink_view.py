"""One user's history through two small models: what is chosen, what is told, what is drawn, what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cli.test_cli import run
from tests.training.conftest import TINY, write_events
from tests.training.test_next_item import SMALL
from zoo import sink_view, verbs
from zoo.data import prepare
from zoo.errors import BundleError, ConfigError, DataError
from zoo.models.loading import load_model
from zoo.models.sink import sink
from zoo.training import train
from zoo.training.batches import timed_histories

SETTINGS = {"batch_size": 32, "max_length": 8, "steps": 3, "progress": False}


@pytest.fixture(scope="module")
def memory(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("memory")
    return train("sinkrec-tiny", data=dataset, out=out, overrides=SMALL, **SETTINGS)


@pytest.fixture(scope="module")
def plain(dataset, tmp_path_factory):
    out, small = tmp_path_factory.mktemp("plain"), SMALL
    return train("sinkrec-tiny", data=dataset, out=out, twin="plain-gated-deltanet", overrides=small, **SETTINGS)


def user_of(dataset, events):
    """Return a user with that many events before the test target, or more if negative is given."""
    lengths = dataset.history_end("test") - dataset.user_offsets[:-1]
    return int(np.flatnonzero(lengths == events)[0])


def test_both_models_are_measured_on_one_history_with_the_codes_of_the_one_that_has_a_memory(memory, plain, dataset):
    report = sink_view.inspect_sink(plain, against=memory)
    assert report.codes_of == str(memory.path) and report.dataset == dataset.name
    assert [model.name for model in report.models] == ["sinkrec-tiny, plain-gated-deltanet", "sinkrec-tiny"]
    user = dataset.user_tokens().index(report.user)
    items, times, _ = timed_histories(dataset, np.array([user]), dataset.history_end("test")[[user]], 8)
    assert report.items == [dataset.item_tokens[item] for item in items[0]]
    assert len(report.codes) == len(report.items) == report.events
    assert report.code_share == pytest.approx(report.codes.count(report.code) / report.events)
    for bundle, told in zip((plain, memory), report.models, strict=True):
        found = sink(load_model(bundle), items[0], times[0], torch.tensor(report.codes))
        assert told.influence == pytest.approx(found.influence.tolist()) and told.ratio == pytest.approx(found.ratio)
        assert found.code == report.code


def test_by_default_the_longest_history_that_fits_is_read_and_the_picture_lies_in_the_bundle(memory, dataset):
    report = sink_view.inspect_sink(memory)
    lengths = dataset.history_end("test") - dataset.user_offsets[:-1]
    assert report.events == lengths[lengths <= 8].max() and report.left_out == 0
    assert report.picture == str(memory.path / "reports/sink.png")
    assert (memory.path / "reports/sink.png").read_bytes().startswith(b"\x89PNG")


def test_of_a_longer_history_the_newest_events_are_read(memory, dataset, tmp_path):
    user = user_of(dataset, 13)
    report = sink_view.inspect_sink(memory, user=dataset.user_tokens()[user], out=tmp_path / "deep/er.png")
    end = int(dataset.history_end("test")[user])
    assert report.items == [dataset.item_tokens[item] for item in dataset.items[end - 8 : end]]
    assert (report.events, report.left_out) == (8, 5)
    assert (tmp_path / "deep/er.png").exists()


def test_where_no_history_fits_the_longest_is_cut(memory, dataset):
    (_, items, _, left_out) = sink_view._history(dataset, None, 1)
    lengths = dataset.history_end("test") - dataset.user_offsets[:-1]
    assert len(items) == 1 and left_out == lengths.max() - 1


def test_wrong_questions_are_named(memory, plain, dataset, tmp_path):
    gbla = verbs.init("gbla-tiny", tmp_path / "gbla", overrides=TINY)
    fresh = verbs.init("sinkrec-tiny", tmp_path / "fresh", overrides=SMALL)
    attention = train(
        "sinkrec-tiny", data=dataset, out=tmp_path / "a", overrides={**SMALL, "group": "A"}, **SETTINGS
    )  # fmt: skip
    other = prepare(write_events(tmp_path / "other.parquet", seed=9), out=tmp_path / "other", codebook_size=8)
    stranger = train("sinkrec-tiny", data=other, out=tmp_path / "stranger", overrides=SMALL, **SETTINGS)
    for error, message, bundle, settings in (
        (BundleError, "holds a gbla", gbla, {}),
        (BundleError, "holds a gbla", memory, {"against": gbla}),
        (DataError, "name a prepared dataset with --data", fresh, {}),
        (BundleError, "semantic_ids", fresh, {"data": dataset}),
        (ConfigError, "without a recurrence", attention, {}),
        (ConfigError, "has no memory", plain, {}),
        (ConfigError, "neither .* nor .* has a memory", plain, {"against": plain}),
        (BundleError, "stranger was trained on other items", memory, {"against": stranger}),
        (BundleError, "was trained on other items", memory, {"data": other}),
        (DataError, "has no user 'nobody'", memory, {"user": "nobody"}),
        (DataError, "no prepared dataset", memory, {"data": tmp_path / "absent"}),
        (ConfigError, "ends in .png", memory, {"out": tmp_path / "sink.pdf"}),
    ):
        with pytest.raises(error, match=message):
            sink_view.inspect_sink(bundle, **settings)


def test_a_dataset_that_has_gone_is_named_with_the_way_out(memory, monkeypatch):
    moved = {**memory.manifest, "training": {**memory.manifest["training"], "dataset_path": "/gone"}}
    monkeypatch.setattr(memory, "manifest", moved)
    with pytest.raises(DataError, match=r"trained on /gone.*--data"):
        sink_view.inspect_sink(memory)


def test_a_user_without_events_is_named(memory, dataset):
    offsets = dataset.user_offsets.copy()
    offsets[1:] = np.maximum(offsets[1:], offsets[0] + 1)
    empty = replace(dataset, user_offsets=np.concatenate([[offsets[1] - 1], offsets[1:]]))
    with pytest.raises(DataError, match="no event before the test target"):
        sink_view.inspect_sink(memory, data=empty, user=dataset.user_tokens()[0])


def test_a_picture_of_many_events_and_codes_is_drawn(tmp_path):
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(40, (900,), generator=draw)
    found = sink_view.Sink(torch.rand(900, dtype=torch.float64, generator=draw), codes, int(codes.mode().values), 0.1)
    silent = found._replace(influence=torch.zeros(900, dtype=torch.float64), ratio=0.0)
    panels = [sink_view.Panel("one", found), sink_view.Panel("none", silent)]
    sink_view.draw(panels, tmp_path / "it.png", title="a title")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_the_colours_go_to_the_most_frequent_codes_and_cover_every_event():
    codes = np.array([5, 5, 5, 1, 1, 2, 3, 4, 6, 7])
    marks = sink_view._marks(codes, 5)
    assert np.sum([mark for mark, _, _ in marks], axis=0).tolist() == [1] * 10
    assert [label for _, _, label in marks] == [
        "code 5, 30% of events", "code 1", "code 2", "code 3", "code 4", "2 other codes",
    ]  # fmt: skip


def test_the_command_prints_ratios_and_where_the_picture_is(memory, plain, dataset, tmp_path, capsys):
    picture = tmp_path / "it.png"
    words = ("inspect", "sink", memory.path, "--against", plain.path, "--out", picture)
    assert run(*words, "--data", dataset.path) == 0
    printed = capsys.readouterr().out
    assert "plain-gated-deltanet" in printed and "sink ratio" in printed and picture.name in printed
    assert run(*words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["models"]) == 2 and told["picture"] == str(picture)
    assert len(told["models"][0]["influence"]) == told["events"] == len(told["codes"])
    assert verbs.inspect("sink", bundle=memory, out=picture)["code"] == told["code"]
    assert run("inspect", "sink", memory.path, "--user", "nobody") == 2
    error = capsys.readouterr().err
    assert "has no user" in error and "Traceback" not in error


def test_the_help_teaches(capsys):
    assert run("inspect", "sink", "--help") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("sink ratio", "--against", "--user", "plain-gated-deltanet"):
        assert words in printed
