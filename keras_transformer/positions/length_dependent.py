"""Frequencies that depend on the running length of each row.

LongRoPE chooses one of two sets. Dynamic NTK multiplies frequency `i` with
`stretch(length) ** -a[i]`, where float32 powers are off by 0.05 radians at
position 100,000, and float64 is not there on every device. So the power is
a product of three: a coarse and a fine one from tables made on the host,
multiplied as whole numbers, and a rest so close to 1 that float32 will do.
"""

import functools
import math

import numpy as np
from keras import ops

from keras_transformer.positions.angles import LOW_BITS, turns

# Nodes of the logarithm of the stretch: 16 coarse steps to the unit, each of
# 64 fine ones.
_COARSE, _FINE = 16, 64
# Fractions of a turn have 42 bits here, in three limbs of 14, whose products
# add up without leaving int32.
_LIMB = 14


def row_turns(scaling, max_wavelength: float, dim: int, lengths):
    """Turns per step of each row, in the two words of `angles.turns`.

    Args:
        scaling: A `RoPEScaling` that depends on the length.
        max_wavelength: Base of the wavelengths.
        dim: Number of rotated features.
        lengths: Int32 `(rows,)`.

    Returns:
        Two int32 tensors `(rows, dim // 2)`.
    """
    if scaling.kind == "longrope":
        return _longrope_turns(scaling, max_wavelength, dim, lengths)
    return _dynamic_ntk_turns(scaling, max_wavelength, dim, lengths)


def _longrope_turns(scaling, max_wavelength, dim, lengths):
    original = scaling.original_max_length
    is_long = (lengths > original)[:, None]
    short = turns(scaling.frequencies(max_wavelength, dim))
    long = turns(scaling.frequencies(max_wavelength, dim, original + 1))
    return tuple(
        ops.where(is_long, long_word, short_word)
        for long_word, short_word in zip(long, short, strict=True)
    )


def _dynamic_ntk_turns(scaling, max_wavelength, dim, lengths):
    node_lengths, slopes, rests = _nodes(
        scaling.factor, scaling.original_max_length
    )
    exponents, coarse, fine = _powers(
        scaling, max_wavelength, dim, len(node_lengths)
    )
    original = scaling.original_max_length
    lengths = ops.maximum(lengths, original)
    beyond = ops.cast(lengths - original, "float32")
    logarithm = ops.log1p(beyond * (scaling.factor / original))
    # The neighbouring node would do as well: the rest makes up for it.
    node = ops.cast(logarithm * (_COARSE * _FINE), "int32")
    node = ops.minimum(node, len(node_lengths) - 1)
    steps = ops.cast(lengths - ops.take(node_lengths, node), "float32")
    rest = ops.log1p(steps * ops.take(slopes, node) + ops.take(rests, node))
    shrink = ops.expm1(ops.multiply(rest[:, None], -exponents))

    c2, c1, c0 = (ops.take(limb, node // _FINE, axis=0) for limb in coarse)
    f2, f1, f0 = (ops.take(limb, node % _FINE, axis=0) for limb in fine)
    upper = c2 * f2
    lower = c2 * f1 + c1 * f2
    lower = lower + ops.right_shift(c2 * f0 + c1 * f1 + c0 * f2, _LIMB)
    product = ops.cast(upper, "float32") * 2**_LIMB + ops.cast(lower, "float32")
    lower = lower + ops.cast(product * shrink, "int32")
    upper = upper + ops.right_shift(lower, _LIMB)
    lower = ops.bitwise_and(lower, 2**_LIMB - 1)

    # `upper` and `lower` have 28 and 14 bits, the words 32 and 15.
    high = upper * 16 + ops.right_shift(lower, _LIMB - 4)
    low = ops.bitwise_and(lower, 2 ** (_LIMB - 4) - 1)
    return high, low * 2 ** (LOW_BITS - _LIMB + 4)


@functools.lru_cache(maxsize=16)
def _nodes(factor, original):
    """First length at each node; from there the slope and the rest to add."""
    largest = 2**31 - 1
    most = math.log1p(factor * (largest - original) / original)
    count = (math.ceil(most * _COARSE) + 1) * _FINE
    stretches = np.exp(np.arange(count) / (_COARSE * _FINE))
    lengths = np.ceil(original * (1 + (stretches - 1) / factor))
    lengths = np.minimum(lengths, largest)
    at_lengths = 1 + factor * (lengths - original) / original
    return (
        lengths.astype("int32"),
        (factor / original / stretches).astype("float32"),
        (at_lengths / stretches - 1).astype("float32"),
    )


@functools.lru_cache(maxsize=16)
def _powers(scaling, max_wavelength, dim, count):
    """Exponents, turns per step at coarse nodes, and powers at fine ones."""
    frequencies = scaling.frequencies(max_wavelength, dim)
    exponents = np.arange(0, dim, 2) / (dim - 2)
    coarse = np.arange(count // _FINE)[:, None] / _COARSE
    fine = np.arange(_FINE)[:, None] / (_COARSE * _FINE)
    return (
        exponents.astype("float32"),
        _limbs(frequencies / (2 * math.pi) * np.exp(-exponents * coarse)),
        _limbs(np.exp(-exponents * fine)),
    )


def _limbs(values):
    units = np.round(values * 2.0 ** (3 * _LIMB)).astype("int64")
    mask = 2**_LIMB - 1
    limbs = units >> 2 * _LIMB, units >> _LIMB & mask, units & mask
    return tuple(limb.astype("int32") for limb in limbs)
