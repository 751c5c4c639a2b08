import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.data import Trie
from zoo.errors import DataError, ShapeError

unique_codes = st.integers(1, 4).flatmap(
    lambda digits: st.lists(st.tuples(*[st.integers(0, 4)] * digits), min_size=1, max_size=40, unique=True)
)


def walk(trie: Trie, prefix: tuple[int, ...]) -> int:
    node = 0
    for digit in prefix:
        codes, nodes, valid = trie.children(torch.tensor(node))
        node = int(nodes[valid & (codes == digit)])
    return node


@settings(max_examples=60, deadline=None)
@given(unique_codes)
def test_children_equal_brute_force_and_leaves_are_items(rows):
    trie = Trie.from_codes(np.array(rows))
    digits = len(rows[0])
    prefixes = {row[:depth] for row in rows for depth in range(digits)}
    assert trie.num_nodes == len(prefixes)
    for prefix in prefixes:
        codes, nodes, valid = trie.children(torch.tensor([walk(trie, prefix)]), trie.widths[len(prefix)])
        expected = sorted({row[len(prefix)] for row in rows if row[: len(prefix)] == prefix})
        assert codes[valid].tolist() == expected
        assert (codes[~valid] == 0).all()
        assert (nodes[~valid] == 0).all()
    for index, row in enumerate(rows):
        assert walk(trie, row) == index


@settings(max_examples=30, deadline=None)
@given(unique_codes)
def test_widths_are_the_largest_number_of_children_at_each_depth(rows):
    trie = Trie.from_codes(np.array(rows))
    for depth, width in enumerate(trie.widths):
        children = {}
        for row in rows:
            children.setdefault(row[:depth], set()).add(row[depth])
        assert width == max(map(len, children.values()))


def test_children_of_a_batch_of_beams_have_one_static_shape():
    trie = Trie.from_codes(np.array([[0, 1], [0, 3], [2, 0]]))
    codes, nodes, valid = trie.children(torch.tensor([[0, 1, 2], [2, 2, 0]], dtype=torch.int32))
    assert codes.shape == nodes.shape == valid.shape == (2, 3, 2)
    assert codes[0].tolist() == [[0, 2], [1, 3], [0, 0]]
    assert nodes[0].tolist() == [[1, 2], [0, 1], [2, 0]]
    assert valid[0].tolist() == [[True, True], [True, True], [True, False]]
    assert (codes.dtype, nodes.dtype, valid.dtype) == (torch.int64, torch.int64, torch.bool)


def test_the_arrays_move_to_a_device_and_keep_their_types():
    trie = Trie.from_codes(np.array([[0, 1], [1, 1]])).to("meta")
    assert trie.child_codes.device.type == "meta"
    assert (trie.child_offsets.dtype, trie.child_codes.dtype, trie.child_nodes.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )


def test_equal_ids_are_an_error_that_names_both_items():
    with pytest.raises(DataError, match=r"items 0 and 2 share the codes \[1, 2\]"):
        Trie.from_codes(np.array([[1, 2], [0, 0], [1, 2]]))


def test_no_items_wrong_shapes_and_widths_are_errors():
    with pytest.raises(DataError, match="at least one item"):
        Trie.from_codes(np.zeros((0, 4), np.int32))
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        Trie.from_codes(np.arange(3))
    with pytest.raises(ShapeError, match="takes 1 to 2"):
        Trie.from_codes(np.array([[0], [1]])).children(torch.tensor([0]), 3)


def test_a_hundred_thousand_items_are_quick():
    codes = np.unique(np.random.default_rng(0).integers(0, 256, (100_000, 4)), axis=0)
    trie = Trie.from_codes(codes)
    assert trie.child_codes.shape[0] == trie.num_nodes - 1 + len(codes)
