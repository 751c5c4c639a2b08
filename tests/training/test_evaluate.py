import json

import numpy as np
import pytest

from tests.training.conftest import TINY, write_events
from zoo.data import prepare
from zoo.errors import BundleError, ConfigError
from zoo.models.loading import load_model
from zoo.training import evaluate, train
from zoo.training.evaluate import rank_users
from zoo.training.metrics import recall


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """The walks are learnable: the next item follows from the last one."""
    return train(
        "gbla-tiny", data=dataset, out=tmp_path_factory.mktemp("trained"), overrides={**TINY, "dropout": 0.0},
        progress=False, steps=300, batch_size=32, max_length=10, peak_lr=5e-3, warmup_steps=20, eval_every=0,
    )  # fmt: skip


def test_the_report_has_every_metric_for_the_model_and_both_baselines(trained, dataset):
    report = evaluate(trained, data=dataset, progress=False)
    assert set(report.metrics) == {"gbla", "popularity", "last item"}
    for row in report.metrics.values():
        assert set(row) == {"Recall@5", "Recall@10", "Recall@50", "NDCG@5", "NDCG@10", "MRR@10"}
        assert row["Recall@5"] <= row["Recall@10"] <= row["Recall@50"] <= 1
    assert 0 <= report.illegal_share <= 1 and report.users == dataset.num_users
    assert json.loads((trained.path / "reports/eval.json").read_text())["metrics"] == report.metrics


def test_the_rank_of_every_user_is_kept(trained, dataset):
    report = evaluate(trained, data=dataset, progress=False)
    ranks = np.load(trained.path / "reports/ranks.npy")
    assert len(ranks) == dataset.num_users and recall(ranks, 5) == report.metrics["gbla"]["Recall@5"]


def test_the_ranking_of_a_user_does_not_depend_on_who_shares_the_batch(trained, dataset):
    model = load_model(trained)
    users = np.array([7, 0, 12, 3, 19])
    settings = {"max_length": 10, "beams": 10, "count_illegal": False}
    together, _ = rank_users(model, dataset, users, "test", batch_size=3, **settings)
    alone, _ = rank_users(model, dataset, users, "test", batch_size=1, **settings)
    assert np.array_equal(together, alone)


def test_a_trained_model_beats_popularity_where_order_decides(trained, dataset):
    report = evaluate(trained, data=dataset, progress=False)
    assert report.metrics["gbla"]["Recall@5"] > 2 * report.metrics["popularity"]["Recall@5"]


def test_wrong_questions_are_named(trained, dataset, tmp_path):
    with pytest.raises(ConfigError, match="50 or more"):
        evaluate(trained, data=dataset, beams=10, progress=False)
    with pytest.raises(ConfigError, match="valid or test"):
        evaluate(trained, data=dataset, split="train", progress=False)
    other = prepare(write_events(tmp_path / "other.parquet", seed=1), out=tmp_path / "out", codebook_size=8)
    with pytest.raises(BundleError, match="other semantic IDs"):
        evaluate(trained, data=other, progress=False)
