import json

import numpy as np
import pytest
from keras import ops

from keras_transformer.masks import BlockSparse, Causal, Explicit
from tests.numerics import to_numpy


def test_nothing_outside_a_table_is_allowed_and_nothing_wraps():
    slots = np.array([-9, -1, 0, 3, 4, 5])
    for mask in (Explicit(np.ones((4, 4))), BlockSparse(np.ones((2, 2)), 2)):
        expected = (slots >= 0) & (slots < 4)
        expected = expected[:, None] & expected[None]
        for made in (slots, ops.convert_to_tensor(slots)):
            allowed = mask.evaluate(made, made)
            np.testing.assert_array_equal(to_numpy(allowed), expected)


def test_the_complement_allows_what_lies_outside():
    assert (~Explicit([[1, 0]])).show(2, 3) == ".##\n###"


def test_a_table_with_blocks_of_one_is_explicit():
    table = np.random.default_rng(0).random((4, 6)) < 0.5
    np.testing.assert_array_equal(to_numpy(Explicit(table).dense(4, 6)), table)
    np.testing.assert_array_equal(
        to_numpy(BlockSparse(table, 1).dense(4, 6)), table
    )


def test_keeps_what_it_was_given_though_the_array_changes():
    array = np.ones((2, 2), bool)
    mask = Explicit(array)
    array[:] = False
    assert mask.show(2) == "##\n##"
    assert mask == Explicit(np.ones((2, 2)))


def test_takes_every_kind_of_array():
    expected = Explicit([[True, False], [True, True]])
    for array in (
        [[1, 0], [1, 1]],
        ((1, 0), (1, 1)),
        np.array([[1, 0], [1, 1]], "int8"),
        ops.convert_to_tensor([[True, False], [True, True]]),
    ):
        assert Explicit(array) == expected
        assert BlockSparse(array, 2) == BlockSparse([[1, 0], [1, 1]], 2)


def test_the_configuration_is_nested_lists():
    config = {"table": [[1, 0], [1, 1]], "block_size": 3}
    assert BlockSparse([[1, 0], [1, 1]], 3).get_config() == config
    json.dumps(Explicit(np.eye(2)).get_config())


@pytest.mark.parametrize(
    "table",
    [[1, 0], [[]], [[2, 0]], [[0.5]], [[1, 0], [1]], [["a"]], [[None]], "ab"],
)
def test_rejects_what_is_no_boolean_table(table):
    with pytest.raises(ValueError, match="`array` must be a two-dimensional"):
        Explicit(table)
    with pytest.raises(ValueError, match="`table` must be a two-dimensional"):
        BlockSparse(table, 2)


def test_rejects_blocks_of_nothing():
    with pytest.raises(ValueError, match=r"`block_size` .*=0"):
        BlockSparse([[1]], 0)


def test_the_smaller_table_counts_beside_other_rules():
    assert (Causal() & Explicit(np.ones((2, 2)))).show(3) == "#..\n##.\n..."
