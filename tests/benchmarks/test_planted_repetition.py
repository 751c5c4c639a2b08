"""The task with planted repetition: what a history holds, what is refused, and what SinkRec's recurrence keeps."""

import json

import pytest
import torch

from benchmarks import planted_repetition, plot, run
from benchmarks.planted_repetition import OURS, PLAIN, Task, configuration, plant
from zoo.errors import ConfigError


def test_keys_and_values_stand_early_and_late_and_a_few_others_repeat_between():
    task = Task(items=20, pairs=3, distractors=2, rounds=2)
    items, keys = plant(task, 10, 5, torch.Generator().manual_seed(0))
    assert items.shape == (5, 6 + 10 + 12) and keys.tolist() == [16, 18, 20, 22, 24, 26]
    for history in items.tolist():
        early, repeated, late = history[:6], history[6:16], history[16:]
        follows = dict(zip(early[::2], early[1::2], strict=True))
        assert len(set(early)) == 6 and len(set(repeated)) <= 2 and not set(repeated) & set(early)
        for first in (0, 6):
            walk = late[first : first + 6]
            assert sorted(walk[::2]) == sorted(follows) and [follows[key] for key in walk[::2]] == walk[1::2]
    assert len({tuple(history[:6]) for history in items.tolist()}) == 5


def test_histories_depend_on_the_generator_alone():
    first, again, other = (plant(Task(), 7, 2, torch.Generator().manual_seed(seed)).items for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_models_differ_in_what_the_twin_says_and_in_nothing_else():
    ours, plain = (configuration(name, Task(), 16) for name in (OURS, PLAIN))
    assert ours.memory and not plain.memory and not plain.time
    assert plain == ours.with_overrides(memory=False, time=False) and ours.mixers == "T"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": PLAIN}, "has no memory"),
        ({"models": f"{OURS},hstu"}, "no model 'hstu'"),
        ({"distractors": 30}, "does not hold"),
        ({"distractors": 0}, "does not hold"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        next(planted_repetition.measure(**settings))


def test_it_runs_to_its_table_and_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planted_repetition, "BATCH", 2)
    monkeypatch.setattr(planted_repetition, "EVALUATED", 2)
    monkeypatch.setattr(planted_repetition, "INSPECTED", 2)
    words = ["planted_repetition", "--seeds", "0,1", "--steps", "2", "--gap", "6", "--gaps", "0,6"]
    assert run.main([*words, "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "hit@1, gap 6" in printed and PLAIN in printed and "Mean over 2 seeds" in printed
    result = tmp_path / "planted_repetition.json"
    models = json.loads(result.read_text())["rows"][0]["models"]
    assert models[OURS]["history"]["codes"] == models[PLAIN]["history"]["codes"]
    assert models[OURS]["repeats_share_of_events"] == pytest.approx(6 / 22)
    image = tmp_path / "it.png"
    assert plot.main(["planted_repetition", "--result", str(result), "--out", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
