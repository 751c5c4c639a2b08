import json
import os
import signal
import sys
import textwrap
import threading

import numpy as np
import pytest

from tests.training.conftest import RECIPE, TINY
from zoo.bundle import Bundle
from zoo.errors import ConfigError
from zoo.models import presets
from zoo.training import study_table
from zoo.training.study import BASE, Plan, run_study, zoo_commands

STUB = textwrap.dedent(
    """
    import json, os, sys, time
    from pathlib import Path
    import numpy as np
    twin, seed, folder, seconds, fails, manifest = sys.argv[1:]
    seed, folder, seconds = int(seed), Path(folder), float(seconds)
    with (folder / "calls").open("a") as calls:
        calls.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    time.sleep(seconds)
    if twin == fails:
        sys.exit("out of memory, says the stub")
    ranks = np.random.default_rng(seed).integers(0, 100, 50).astype(np.int32)
    (folder / "reports").mkdir(exist_ok=True)
    np.save(folder / "reports/ranks.npy", ranks)
    row = {"Recall@10": float((ranks < 10).mean()), "Recall@50": 0.5, "NDCG@10": 0.1}
    report = {"metrics": {"gbla": row, "popularity": row}, "users": 50, "illegal_share": 0.0}
    (folder / "reports/eval.json").write_text(json.dumps(report))
    training = {"seconds_of_last_run": 1.0, "final_loss": 2.0, "best_step": 7, "best_valid_recall@10": None}
    manifest = json.loads(Path(manifest).read_text())
    (folder / "bundle.json").write_text(json.dumps(manifest | {"training": training}))
    """
)


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Return a maker of commands that leave in a run's folder what training and evaluation would."""
    folder, config = tmp_path_factory.mktemp("stub"), presets.resolve("gbla-tiny")
    signatures = {part.name: part.signature for part in presets.build(config, device="meta").parts()}
    Bundle.create(folder, config=presets.config_to_json(config), signatures=signatures).update([])

    def make(seconds=0.0, fails=""):
        def commands(plan, twin, seed, out):
            arguments = (twin, seed, out, seconds, fails, folder / "bundle.json")
            return [[sys.executable, "-c", STUB, *map(str, arguments)]]

        return commands

    return make


def plan_of(dataset, **changes):
    fields = {"preset": "gbla-tiny", "twins": (BASE, "bla", "causal"), "seeds": (0, 1), "data": dataset.path}
    return Plan(**{**fields, **changes})


def test_some_twins_may_be_trained_with_the_first_seed_only(dataset, tmp_path, stub):
    plan = plan_of(dataset, twins=(BASE, "causal"), seeds=(0, 1, 2), once=("bla", "no-conv"))
    study = run_study(plan, tmp_path, processes_per_gpu=8, commands=stub())
    assert [(row["twin"], row["seed"], row["state"]) for row in study["runs"]] == [
        *((twin, 0, "done") for twin in (BASE, "causal", "bla", "no-conv")),
        *((twin, seed, "done") for seed in (1, 2) for twin in (BASE, "causal")),
    ]
    page = (tmp_path / "study.md").read_text()
    assert "| bla | 1 |" in page and "| causal | 3 |" in page
    with pytest.raises(ConfigError, match="name one twice"):
        run_study(plan_of(dataset, twins=(BASE,), once=(BASE,)), tmp_path / "other")


def states(study):
    return {(row["twin"], row["seed"]): row["state"] for row in study["runs"]}


def calls(out, twin, seed):
    path = out / f"{twin}-seed{seed}" / "calls"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_first_seeds_come_first(dataset):
    plan = plan_of(dataset)
    assert plan.runs() == [(BASE, 0), ("bla", 0), ("causal", 0), (BASE, 1), ("bla", 1), ("causal", 1)]


def test_runs_are_spread_over_the_gpus_and_none_is_run_again(dataset, tmp_path, stub):
    lines = []
    settings = {"gpus": ["3", "5"], "processes_per_gpu": 1, "commands": stub(0.1), "tell": lines.append}
    study = run_study(plan_of(dataset, seeds=(0,)), tmp_path, **settings)
    assert set(states(study).values()) == {"done"}
    used = [calls(tmp_path, twin, 0) for twin in (BASE, "bla", "causal")]
    assert {gpu for gpus in used for gpu in gpus} == {"3", "5"} and all(len(gpus) == 1 for gpus in used)
    assert sum("done" in line for line in lines) == 3

    more = run_study(plan_of(dataset), tmp_path, **settings)
    assert set(states(more).values()) == {"done"} and len(more["runs"]) == 6
    assert [len(calls(tmp_path, BASE, seed)) for seed in (0, 1)] == [1, 1]


def test_a_failing_run_is_named_and_the_others_go_on(dataset, tmp_path, stub):
    lines = []
    study = run_study(plan_of(dataset), tmp_path, commands=stub(fails="bla"), processes_per_gpu=3, tell=lines.append)
    assert {state for (twin, _), state in states(study).items() if twin == "bla"} == {"failed"}
    assert {state for (twin, _), state in states(study).items() if twin != "bla"} == {"done"}
    assert any("FAILED bla seed 0: exit status 1: out of memory, says the stub" in line for line in lines)
    page = (tmp_path / "study.md").read_text()
    assert "- bla seed 0, failed: exit status 1: out of memory" in page and "| bla | 0 | - |" in page

    again = run_study(plan_of(dataset), tmp_path, commands=stub(), tell=lines.append)
    assert set(states(again).values()) == {"done"} and len(calls(tmp_path, BASE, 0)) == 1


def test_nothing_starts_after_the_deadline_and_what_runs_is_finished(dataset, tmp_path, stub):
    study = run_study(plan_of(dataset), tmp_path, commands=stub(0.5), deadline=0.2, tell=lambda line: None)
    assert states(study)[BASE, 0] == "done"
    assert {state for run, state in states(study).items() if run != (BASE, 0)} == {"not started"}
    assert "- causal seed 1, not started" in (tmp_path / "study.md").read_text()


def test_runs_that_take_too_long_are_stopped_and_can_be_resumed(dataset, tmp_path, stub):
    settings = {"processes_per_gpu": 3, "tell": lambda line: None}
    study = run_study(plan_of(dataset, seeds=(0,)), tmp_path, commands=stub(60), stop_after=1.0, **settings)
    assert set(states(study).values()) == {"stopped"} and study["seconds"] < 20
    again = run_study(plan_of(dataset, seeds=(0,)), tmp_path, commands=stub(), **settings)
    assert set(states(again).values()) == {"done"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_what_runs_and_keeps_what_there_is(dataset, tmp_path, stub, number):
    plan, quiet = plan_of(dataset, twins=(BASE,)), {"tell": lambda line: None}
    timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_study(plan, tmp_path, commands=stub(60), **quiet)
    timer.join()
    study = json.loads((tmp_path / "study.json").read_text())
    assert states(study) == {(BASE, 0): "stopped", (BASE, 1): "not started"} and study["seconds"] < 20
    assert set(states(run_study(plan, tmp_path, commands=stub(), **quiet)).values()) == {"done"}


def test_a_damaged_study_is_named_and_a_run_without_its_ranks_is_run_again(dataset, tmp_path, stub):
    plan, settings = plan_of(dataset, twins=(BASE,), seeds=(0,)), {"commands": stub(), "tell": lambda line: None}
    run_study(plan, tmp_path, **settings)
    (tmp_path / f"{BASE}-seed0/reports/ranks.npy").unlink()
    assert states(run_study(plan, tmp_path, **settings)) == {(BASE, 0): "done"}
    assert len(calls(tmp_path, BASE, 0)) == 2
    for text in ("{", "[]", '{"runs": [1]}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            run_study(plan, tmp_path, **settings)


def test_what_does_not_exist_is_named_before_anything_starts(dataset, tmp_path, stub):
    wrong = ({"twins": ("blah",)}, {"settings": {"speed": 1}}, {"seeds": ()}, {"seeds": (1, 0, 1)}, {"beams": 4})
    for changes in wrong:
        with pytest.raises(ConfigError):
            run_study(plan_of(dataset, **changes), tmp_path, commands=stub())
    with pytest.raises(ConfigError, match="processes per GPU is 0"):
        run_study(plan_of(dataset), tmp_path, commands=stub(), processes_per_gpu=0)
    assert not [*tmp_path.glob("*-seed*")]


def test_a_folder_with_another_recipe_is_refused(dataset, tmp_path, stub):
    one = {"commands": stub(), "tell": lambda line: None}
    run_study(plan_of(dataset, twins=(BASE,), seeds=(0,)), tmp_path, **one)
    with pytest.raises(ConfigError, match="another recipe"):
        run_study(plan_of(dataset, settings={"steps": 3}), tmp_path, **one)


def test_the_real_commands_train_and_evaluate(dataset, tmp_path):
    plan = plan_of(dataset, twins=("causal-softmax",), seeds=(4,), settings=RECIPE, overrides=TINY, beams=50)
    train, evaluate = zoo_commands(plan, BASE, 0, tmp_path)
    assert "--twin" not in train and evaluate[3] == "eval"
    study = run_study(plan, tmp_path, tell=lambda line: None)
    (row,) = study["runs"]
    assert row["state"] == "done", row
    ranks = study_table.load(tmp_path)[1]["causal-softmax/4"]
    assert (ranks < 10).mean() == row["metrics"]["gbla"]["Recall@10"]
    assert json.loads((tmp_path / "causal-softmax-seed4/bundle.json").read_text())["training"]["seed"] == 4


def test_a_difference_is_paired_over_users_and_seeds():
    draw = np.random.default_rng(0)
    base = {seed: draw.integers(0, 40, 4000) for seed in (0, 1)}
    worse = {seed: np.where(draw.random(4000) < 0.2, 99, ranks) for seed, ranks in base.items()} | {2: base[0]}
    mean, low, high = study_table.difference(worse, base)
    assert low < mean < high < 0 and mean == pytest.approx(-0.05, abs=0.01)
    assert study_table.difference({3: base[0]}, base) is None
    assert study_table.difference(base, base) == (0, 0, 0)


def test_the_page_gives_mean_spread_and_the_papers_number(dataset, tmp_path, stub):
    run_study(plan_of(dataset), tmp_path, commands=stub(), processes_per_gpu=6, tell=lambda line: None)
    study, ranks = study_table.load(tmp_path)
    page = study_table.page(study, ranks)
    assert page == (tmp_path / "study.md").read_text()
    values = [(ranks[f"base/{seed}"] < 10).mean() for seed in (0, 1)]
    expected = f"**gbla-tiny** (`base`) | 2 | {np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert expected in page and "| 0.2780 |" in page and "*popularity*" in page
    assert "Missing" not in page


@pytest.mark.slow
def test_the_real_commands_train_and_evaluate_sinkrec(dataset, tmp_path):
    sizes = {"d_model": 16, "num_heads": 1, "mlp_width": 16, "memory_dim": 8, "codebook_size": 8}
    settings = {"steps": 2, "batch_size": 8, "max_length": 6, "eval_every": 1}
    plan = plan_of(
        dataset, preset="sinkrec-tiny", twins=(BASE, "sasrec"), seeds=(3,), settings=settings, overrides=sizes, beams=50
    )
    study = run_study(plan, tmp_path, tell=lambda line: None)
    assert set(states(study).values()) == {"done"}, study["runs"]
    for row in study["runs"]:
        assert row["by_left_out"]["history"]["Recall@10"] == row["metrics"]["sinkrec"]["Recall@10"]
    assert "| sasrec | 3 |" in (tmp_path / "study.md").read_text()


def test_the_page_of_sinkrec_lists_every_run_and_what_was_published():
    ranks = {f"{twin}/{seed}": np.arange(40) + seed for twin in ("base", "sasrec") for seed in (0, 1)}
    values = {"Recall@10": 0.25, "Recall@50": 1.0, "NDCG@10": 0.1, "MRR@10": 0.1}
    run = {
        "state": "done", "seconds": 70.4, "users": 40, "training_seconds": 61.0, "best_step": 250,
        "best_valid_recall@10": 0.31, "metrics": {"sinkrec": values, "popularity": values},
        "by_left_out": {"history": values, "read": values, "nothing": values},
    }  # fmt: skip
    study = {
        "preset": "sinkrec-ml1m", "data": "ml-1m", "date": "2026-12-01", "recipe": {"steps": 250}, "beams": 100,
        "overrides": {"dropout": 0.3}, "machine": {"gpus": [], "processors": 2, "torch": "2.13"}, "seconds": 300.0,
        "processes_per_gpu": 1, "command": "python -m zoo.training.study",
        "runs": [{**run, "twin": twin, "seed": seed} for seed in (0, 1) for twin in ("base", "sasrec")],
    }  # fmt: skip
    page = study_table.page(study, ranks)
    for line in (
        "| base | 0 | 0.2500 | 1.0000 |",
        "| sasrec | 1 | 0.2250 | 1.0000 |",
        "| 0.3100 | 250 | 61 | 70 |",
        "| *HSTU-large, published* | - | 0.3294 | 0.5935 | 0.1893 | - |",
        "| base | 0.2500 ± 0.0000, 0.1000 ± 0.0000 |",
        "Model fields changed: dropout 0.3.",
        "meta-recsys/generative-recommenders",
    ):
        assert line in page, line
    assert "beams" not in page and "the paper" not in page
