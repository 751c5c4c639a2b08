import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from zoo.data import SemanticIds, residual_kmeans
from zoo.errors import ConfigError, DataError, ShapeError


def random_ids(items=50, levels=2, size=8, seed=0) -> SemanticIds:
    embeddings = np.random.default_rng(seed).standard_normal((items, 6))
    return residual_kmeans(embeddings, 10 * np.arange(items), levels=levels, codebook_size=size)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(2, 8), st.integers(0, 9))
def test_every_item_has_its_own_id_and_is_found_by_it(items, levels, size, seed):
    # Few distinct points and many equal ones: fewer centroids than codes, and collisions.
    random = np.random.default_rng(seed)
    points = random.standard_normal((items, 3))[random.integers(0, items, items)]
    if np.unique(points, axis=0, return_counts=True)[1].max() > size:
        return
    try:
        ids = residual_kmeans(points, np.arange(items), levels=levels, codebook_size=size, seed=seed)
    except DataError as error:
        assert "last digit" in str(error)
        return
    assert ids.codes.shape == (items, levels + 1)
    assert len(np.unique(ids.codes, axis=0)) == items
    assert ids.items_of(ids.codes).tolist() == list(range(items))
    assert np.isfinite(ids.codebooks).all()
    assert (np.diff(ids.level_errors) <= 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 9), min_size=3, max_size=3), min_size=1, max_size=30))
def test_illegal_codes_have_no_item(rows):
    ids = random_ids()
    table = {tuple(row): index for index, row in enumerate(ids.codes.tolist())}
    assert ids.items_of(np.array(rows)).tolist() == [table.get(tuple(row), -1) for row in rows]


def test_items_of_keeps_the_leading_shape():
    ids = random_ids(items=12)
    assert ids.items_of(ids.codes.reshape(3, 4, 3)).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert ids.items_of(ids.codes[5]) == 5
    with pytest.raises(ShapeError, match="3 digits"):
        ids.items_of(ids.codes[:, :2])


def test_codes_and_centroids_rebuild_the_embedding_up_to_the_reported_error():
    points = np.random.default_rng(1).standard_normal((60, 4)).astype(np.float32)
    ids = residual_kmeans(points, np.arange(60), levels=2, codebook_size=16)
    rebuilt = sum(ids.codebooks[level][ids.codes[:, level]] for level in range(2))
    error = np.square(points - rebuilt).sum() / np.square(points - points.mean(axis=0)).sum()
    assert error == pytest.approx(ids.level_errors[1], rel=1e-4)


def test_fewer_items_than_codes_use_fewer_centroids():
    ids = random_ids(items=3, levels=3, size=256)
    assert ids.codebooks.shape == (3, 256, 6)
    assert (ids.codebooks[:, 3:] == 0).all()
    assert ids.figures()["quantisation_error"] == pytest.approx([0, 0, 0], abs=1e-9)


def test_equal_items_are_numbered_in_the_order_of_their_index():
    points = np.repeat(np.eye(2), 3, axis=0)[[0, 3, 1, 4, 2, 5]]
    ids = residual_kmeans(points, np.arange(6), levels=1, codebook_size=4)
    assert ids.codes[:, 1].tolist() == [0, 0, 1, 1, 2, 2]
    figures = ids.figures()
    assert (figures["collision_rate"], figures["largest_collision_group"], figures["groups"]) == (1.0, 3, 2)
    assert figures["code_use"] == [0.5]
    assert figures["perplexity"] == pytest.approx([2.0])


def test_more_equal_items_than_the_last_digit_can_tell_apart_are_an_error():
    with pytest.raises(DataError, match=r"5 items share the same 2 codes, but the last digit tells only 4 apart; give"):
        residual_kmeans(np.zeros((5, 2)), np.arange(5), levels=2, codebook_size=4)


def test_the_same_seed_gives_the_same_codes():
    assert (random_ids().codes == random_ids().codes).all()


def test_many_items_go_through_mini_batches(monkeypatch):
    monkeypatch.setattr("zoo.data.semantic_ids._WHOLE_KMEANS_ITEMS", 100)
    ids = random_ids(items=400, levels=2, size=16)
    assert ids.items_of(ids.codes).tolist() == list(range(400))
    assert (random_ids(items=400, levels=2, size=16).codes == ids.codes).all()


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [(np.zeros((0, 3)), "at least one item"), (np.array([[0.0], [np.nan]]), "item 1 holds NaN")],
    ids=["empty", "nan"],
)
def test_embeddings_that_cannot_be_clustered_are_an_error(embeddings, message):
    with pytest.raises(DataError, match=message):
        residual_kmeans(embeddings, np.arange(len(embeddings)))


@pytest.mark.parametrize(("levels", "size"), [(0, 256), (3, 1), (7, 256)])
def test_impossible_sizes_are_an_error(levels, size):
    with pytest.raises(ConfigError, match=f"{levels} levels of {size} codes"):
        residual_kmeans(np.zeros((2, 2)), np.arange(2), levels=levels, codebook_size=size)


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 0.0])
def test_impossible_seeds_are_an_error(seed):
    with pytest.raises(ConfigError, match=f"seed is {seed}; "):
        residual_kmeans(np.zeros((2, 2)), np.arange(2), levels=2, codebook_size=4, seed=seed)


def test_a_saved_table_loads_equal_with_its_trie_and_the_same_bytes(tmp_path):
    ids = random_ids()
    ids.save(tmp_path / "a.safetensors")
    loaded = SemanticIds.load(tmp_path / "a.safetensors")
    for name in ("codes", "item_ids", "codebooks", "level_errors"):
        assert np.array_equal(getattr(loaded, name), getattr(ids, name))
        assert getattr(loaded, name).dtype == getattr(ids, name).dtype
    assert loaded.figures() == ids.figures()
    stored = load_file(tmp_path / "a.safetensors")
    assert np.array_equal(stored["trie.child_offsets"], ids.trie.child_offsets.numpy())
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_missing_damaged_and_foreign_files_are_errors(tmp_path):
    path = tmp_path / "ids.safetensors"
    with pytest.raises(DataError, match="do not exist"):
        SemanticIds.load(path)
    random_ids().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged"):
        SemanticIds.load(path)
    save_file({"codes": np.zeros((1, 2), np.int32)}, path)
    with pytest.raises(DataError, match="schema None"):
        SemanticIds.load(path)


def test_a_trie_that_is_not_that_of_the_codes_is_found(tmp_path):
    path = tmp_path / "ids.safetensors"
    ids = random_ids()
    ids.save(path)
    content = bytearray(path.read_bytes())
    swapped = ids.trie.child_nodes.numpy().tobytes()
    at = content.find(swapped)
    content[at : at + 4] = content[at + 4 : at + 8]
    path.write_bytes(content)
    with pytest.raises(DataError, match="not that of its codes"):
        SemanticIds.load(path)
