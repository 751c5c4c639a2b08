import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.data.trie import Trie
from zoo.errors import ConfigError
from zoo.models import presets
from zoo.retrieval import beam_search

V, M = 5, 3


def model():
    torch.manual_seed(0)
    config = presets.resolve(
        "gbla-tiny", overrides={"codebook_size": V, "num_digits": M, "d_model": 16, "head_dim": 8, "hash_rows": 32}
    )
    built = presets.build(config).eval()
    with torch.no_grad():
        built.heads.mul_(8)  # sharp, distinct scores
    return built


MODEL = model()


def catalogue(draw_seed: int, items: int) -> np.ndarray:
    every = np.array(list(itertools.product(range(V), repeat=M)))
    return np.random.default_rng(draw_seed).permutation(every)[:items].astype(np.int32)


def batch(rows: int):
    return torch.randint(0, 2**31, (rows, 6)), torch.tensor([6, 0, 3, 1][:rows], dtype=torch.int32)


def search(ids, lengths, **settings):
    return beam_search(MODEL.encode, MODEL.decode_step, ids, lengths, num_digits=M, codebook_size=V, **settings)


def score_every_item(ids, lengths, codes):
    targets = torch.from_numpy(codes.astype(np.int64)).expand(len(ids), -1, -1)
    return -MODEL(ids, lengths, targets)


@given(st.integers(0, 20), st.integers(1, 60))
def test_with_enough_beams_it_ranks_exactly_like_scoring_every_item(seed, items):
    codes = catalogue(seed, items)
    ids, lengths = batch(3)
    found = search(ids, lengths, beams=items, trie=Trie.from_codes(codes))
    expected = score_every_item(ids, lengths, codes).sort(dim=1, descending=True)
    torch.testing.assert_close(found.scores, expected.values.float(), rtol=1e-4, atol=1e-4)
    for row in range(3):
        gaps = expected.values[row].diff().abs() > 1e-3
        clear = torch.cat([torch.tensor([True]), gaps]) & torch.cat([gaps, torch.tensor([True])])
        assert torch.equal(found.items[row][clear], expected.indices[row][clear])
    assert torch.equal(torch.from_numpy(codes).long()[found.items], found.codes)


@given(st.integers(0, 20), st.integers(2, 40))
def test_seen_items_are_left_out_and_places_without_an_item_are_empty(seed, items):
    codes = catalogue(seed, items)
    ids, lengths = batch(2)
    seen = torch.zeros(2, items, dtype=torch.bool)
    seen[0, ::2] = True
    seen[1] = True
    found = search(ids, lengths, beams=items + 3, trie=Trie.from_codes(codes), seen=seen)
    assert found.items.shape == (2, items + 3)
    assert sorted(i for i in found.items[0].tolist() if i >= 0) == list(range(1, items, 2))
    assert (found.items[1] == -1).all() and (found.scores[1] == -torch.inf).all()


def test_few_beams_give_the_best_first_and_only_legal_items():
    codes = catalogue(1, 50)
    ids, lengths = batch(4)
    found = search(ids, lengths, beams=4, trie=Trie.from_codes(codes))
    assert (found.scores.diff(dim=1) <= 0).all()
    assert torch.equal(torch.from_numpy(codes).long()[found.items], found.codes)


def test_without_a_trie_it_writes_the_most_probable_codes_of_all():
    every = np.array(list(itertools.product(range(V), repeat=M)), dtype=np.int32)
    ids, lengths = batch(2)
    free = search(ids, lengths, beams=V**M, trie=None)
    bound = search(ids, lengths, beams=V**M, trie=Trie.from_codes(every))
    torch.testing.assert_close(free.scores, bound.scores, rtol=1e-5, atol=1e-5)
    assert (free.items == -1).all()


def test_an_empty_batch_and_wrong_settings():
    trie = Trie.from_codes(catalogue(0, 10))
    none = search(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), beams=3, trie=trie)
    assert none.items.shape == (0, 3)
    with pytest.raises(ConfigError, match="at least 1"):
        search(*batch(1), beams=0, trie=trie)
    with pytest.raises(ConfigError, match="only with a trie"):
        search(*batch(1), beams=2, trie=None, seen=torch.zeros(1, 10, dtype=torch.bool))
