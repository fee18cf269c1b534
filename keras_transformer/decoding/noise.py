"""Random numbers for decoding: a counter hash, the same on every backend.

A number depends on the seed, the row id, the position and its index, and on
nothing else: not on the batch, the step of a loop, or what was drawn before.
"""

from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.hashing import random_bits, stream_keys


def uniform(seed, row_ids, positions, size: int):
    """Uniform numbers in (0, 1), bit for bit the same on every backend.

    Args:
        seed: An integer of 32 bits, or a scalar int32 tensor.
        row_ids: (batch,) int32, what tells the rows apart.
        positions: (batch,) int32.
        size: How many numbers each row takes.

    Returns:
        (batch, size) float32.
    """
    return uniform_at(seed, row_ids, positions, _counted(size))


def gumbel(seed, row_ids, positions, size: int):
    """Standard Gumbel numbers made of those of `uniform`."""
    return gumbel_at(seed, row_ids, positions, _counted(size))


def uniform_at(seed, row_ids, positions, indices):
    """The numbers of `uniform` at the given indices only.

    Args:
        seed: An integer of 32 bits, or a scalar int32 tensor.
        row_ids: (batch,) int32.
        positions: (batch,) int32.
        indices: (batch or 1, size) int32, each at least 0.

    Returns:
        (batch, size) float32.
    """
    bits = _bits(seed, row_ids, positions, indices)
    # All 31 bits count near 0, where a float is fine enough to tell them.
    # Near 1 the conversion rounds up, which must not reach 1.
    bits = ops.cast(ops.bitwise_and(bits, 0x7FFFFFFF), "float32")
    return ops.minimum((bits + 0.5) * 2.0**-31, 1.0 - 2.0**-24)


def gumbel_at(seed, row_ids, positions, indices):
    """The numbers of `gumbel` at the given indices only."""
    numbers = uniform_at(seed, row_ids, positions, indices)
    # log1p puts the fine end of the numbers where the winners come from:
    # log(u) has so few values near u = 1 that large vocabularies would tie.
    return -ops.log(-ops.log1p(-numbers))


def _counted(size):
    checks.positive_int(size=size)
    return ops.arange(size, dtype="int32")[None]


def _bits(seed, row_ids, positions, indices):
    """32 random bits, (batch, size), for each index of each row."""
    if checks.is_integer(seed) and not -(2**31) <= seed < 2**31:
        checks.fail("an integer that fits in 32 bits, signed", "seed", seed)
    stride, offset = stream_keys(seed, row_ids, positions)
    indices = ops.cast(indices, "int32")
    return random_bits(stride[:, None], offset[:, None], indices)
