import numpy as np
import pytest

from keras_transformer.masks import Causal, Full, Global, Prefix, SlidingWindow
from tests.numerics import to_numpy


def assert_same(mask, other, *shape):
    np.testing.assert_array_equal(
        to_numpy(mask.dense(*shape)), to_numpy(other.dense(*shape))
    )


def test_a_window_as_a_number_is_the_symmetric_pair():
    assert_same(SlidingWindow(3), SlidingWindow((2, 2)), 7, 9)
    assert (SlidingWindow(3).lookback, SlidingWindow(3).lookahead) == (2, 2)
    pair = SlidingWindow([4, 1])
    assert (pair.lookback, pair.lookahead) == (4, 1)


def test_a_window_as_long_as_the_sequence_is_full():
    assert_same(SlidingWindow(7), Full(), 7)
    assert_same(Causal() & SlidingWindow((6, 0)), Causal(), 7)


def test_draws_the_figures_of_the_design():
    prefix = Causal() | Prefix(2)
    assert prefix.show(4) == "##..\n##..\n###.\n####"
    sinks = Causal() & (SlidingWindow(2) | Global(1))
    assert sinks.show(4) == "#...\n##..\n###.\n#.##"


def test_global_slots_leak_the_future_without_causal():
    assert Global(1).show(3) == "###\n#..\n#.."


def test_one_prefix_for_the_batch_or_one_a_row():
    rows = to_numpy(Prefix().dense(1, 4, prefix_length=[1, 3]))
    np.testing.assert_array_equal(rows.sum(-1).ravel(), [1, 3])
    for number in (3, np.int64(3), np.array(3)):
        one = Prefix().dense(1, 4, prefix_length=number)
        np.testing.assert_array_equal(to_numpy(one), rows[1, 0])


@pytest.mark.parametrize(
    "window", [0, -1, 2.0, True, "3", (1,), (1, -1), (1, 2, 3), (1.0, 2), None]
)
def test_rejects_windows_of_nothing(window):
    with pytest.raises(ValueError, match="`window` must be a positive integer"):
        SlidingWindow(window)


@pytest.mark.parametrize("length", [-1, 2.0, True])
def test_rejects_lengths_below_zero(length):
    with pytest.raises(ValueError, match="`length` must be an integer of at"):
        Prefix(length)
    with pytest.raises(ValueError, match="`count` must be an integer of at"):
        Global(length)


def test_a_prefix_without_length_needs_it_with_the_batch():
    with pytest.raises(
        ValueError, match=r"`prefix_length` must be given .* `Prefix\(\)`.*Pass"
    ):
        Prefix().dense(3)
