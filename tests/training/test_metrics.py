import numpy as np
import pytest

from zoo.training.baselines import LastItem, Popularity, rank
from zoo.training.evaluate import seen_items
from zoo.training.metrics import interval95, metrics_of, mrr, ndcg, ranks_of, recall


def test_metrics_of_a_ranking_written_out_by_hand():
    ranked = np.array([[5, 1, 2], [0, 1, 2], [7, 8, 9], [-1, -1, -1]])
    ranks = ranks_of(ranked, np.array([1, 0, 4, -1]))
    assert ranks.tolist() == [1, 0, 3, 3]
    assert recall(ranks, 1) == 0.25 and recall(ranks, 3) == 0.5
    assert ndcg(ranks, 3) == pytest.approx((1 / np.log2(3) + 1) / 4)
    assert mrr(ranks, 3) == pytest.approx((1 / 2 + 1) / 4) and mrr(ranks, 1) == 0.25
    assert metrics_of(ranks, (1,), (3,)) == {"Recall@1": 0.25, "NDCG@3": ndcg(ranks, 3), "MRR@10": mrr(ranks, 10)}


def test_the_interval_holds_the_share_and_narrows_with_users():
    low, high = interval95(0.2, 100)
    assert low < 0.2 < high
    assert interval95(0.2, 10_000)[1] - 0.2 < high - 0.2
    assert interval95(0.0, 50)[0] == pytest.approx(0.0, abs=1e-9)


def test_seen_items_never_rank_and_missing_places_are_empty():
    ranked = rank(np.array([[3.0, 2.0, 1.0]]), np.array([[True, False, False]]), 4)
    assert ranked.tolist() == [[1, 2, -1, -1]]


def test_popularity_counts_training_events_only(dataset):
    counts = np.zeros(dataset.num_items)
    for user in range(dataset.num_users):
        for item in dataset.items[dataset.user_offsets[user] :][: dataset.train_length(user)]:
            counts[item] += 1
    assert Popularity(dataset).scores(np.array([0])).tolist() == [counts.tolist()]


def test_last_item_recommends_what_followed_it_in_training(dataset):
    """Everybody walks up the item numbers, so the successor is known where the item was seen with one."""
    baseline = LastItem(dataset)
    index_of = {int(item_id): index for index, item_id in enumerate(dataset.item_ids)}
    start = dataset.user_offsets[0]
    last = int(dataset.items[start])
    following = index_of[(int(dataset.item_ids[last]) + 1) % 30]
    assert baseline.scores(np.array([last])).argmax() == following
    assert baseline.scores(np.array([-1])).argmax() == Popularity(dataset).counts.argmax()


def test_seen_items_are_those_before_the_end(dataset):
    users = np.arange(dataset.num_users)
    seen = seen_items(dataset, users, dataset.history_end("test"))
    for user in users:
        history, _ = dataset.history_and_target(int(user), "test")
        assert set(np.flatnonzero(seen[user])) == set(history.tolist())
