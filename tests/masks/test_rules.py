"""Promises that every rule keeps, tried on each alone."""

import numpy as np
import pytest

from tests.masks.trees import LEAVES, Case
from tests.numerics import to_numpy

rules = pytest.mark.parametrize("name", LEAVES)


@rules
def test_means_what_the_design_says(name):
    (mask, meaning), case = LEAVES[name], Case(1)
    expected = case.expected(meaning)
    dense = mask.dense(query_slots=case.q, key_slots=case.k, **case.arrays)
    actual = np.broadcast_to(to_numpy(dense), expected.shape)
    np.testing.assert_array_equal(actual, expected)
    assert 0 < expected.mean() < 1


@rules
def test_answers_exactly_for_single_pairs(name):
    (mask, _), case = LEAVES[name], Case(2, 20, 20, plain=True)
    q, k = np.arange(20)[:, None], np.arange(20)[None]
    may, must = mask.tile(q, q + 1, k, k + 1, case.data)
    allowed = np.broadcast_to(mask.allowed(q, k, case.data), (3, 1, 20, 20))
    np.testing.assert_array_equal(may, allowed.any((0, 1)))
    np.testing.assert_array_equal(must, allowed.all((0, 1)))


@rules
def test_answers_exactly_for_tiles_of_every_place_and_shape(name):
    (mask, _), case = LEAVES[name], Case(3, 13, 13, plain=True)
    edges = [(a, b) for a in range(13) for b in range(a + 1, 14)]
    q0, q1 = np.array(edges).T[:, :, None]
    k0, k1 = np.array(edges).T[:, None, :]
    may, must = mask.tile(q0, q1, k0, k1, case.data)
    slots = np.arange(13)
    allowed = np.broadcast_to(
        mask.allowed(slots[:, None], slots[None], case.data), (3, 1, 13, 13)
    )
    any_pair, every_pair = allowed.any((0, 1)), allowed.all((0, 1))
    for row, (a, b) in enumerate(edges):
        for column, (c, d) in enumerate(edges):
            exact_may = any_pair[a:b, c:d].any()
            if name == "documents":  # unsorted ids are bounded, not searched
                assert may[row, column] >= exact_may
            else:
                assert may[row, column] == exact_may
            assert must[row, column] == every_pair[a:b, c:d].all()
