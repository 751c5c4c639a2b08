import json

import numpy as np
import pytest
import torch

from tests.data.builders import small_events
from zoo.data import load_dataset, prepare
from zoo.errors import ConfigError, DataError


@pytest.fixture
def dataset(write_atomic):
    return prepare(write_atomic([*small_events(), (6, 0, 1), (6, 1, 2), (6, 2, 3)]), codebook_size=8)


def test_arrays_have_the_promised_types_and_sizes(dataset):
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (7, 8, 33)
    assert dataset.user_offsets.dtype == dataset.timestamps.dtype == dataset.item_ids.dtype == np.int64
    assert dataset.items.dtype == np.int32
    assert dataset.item_tokens == [str(item) for item in range(8)]
    assert dataset.user_tokens() == [str(user) for user in range(7)]
    assert dataset.item_texts() == [""] * 8
    assert torch.from_numpy(dataset.items).dtype == torch.int32


def test_the_last_event_tests_the_one_before_validates_and_the_rest_trains(dataset):
    # User 2 has the items 2 3 4 5 6 in this order.
    for split, history, target in [("train", [2, 3], 4), ("valid", [2, 3, 4], 5), ("test", [2, 3, 4, 5], 6)]:
        found, item = dataset.history_and_target(2, split)
        assert (found.tolist(), item) == (history, target)
        assert found.base is dataset.items
    assert dataset.train_length(2) == 3
    assert dataset.train_lengths().tolist() == [3] * 6 + [1]


def test_a_user_of_three_events_has_an_empty_training_history(dataset):
    history, target = dataset.history_and_target(6, "train")
    assert (len(history), target) == (0, 0)
    assert dataset.history_and_target(6, "test")[0].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_the_vectorised_split_says_the_same_as_user_by_user(dataset, name):
    split = dataset.split(name)
    for user in range(dataset.num_users):
        history, target = dataset.history_and_target(user, name)
        assert dataset.items[split.start[user] : split.end[user]].tolist() == history.tolist()
        assert split.targets[user] == target
    assert np.array_equal(split.end, dataset.history_end(name))
    assert np.array_equal(split.targets, dataset.targets(name))
    assert split.targets.dtype == np.int32


def test_an_unknown_split_is_an_error(dataset):
    with pytest.raises(ConfigError, match='"dev"; choose one of train, valid, test'):
        dataset.split("dev")


def test_a_dataset_loads_as_it_was_prepared(dataset):
    loaded = load_dataset(dataset.path)
    assert np.array_equal(loaded.items, dataset.items)
    assert np.array_equal(loaded.semantic_ids.codes, dataset.semantic_ids.codes)
    assert loaded.info == dataset.info
    assert loaded.info["counts"]["events_per_user"] == {"min": 3, "median": 5.0, "p90": 5.0, "max": 5}


def test_a_folder_that_is_no_dataset_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no prepared dataset, it has no dataset\.json"):
        load_dataset(tmp_path / "nowhere")


def test_a_file_or_an_empty_path_is_no_dataset(write_atomic, dataset, monkeypatch):
    for path in (write_atomic(small_events()), dataset.path / "dataset.json"):
        with pytest.raises(DataError, match=r"is a file, but the folder of a prepared .* `zoo data FILE`"):
            load_dataset(path)
    monkeypatch.chdir(dataset.path)
    with pytest.raises(DataError, match=r'empty text "".* folder that `zoo data` wrote'):
        load_dataset("")


def test_another_schema_is_an_error(dataset):
    manifest = dataset.path / "dataset.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    with pytest.raises(DataError, match="schema 99, but this zoo reads schema 1"):
        load_dataset(dataset.path)
    manifest.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        load_dataset(dataset.path)


@pytest.mark.parametrize("file", ["events.parquet", "items.parquet", "users.parquet", "semantic_ids.safetensors"])
def test_missing_and_damaged_files_are_errors(dataset, file):
    content = bytearray((dataset.path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (dataset.path / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{file} is damaged"):
        load_dataset(dataset.path)
    (dataset.path / file).unlink()
    with pytest.raises(DataError, match=f"incomplete, {file} is missing"):
        load_dataset(dataset.path)
