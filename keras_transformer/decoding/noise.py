"""Random numbers for decoding: a counter hash, the same on every backend.

A number depends on the seed, the row id, the position and its index, and on
nothing else: not on the batch, the step of a loop, or what was drawn before.
"""

import numpy as np
from keras import ops

from keras_transformer._internal import checks

# Two hash chains that start apart: together a 64-bit key for each (seed, row,
# position), so that no two of them share their numbers in practice.
_STARTS = np.array([[-0x61C88647], [-0x3D4D51CB]], "int32")


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
    seed, row_ids, positions, indices = (
        ops.cast(key, "int32") for key in (seed, row_ids, positions, indices)
    )
    key = _mix(ops.convert_to_tensor(_STARTS) + seed)
    key = _mix(ops.bitwise_xor(key, row_ids[None]))
    key = _mix(ops.bitwise_xor(key, positions[None]))
    # An odd stride visits all numbers before it meets one again.
    stride, offset = ops.bitwise_or(key[0], 1), key[1]
    return _mix(indices * stride[:, None] + offset[:, None])


def _mix(bits):
    """A bijection of int32 in which each bit of the input stirs all bits.

    The constants are those of `lowbias32`, of Chris Wellons' hash prospector.
    """
    bits = ops.bitwise_xor(bits, _shifted_right(bits, 16)) * 0x7FEB352D
    bits = ops.bitwise_xor(bits, _shifted_right(bits, 15)) * -0x7B935975
    return ops.bitwise_xor(bits, _shifted_right(bits, 16))


def _shifted_right(bits, count):
    # int32 is shifted arithmetically: the copies of the sign go.
    return ops.bitwise_and(ops.right_shift(bits, count), (1 << 32 - count) - 1)
