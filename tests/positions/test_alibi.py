import json

import keras
import numpy as np
import pytest

from keras_transformer.positions import ALiBi
from keras_transformer.positions.alibi import alibi_slopes
from tests.numerics import to_numpy
from tests.sizes import KEY_LENGTH, NUM_HEADS, QUERY_LENGTH

QUERIES = np.arange(QUERY_LENGTH) + 2
KEYS = np.stack([np.arange(KEY_LENGTH), np.arange(KEY_LENGTH) * 3 - 1])


def test_slopes_of_eight_heads_are_those_of_the_paper():
    assert alibi_slopes(8) == [2.0**-k for k in range(1, 9)]


def test_slopes_between_powers_of_two_are_those_of_the_paper():
    # 12 heads: the slopes of 8, then the odd ones of 16.
    expected = [2.0**-k for k in range(1, 9)]
    expected += [2.0**-k for k in (0.5, 1.5, 2.5, 3.5)]
    np.testing.assert_allclose(alibi_slopes(12), expected)
    assert alibi_slopes(1) == [2.0**-8]


def test_lowers_scores_by_slope_times_distance():
    bias = ALiBi(num_heads=NUM_HEADS)(QUERIES, KEYS)
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]
    expected = np.zeros((2, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH))
    for index in np.ndindex(expected.shape):
        batch, head, query, key = index
        distance = abs(QUERIES[query] - KEYS[batch, key])
        expected[index] = -slopes[head] * distance
    np.testing.assert_array_equal(to_numpy(bias), expected)


def test_positions_without_a_batch_give_a_batch_of_one():
    bias = ALiBi(num_heads=NUM_HEADS)(QUERIES, KEYS[0])
    assert tuple(bias.shape) == (1, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH)


def test_is_float32_and_exact_at_far_positions_in_half_precision():
    layer = ALiBi(slopes=[1.0], dtype="mixed_bfloat16")
    bias = layer(np.array([100_000]), np.array([99_997, 100_001]))
    assert keras.backend.standardize_dtype(bias.dtype) == "float32"
    np.testing.assert_array_equal(to_numpy(bias)[0, 0, 0], [-3, -1])


def test_given_slopes_replace_those_of_the_paper():
    bias = ALiBi(slopes=[1.0, 3.0])(np.array([4]), np.array([2]))
    np.testing.assert_array_equal(to_numpy(bias).ravel(), [-2, -6])


def test_symbolic_lengths_may_be_unknown():
    positions = keras.KerasTensor((None, None), dtype="int32")
    bias = ALiBi(num_heads=NUM_HEADS)(positions, positions)
    assert bias.shape == (None, NUM_HEADS, None, None)


def test_configuration_keeps_slopes_and_heads():
    for layer in (ALiBi(slopes=[0.5, 0.1]), ALiBi(num_heads=3), ALiBi()):
        config = json.loads(json.dumps(layer.get_config()))
        again = ALiBi.from_config(config)
        assert (again.slopes, again.num_heads) == (
            layer.slopes,
            layer.num_heads,
        )


def test_binding_twice_must_agree():
    layer = ALiBi()
    layer.bind(4)
    layer.bind(4)
    with pytest.raises(ValueError, match=r"`num_heads` must be 4, as this"):
        layer.bind(8)
    with pytest.raises(ValueError, match=r"`num_heads` must be 2, as this"):
        ALiBi(slopes=[0.5, 0.1], num_heads=4)


def test_rejects_a_call_before_binding():
    with pytest.raises(ValueError, match=r"`num_heads` must be known before"):
        ALiBi()(QUERIES, KEYS)


def test_rejects_slopes_that_raise_scores_or_are_no_list():
    with pytest.raises(
        ValueError, match=r"`slopes` must be a finite number above 0"
    ):
        ALiBi(slopes=[0.5, -0.5])
    with pytest.raises(ValueError, match=r"`slopes` must be a list of numbers"):
        ALiBi(slopes=0.5)
