"""What the benchmarks of SinkRec's cost compute and print; they are timed on a GPU, and steps on a CPU too."""

import json

import pytest
import torch

from benchmarks import sinkrec_cost, sinkrec_step, timing
from zoo.errors import ConfigError, ParityError
from zoo.models.sinkrec import SinkRec

TINY = {"preset": "sinkrec-tiny", "items": 50}


def test_the_cost_over_length_compares_with_the_sasrec_twin_at_equal_tokens(played):
    rows = list(sinkrec_cost.measure(**TINY, lengths="8,40", tokens=40))
    assert [(row["length"], row["batch"]) for row in rows] == [(8, 5), (40, 1)]
    assert all(row["twin_over_ours"] == {"training": 1, "prefill": 1} and not row["notes"] for row in rows)
    assert "SASRec / ours" in sinkrec_cost.table(json.loads(json.dumps(rows)))


def test_what_runs_out_of_memory_or_takes_too_long_is_said_and_not_run_again(played, monkeypatch):
    calls = []

    def steps(step, count, **_):
        calls.append(count)
        if len(calls) == 3:  # the twin's training
            raise torch.OutOfMemoryError("of 141 GB")
        return timing.Timing(9e3 if len(calls) == 4 else 1.0, 1.0, 1.0, 3), 2.0

    monkeypatch.setattr(timing, "time_steps", steps)
    rows = list(sinkrec_cost.measure(**TINY, lengths="8,16", tokens=16, most_seconds=5.0))
    assert len(calls) == 4 + 2 and rows[1]["sasrec"] == {}
    text = sinkrec_cost.table(rows)
    assert "sasrec training runs out of memory at L 8." in text and "sasrec prefill takes over 5 s at L 8." in text


def test_the_step_is_timed_after_histories_of_different_lengths():
    rows = list(sinkrec_step.measure(**TINY, events="5,70", calls=2))
    assert [row["events"] for row in rows] == [5, 70]
    assert rows[0]["state_mib"]["ours"] == rows[1]["state_mib"]["ours"]
    assert rows[0]["state_mib"]["sasrec"] < rows[1]["state_mib"]["sasrec"]
    text = sinkrec_step.table(json.loads(json.dumps(rows)))
    assert "SASRec twin state MiB" in text and "After 70 events a step of ours takes" in text
    (row,) = sinkrec_step.measure(**TINY, events="5", calls=1, twin="")
    assert list(row["eager_ms"]) == ["ours"]


def test_a_wrong_step_is_refused(monkeypatch):
    right = SinkRec.step
    monkeypatch.setattr(SinkRec, "step", lambda *arguments: (-right(*arguments)[0], None))
    with pytest.raises(ParityError, match="the step is not timed"):
        list(sinkrec_step.measure(**TINY, events="5", calls=1))


def test_what_makes_no_sense_is_named():
    for wrong in ({"events": ""}, {"events": "0"}, {"preset": "gbla-tiny"}):
        with pytest.raises(ConfigError):
            list(sinkrec_step.measure(**{**TINY, "events": "5", **wrong}))
