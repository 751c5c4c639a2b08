import numpy as np
import pytest
from scipy import sparse

from zoo.data.text import embed_items
from zoo.errors import ConfigError

TEXTS = ["space war", "space robots", "love in paris", "paris love story", "M"]
# Users 0 and 1 have the first two items in common, users 2 and 3 the next two; the last item goes with the first ones.
CELLS = sparse.csr_array(np.array([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]], np.float32))


@pytest.mark.parametrize("method", ["tfidf", "cooccurrence", "tfidf+cooccurrence"])
def test_rows_have_unit_length_and_depend_on_the_seed_only(method):
    first = embed_items(TEXTS, CELLS, method=method, dims=3, seed=1)
    assert first.values.dtype == np.float32
    assert first.values.shape == (5, 6 if "+" in method else 3)
    assert np.linalg.norm(first.values, axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert np.array_equal(first.values, embed_items(TEXTS, CELLS, method=method, dims=3, seed=1).values)
    assert (first.method, first.note) == (method, "")


@pytest.mark.parametrize("method", ["tfidf", "cooccurrence", "tfidf+cooccurrence"])
def test_related_items_are_closer(method):
    values = embed_items(TEXTS, CELLS, method=method, dims=4).values
    assert values[0] @ values[1] > values[0] @ values[2] + 0.1
    assert values[2] @ values[3] > values[1] @ values[3] + 0.1


def test_an_item_without_text_lies_near_those_of_its_users():
    values = embed_items([*TEXTS[:4], ""], CELLS, dims=4).values
    assert values[4] @ values[0] > 0.5 > values[4] @ values[2]


def test_an_item_that_nothing_is_known_about_still_gets_a_direction():
    values = embed_items(["a b", "b c", "", ""], sparse.csr_array((2, 4), dtype=np.float32), dims=2).values
    assert np.linalg.norm(values, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    assert not np.allclose(values[2], values[3])


@pytest.mark.parametrize("method", ["tfidf", "tfidf+cooccurrence"])
def test_without_any_text_cooccurrence_is_used_and_said(method):
    result = embed_items([""] * 5, CELLS, method=method, dims=2)
    assert result.method == "cooccurrence"
    assert f'in place of "{method}"' in result.note
    assert np.array_equal(result.values, embed_items(TEXTS, CELLS, method="cooccurrence", dims=2).values)


@pytest.mark.parametrize("texts", [["one"], ["same words"] * 3], ids=["one item", "equal items"])
def test_tiny_catalogues_get_fewer_dimensions(texts):
    values = embed_items(texts, sparse.csr_array(np.ones((2, len(texts)), np.float32)), dims=64).values
    assert np.isfinite(values).all()
    assert len(values) == len(texts)


def test_unknown_methods_and_widths_are_errors():
    with pytest.raises(ConfigError, match='"bert"; choose one of tfidf, cooccurrence'):
        embed_items(TEXTS, CELLS, method="bert")
    with pytest.raises(ConfigError, match="0 dimensions"):
        embed_items(TEXTS, CELLS, dims=0)
