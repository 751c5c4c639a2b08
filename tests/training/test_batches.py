import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.training.batches import TrainingBatches, histories


def batches_of(dataset, **settings):
    return TrainingBatches(dataset, **{"batch_size": 7, "max_length": 5, "targets_per_history": 3, **settings})


def take(batches, step, count):
    iterator = batches.from_step(step)
    return [next(iterator) for _ in range(count)]


def test_an_epoch_has_every_training_position_once_and_no_valid_or_test_event(dataset):
    batches = batches_of(dataset, max_length=1000, targets_per_history=1)
    seen = []
    for batch in take(batches, 0, batches.steps_per_epoch):
        for ids, length, codes in zip(batch.item_ids, batch.lengths, batch.target_codes, strict=True):
            seen.append((tuple(ids[:length].tolist()), tuple(codes[0].tolist())))
    expected = []
    for user in range(dataset.num_users):
        items = dataset.items[dataset.user_offsets[user] :][: dataset.train_length(user)]
        for t in range(1, len(items)):
            history = tuple(dataset.item_ids[items[:t]].tolist())
            expected.append((history, tuple(dataset.semantic_ids.codes[items[t]].tolist())))
    assert sorted(seen) == sorted(expected)


def test_further_targets_follow_in_time_and_stop_where_training_ends(dataset):
    codes = dataset.semantic_ids.codes
    item_of = {tuple(code): index for index, code in enumerate(codes.tolist())}
    for batch in take(batches_of(dataset, max_length=1000), 0, 5):
        for ids, length, targets, weights in zip(
            batch.item_ids, batch.lengths, batch.target_codes, batch.weights, strict=True
        ):
            assert weights[0] == 1
            items = [int(np.flatnonzero(dataset.item_ids == i)[0]) for i in ids[:length].tolist()]
            for target, weight in zip(targets.tolist(), weights.tolist(), strict=True):
                if weight:
                    items.append(item_of[tuple(target)])
            users = [
                u for u in range(dataset.num_users)
                if dataset.items[dataset.user_offsets[u] :][: dataset.train_length(u)][: len(items)].tolist() == items
            ]  # fmt: skip
            assert users, "a history and its targets are not the beginning of any training part"


def test_histories_are_cut_to_the_newest_events_and_padded_on_the_right(dataset):
    for batch in take(batches_of(dataset), 0, 10):
        assert batch.item_ids.shape[1] == batch.lengths.max() <= 5
        padding = torch.arange(batch.item_ids.shape[1]) >= batch.lengths[:, None]
        assert (batch.item_ids[padding] == 0).all()
        assert batch.item_ids.dtype == torch.int64 and batch.lengths.dtype == torch.int32


@given(st.integers(0, 60), st.integers(0, 3))
def test_batches_from_a_step_are_those_that_an_uninterrupted_run_sees(dataset, step, seed):
    batches = batches_of(dataset, seed=seed)
    whole = take(batches, 0, step + 2)[step:]
    resumed = take(batches_of(dataset, seed=seed), step, 2)
    for ours, theirs in zip(resumed, whole, strict=True):
        for name in ("item_ids", "lengths", "target_codes", "weights"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_epochs_and_seeds_differ(dataset):
    batches = batches_of(dataset)
    first, second = take(batches, 0, 1)[0], take(batches, batches.steps_per_epoch, 1)[0]
    other = take(batches_of(dataset, seed=1), 0, 1)[0]
    assert first.item_ids.shape != second.item_ids.shape or not torch.equal(first.item_ids, second.item_ids)
    assert first.item_ids.shape != other.item_ids.shape or not torch.equal(first.item_ids, other.item_ids)


def test_batches_hold_histories_of_like_length(dataset):
    batches = batches_of(dataset, batch_size=8, max_length=12)
    spread = [int(b.lengths.max() - b.lengths.min()) for b in take(batches, 0, batches.steps_per_epoch)]
    assert np.mean(spread) < 3


def test_histories_for_ranking_end_before_the_target(dataset):
    users = np.arange(dataset.num_users)
    for split in ("valid", "test"):
        ends = dataset.history_end(split)
        ids, lengths = histories(dataset, users, ends, 1000)
        for user in users:
            history, _ = dataset.history_and_target(int(user), split)
            assert ids[user, : lengths[user]].tolist() == dataset.item_ids[history].tolist()


def test_pieces_of_a_batch_hold_its_rows_within_the_tokens(dataset):
    batches = take(batches_of(dataset, batch_size=16, max_length=10), 0, 8)
    batch = max((batch for batch in batches if len(batch.lengths) == 16), key=lambda batch: int(batch.lengths.max()))
    assert [piece.item_ids.shape for piece in batch.pieces(0)] == [batch.item_ids.shape]
    pieces = list(batch.pieces(25))
    assert len(pieces) > 1 and sum(len(piece.lengths) for piece in pieces) == 16
    for piece in pieces:
        assert piece.item_ids.shape[1] == piece.lengths.max()
        assert piece.item_ids.numel() <= 25 or len(piece.lengths) == 1
    rows = [row for piece in reversed(pieces) for row in piece.item_ids.tolist()]
    assert [[i for i in row if i] for row in rows] == [[i for i in row if i] for row in batch.item_ids.tolist()]
