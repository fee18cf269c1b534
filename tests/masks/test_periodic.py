import numpy as np
import pytest

from keras_transformer.masks import Causal, Chunked, Fixed, Full, Strided
from tests.numerics import to_numpy


def test_draws_the_fixed_pattern_of_the_paper():
    mask = Causal() & (Chunked(3) | Fixed(3, 1))
    assert mask.show(6) == "\n".join(
        ["#.....", "##....", "###...", "..##..", "..###.", "..####"]
    )


def test_one_chunk_or_every_column_is_full():
    full = to_numpy(Full().dense(5, 7))
    for mask in (Chunked(7), Strided(1), Fixed(3, 3)):
        np.testing.assert_array_equal(to_numpy(mask.dense(5, 7)), full)


def test_a_chunk_reaches_its_length_less_one():
    assert (Chunked(4).lookback, Chunked(4).lookahead) == (3, 3)


@pytest.mark.parametrize("value", [0, -2, 1.5, True, None])
def test_rejects_lengths_below_one(value):
    with pytest.raises(ValueError, match="`size` must be a positive integer"):
        Chunked(value)
    with pytest.raises(ValueError, match="`stride` must be a positive integer"):
        Strided(value)
    with pytest.raises(ValueError, match="`stride` must be a positive integer"):
        Fixed(value, 1)
    with pytest.raises(ValueError, match="`width` must be a positive integer"):
        Fixed(3, value)


def test_rejects_more_columns_than_a_stride_has():
    with pytest.raises(ValueError, match="`width` must be at most `stride`, 3"):
        Fixed(3, 4)
