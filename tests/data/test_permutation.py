"""The permutation: a bijection of any size, different for every seed, the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base.errors import DataError
from dtlayout.data.permutation import hash_integers, permute

any_seed = st.integers(-(1 << 70), 1 << 70)


@given(st.integers(1, 3000), any_seed)
def test_it_is_a_bijection(size, seed):
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed)), np.arange(size))


@given(st.integers(1, 1 << 60), any_seed, st.data())
def test_one_place_is_found_without_the_others(size, seed, data):
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    together = permute(places, size, seed)
    assert together.tolist() == [int(permute(place, size, seed)) for place in places]
    assert ((together >= 0) & (together < size)).all()
    assert len(set(together.tolist())) == len(set(places))


def test_the_shape_is_kept():
    assert permute(np.zeros((2, 3), dtype=int), 10, 0).shape == (2, 3)
    assert permute([], 10, 0).shape == (0,)


def test_it_is_the_same_everywhere_and_for_ever():
    assert permute(np.arange(10), 10, 0).tolist() == [1, 0, 9, 3, 5, 6, 2, 8, 7, 4]
    assert hash_integers(1, 2, 3) == 15020427595393229491


def test_every_place_is_about_equally_likely():
    size, num_seeds = 5, 1500
    counts = np.zeros((size, size))
    for seed in range(num_seeds):
        counts[np.arange(size), permute(np.arange(size), size, seed)] += 1
    assert np.abs(counts / (num_seeds / size) - 1).max() < 0.26  # 5 standard deviations


def test_neighbours_are_torn_apart():
    size = 100_000
    order = permute(np.arange(size), size, 3)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.02
    assert (np.diff(order) == 1).sum() < 10


def test_the_hash_tells_order_and_values_apart():
    hashes = {hash_integers(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(hashes) == 10_000
    assert hash_integers(1) != hash_integers(1, 0)


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_is_an_error(place):
    with pytest.raises(DataError, match=rf"index {place} is outside range\(10\)"):
        permute([0, place], 10, 0)
