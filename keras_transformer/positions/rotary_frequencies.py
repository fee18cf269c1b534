"""The published formulas of `RoPEScaling`, in float64 on the host.

Each takes the scaling, the base of the wavelengths, the number of rotated
features and the running length (None: the original one), and gives radians
per step.
"""

import math

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.positions.angles import wavelength_frequencies


def linear(scaling, base, dim, length):
    """Every frequency divided by the factor."""

    return wavelength_frequencies(base, dim) / scaling.factor


def ntk(scaling, base, dim, length):
    """A base that slows the slowest pair by the factor."""

    return _ntk_frequencies(base, dim, scaling.factor)


def dynamic_ntk(scaling, base, dim, length):
    """A base that grows with the length beyond the original one."""

    original = scaling.original_max_length
    beyond = max(length or 0, original) / original - 1
    return _ntk_frequencies(base, dim, 1 + scaling.factor * beyond)


def _ntk_frequencies(base, dim, stretch):
    if dim <= 2:
        checks.fail("above 2 with NTK scaling", "rotary_dim", dim)
    return wavelength_frequencies(base * stretch ** (dim / (dim - 2)), dim)


def yarn(scaling, base, dim, length):
    """Fast pairs kept, slow ones divided, a ramp between."""

    def border(num_turns):
        wavelength = scaling.original_max_length / (num_turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low, high = border(scaling.beta_fast), border(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as published, against a division by zero
    blend = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    kept = wavelength_frequencies(base, dim)
    return kept * (1 - blend) + kept / scaling.factor * blend


def yarn_multiplier(scaling):
    """What sine and cosine are multiplied with under YaRN."""

    def multiplier(weight):
        return 0.1 * weight * math.log(max(scaling.factor, 1.0)) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None:
        return multiplier(scaling.mscale) / multiplier(scaling.mscale_all_dim)
    return multiplier(1.0)


def llama3(scaling, base, dim, length):
    """Blended by the turns that a pair makes in the original length."""

    frequencies = wavelength_frequencies(base, dim)
    num_turns = scaling.original_max_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((num_turns - low) / (high - low), 0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def longrope(scaling, base, dim, length):
    """Each pair divided by its short or its long factor."""

    is_long = length is not None and length > scaling.original_max_length
    factors = scaling.long_factor if is_long else scaling.short_factor
    if len(factors) != dim // 2:
        checks.fail(
            f"of length {dim // 2}, one factor for each of the pairs of "
            f"{dim} rotated features",
            "short_factor",
            factors,
        )
    return wavelength_frequencies(base, dim) / np.asarray(factors)


def longrope_multiplier(scaling):
    """What sine and cosine are multiplied with under LongRoPE."""

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original = scaling.original_max_length
    factor = scaling.factor or scaling.max_length / original
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))
