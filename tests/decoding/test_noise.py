import numpy as np
import pytest

from keras_transformer.decoding.noise import (
    gumbel,
    gumbel_at,
    uniform,
    uniform_at,
)
from tests.decoding.compiling import compiled
from tests.numerics import to_numpy
from tests.sizes import VOCABULARY_SIZE

WORD = 2**32 - 1
SEEDS = (0, 1, -1, 2**31 - 1, -(2**31))
# Row ids and positions, 0 and the ends of int32 among them.
ROWS = np.array([0, 1, 2, 0, 77, 2**31 - 1, -(2**31)], "int32")
POSITIONS = np.array([0, 0, 1, 2, 4095, -1, 2**31 - 1], "int32")
# Streams of 2,048 numbers, for the statistics.
MANY_ROWS, MANY_POSITIONS = (
    grid.ravel().astype("int32")
    for grid in np.meshgrid(np.arange(8), np.arange(32), indexing="ij")
)
LENGTH = 2048


def reference_mix(word):
    """lowbias32, on a Python integer."""
    word ^= word >> 16
    word = word * 0x7FEB352D & WORD
    word ^= word >> 15
    word = word * 0x846CA68B & WORD
    return word ^ word >> 16


def reference_stream(seed, row, position):
    """The stride and the offset of a stream, as Python integers."""
    chains = []
    for start in (0x9E3779B9, 0xC2B2AE35):
        word = reference_mix(start + seed & WORD)
        word = reference_mix(word ^ row & WORD)
        chains.append(reference_mix(word ^ position & WORD))
    return chains[0] | 1, chains[1]


def reference_uniform(seed, row, position, index):
    stride, offset = reference_stream(seed, row, position)
    bits = reference_mix(index * stride + offset & WORD) & 0x7FFFFFFF
    number = np.float32(np.float32(bits) + np.float32(0.5)) / np.float32(2**31)
    return min(number, np.float32(1 - 2**-24))


def assert_even(counts):
    """Chi-square: counts over equal cells, within five deviations."""
    counts = np.asarray(counts, "float64").ravel()
    expected = counts.mean()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom), statistic


def many(seed=0, rows=MANY_ROWS, positions=MANY_POSITIONS):
    return to_numpy(uniform(seed, rows, positions, LENGTH))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_equals_that_of_plain_integers(seed):
    numbers = to_numpy(uniform(seed, ROWS, POSITIONS, VOCABULARY_SIZE))
    expected = [
        [
            reference_uniform(seed, int(row), int(position), index)
            for index in range(VOCABULARY_SIZE)
        ]
        for row, position in zip(ROWS, POSITIONS, strict=True)
    ]
    np.testing.assert_array_equal(numbers, np.array(expected, "float64"))


def test_compiling_changes_no_bit():
    def numbers(seed, rows, positions):
        return uniform(seed, rows, positions, VOCABULARY_SIZE)

    seed = np.int32(SEEDS[-1])
    eager = to_numpy(numbers(seed, ROWS, POSITIONS))
    traced = to_numpy(compiled(numbers)(seed, ROWS, POSITIONS))
    np.testing.assert_array_equal(traced, eager)


def test_numbers_at_some_indices_are_those_of_all():
    indices = np.array([[28, 0, 5], [3, 3, 1]], "int32")
    keys = 7, ROWS[:2], POSITIONS[:2]
    for every, some in ((uniform, uniform_at), (gumbel, gumbel_at)):
        expected = np.take_along_axis(
            to_numpy(every(*keys, VOCABULARY_SIZE)), indices, axis=1
        )
        np.testing.assert_allclose(
            to_numpy(some(*keys, indices)), expected, rtol=1e-6
        )


def test_a_row_keeps_its_numbers_in_any_batch():
    together = to_numpy(uniform(3, ROWS, POSITIONS, VOCABULARY_SIZE))
    alone = to_numpy(uniform(3, ROWS[4:5], POSITIONS[4:5], VOCABULARY_SIZE))
    np.testing.assert_array_equal(alone, together[4:5])


def test_numbers_are_uniform_in_each_stream_and_across_streams():
    numbers = many()
    cells = (numbers * 64).astype(int)
    assert_even(np.bincount(cells.ravel(), minlength=64))
    # Each stream, and each index over the streams, in coarser cells.
    for axis in (0, 1):
        quarters = np.stack([(cells // 16 == i).sum(axis) for i in range(4)])
        expected = quarters.sum(0) / 4
        statistics = ((quarters - expected) ** 2 / expected).sum(0)
        # The mean of n chi-squares with three degrees of freedom.
        assert abs(statistics.mean() - 3) < 5 * np.sqrt(6 / statistics.size)
        assert statistics.max() < 40


@pytest.mark.parametrize("key", ["seed", "row", "position", "index"])
@pytest.mark.parametrize("step", [1, 2, 2**16])
def test_numbers_with_nearby_keys_are_independent(key, step):
    numbers = many()
    if key == "seed":
        others = many(seed=step)
    elif key == "row":
        others = many(rows=MANY_ROWS + np.int32(step))
    elif key == "position":
        others = many(positions=MANY_POSITIONS + np.int32(step))
    else:
        indices = np.arange(LENGTH, dtype="int32")[None] + np.int32(step)
        others = to_numpy(uniform_at(0, MANY_ROWS, MANY_POSITIONS, indices))
    correlation = np.corrcoef(numbers.ravel(), others.ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(numbers.size)
    pairs = (numbers * 16).astype(int) * 16 + (others * 16).astype(int)
    assert_even(np.bincount(pairs.ravel(), minlength=256))


def test_no_two_rows_and_positions_share_a_stream():
    rows, positions = np.meshgrid(np.arange(64), np.arange(1024), indexing="ij")
    numbers = to_numpy(uniform(0, rows.ravel(), positions.ravel(), 2))
    assert len(np.unique(numbers, axis=0)) == rows.size


def test_small_numbers_are_told_apart():
    # A float32 made of 24 bits would have 64 values below 2**-18.
    numbers = many()
    small = numbers[numbers < 2**-8]
    assert_even(np.bincount((small * 2**12).astype(int), minlength=16))
    tiny = numbers[numbers < 2**-16]
    assert len(np.unique(tiny)) == tiny.size > 0


def test_the_ends_of_the_range_are_left_out():
    # The indices whose 31 bits are all zeros and all ones, found backwards.
    stride, offset = reference_stream(0, 0, 0)
    indices = []
    for word in (0, 0x7FFFFFFF, WORD):
        word ^= word >> 16
        word = word * 0x43021123 & WORD
        word ^= word >> 15 ^ word >> 30
        word = word * 0x1D69E2A5 & WORD
        word ^= word >> 16
        indices.append((word - offset) * pow(stride, -1, 2**32) & WORD)
    indices = np.array([indices], "uint32").view("int32")
    zeros = np.zeros(1, "int32")
    numbers = to_numpy(uniform_at(0, zeros, zeros, indices))
    np.testing.assert_array_equal(
        numbers, [[2.0**-32, 1 - 2.0**-24, 1 - 2.0**-24]]
    )
    assert np.isfinite(to_numpy(gumbel_at(0, zeros, zeros, indices))).all()


def test_gumbel_has_its_distribution():
    numbers = to_numpy(gumbel(0, MANY_ROWS, MANY_POSITIONS, LENGTH))
    uniform_again = np.exp(-np.exp(-numbers))
    assert_even(np.bincount((uniform_again * 64).astype(int).ravel()))
    error = np.pi / np.sqrt(6 * numbers.size)
    assert abs(numbers.mean() - np.euler_gamma) < 5 * error


@pytest.mark.parametrize("seed", [2**31, -(2**31) - 1])
def test_rejects_a_seed_of_more_than_32_bits(seed):
    with pytest.raises(ValueError, match=r"`seed` must be an integer that fit"):
        uniform(seed, ROWS, POSITIONS, 2)


@pytest.mark.parametrize("make", [uniform, gumbel])
def test_rejects_a_size_of_zero(make):
    with pytest.raises(ValueError, match=r"`size` must be a positive.*=0"):
        make(0, ROWS, POSITIONS, 0)
