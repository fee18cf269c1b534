import numpy as np
import pytest
from hypothesis import given

from keras_transformer.masks import (
    Causal,
    Documents,
    MaskData,
    Padding,
    PerHead,
    Prefix,
)
from keras_transformer.masks.mask import Mask
from keras_transformer.masks.pairs import Pairs, foreign_rule
from tests.masks.test_properties import many, meaning_of, seeds
from tests.masks.trees import BATCH, NUM_HEADS, Case, trees


class Diagonal(Mask):
    def __init__(self):
        self._set()

    def allowed(self, query_slots, key_slots, data):
        return query_slots == key_slots


def asked(pairs):
    """Every pair, by indices."""
    lengths = (pairs.query_length, pairs.key_length)
    row, head, query, key = np.ix_(
        *(np.arange(n) for n in (BATCH, NUM_HEADS, *lengths))
    )
    arrays = dict(pairs.constants)
    for name, array in pairs.batch.items():
        arrays[name] = np.broadcast_to(array, (BATCH, *array.shape[1:]))
    return np.broadcast_to(
        pairs.rule(arrays, row, head, query, key), (BATCH, NUM_HEADS, *lengths)
    )


@many
@given(trees, seeds)
def test_pairs_are_those_of_the_mask(tree, seed):
    mask, case = tree[0], Case(seed, 9, 11, plain=True)
    pairs = Pairs(mask, case.data, 9, 11)
    np.testing.assert_array_equal(asked(pairs), meaning_of(mask, case))


def test_padding_counts_once_whether_or_not_the_mask_names_it():
    case = Case(1, 9, 11, plain=True)
    expected = meaning_of(Causal(), case)
    for mask in (Causal(), Causal() & Padding()):
        found = asked(Pairs(mask, case.data, 9, 11))
        np.testing.assert_array_equal(found, expected)


def test_one_row_of_data_serves_the_whole_batch():
    ids, case = np.array([[0, 0, 1]]), Case(1, 3, 3, plain=True)
    mask = Documents() | Prefix()
    pairs = Pairs(mask, MaskData(segment_ids=ids, prefix_length=1), 3, 3)
    expected = mask.evaluate(case.q[0], case.k[0], pairs.data)
    np.testing.assert_array_equal(
        asked(pairs), np.broadcast_to(expected, (BATCH, NUM_HEADS, 3, 3))
    )


@pytest.mark.parametrize("mask", [Padding(), Documents(), Prefix()])
def test_missing_data_is_an_error(mask):
    with pytest.raises(ValueError, match="must be given because the mask"):
        _ = Pairs(Causal() & mask, MaskData(), 3, 3).batch


def test_data_of_another_length_is_an_error():
    data = MaskData(padding_mask=np.ones((1, 4), bool))
    with pytest.raises(ValueError, match="one entry for each of the 3 slots"):
        _ = Pairs(Causal(), data, 3, 3).batch


def test_equal_masks_have_one_function():
    one, other = (Pairs(Causal() | Prefix(2), MaskData(), 3, 3) for _ in "ab")
    assert one.rule is other.rule


def test_a_rule_of_another_library_is_found_wherever_it_stands():
    for mask in (
        Diagonal(),
        Causal() & (~Diagonal() | Prefix(2)),
        PerHead([Causal(), Diagonal()]),
    ):
        assert foreign_rule(mask) == Diagonal()
    assert foreign_rule(Causal() & PerHead([Causal(), ~Prefix()])) is None
