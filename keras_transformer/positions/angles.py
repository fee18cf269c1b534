"""Sine and cosine of position times frequency, exact at long range.

A float32 product `position * frequency` misses the sine by 0.007 at position
100,000. Here the frequency is a fixed-point fraction of a turn, kept in two
integer words, and the product wraps around at whole turns by itself: integer
arithmetic modulo 2**32 is arithmetic modulo one turn. No compiler reorders
it, so eager and compiled calls agree on every backend.
"""

import math

import numpy as np
from keras import ops

from keras_transformer._internal import checks

# A turn is 2**32 units of the high word, of 2**15 units of the low word each.
LOW_BITS = 15
_WORD = 2**32


def check_wavelength(max_wavelength):
    """Requires a base above 1, so that no pair turns faster than a radian."""
    checks.positive(max_wavelength=max_wavelength)
    if max_wavelength <= 1:
        checks.fail("above 1", "max_wavelength", max_wavelength)


def wavelength_frequencies(max_wavelength: float, dim: int):
    """Radians per step: `max_wavelength ** (-2i / dim)`, float64."""
    return float(max_wavelength) ** (-np.arange(0, dim, 2) / dim)


def turns(frequencies):
    """Radians per step as turns per step, in two int32 words.

    Args:
        frequencies: Float64 array.

    Returns:
        Two int32 arrays of the same shape, `high` and `low`.
    """
    fractions = np.mod(np.asarray(frequencies, "float64") / (2 * math.pi), 1.0)
    units = np.round(fractions * (_WORD << LOW_BITS)).astype("int64")
    high = (units >> LOW_BITS).astype("uint32").view("int32")
    low = (units & ((1 << LOW_BITS) - 1)).astype("int32")
    return high, low


def sine_and_cosine(positions, high, low):
    """Sine and cosine, within 1e-6 at 1,000,000 steps, 1e-5 at 100,000,000.

    Args:
        positions: Int32 tensor that broadcasts with the words.
        high: Int32, as given by `turns`.
        low: Int32, as given by `turns`.

    Returns:
        Two float32 tensors of the broadcast shape.
    """
    high, low = ops.convert_to_tensor(high), ops.convert_to_tensor(low)
    # The low product is split at 16 bits so that only whole turns wrap.
    upper = ops.right_shift(positions, 16)
    lower = ops.bitwise_and(positions, 0xFFFF)
    carry = 2 * upper * low + ops.right_shift(lower * low, LOW_BITS)
    angles = ops.cast(positions * high + carry, "float32") * (
        2 * math.pi / _WORD
    )
    return ops.sin(angles), ops.cos(angles)
