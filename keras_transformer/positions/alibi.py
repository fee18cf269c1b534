"""Attention with linear biases (ALiBi)."""

import math

import keras
import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.positions.arguments import pairwise_offsets


def alibi_slopes(num_heads: int):
    """The paper's slopes: geometric from `2 ** (-8 / num_heads)`.

    For a number of heads that is no power of two, the slopes of the next
    lower power come first, then every other one of the next higher power.
    """
    lower = 2 ** int(math.log2(num_heads))
    first = [2.0 ** (-8 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4 * head / lower) for head in range(1, 2 * lower, 2)]
    return (first + between)[:num_heads]


@register
class ALiBi(keras.layers.Layer):
    """Lowers each score by a slope times the distance of its positions.

    Reference: [Press et al., 2021](https://arxiv.org/abs/2108.12409)

    Args:
        slopes: One positive number a head; the paper's when None.
        num_heads: Number of heads; `bind` sets it when None.

    Call arguments:
        query_positions: `(query_length,)` or `(batch, query_length)`.
        key_positions: `(key_length,)` or `(batch, key_length)`.

    Returns:
        Float32 `(1 or batch, heads, query_length, key_length)`:
        `-slope * |query position - key position|`.

    Raises:
        ValueError: bound to another number of heads, or to none.
    """

    acts_on = "scores"

    def __init__(self, slopes=None, *, num_heads: int | None = None, **kwargs):
        checks.positive_int(optional=True, num_heads=num_heads)
        super().__init__(autocast=False, **kwargs)
        if slopes is not None:
            if not isinstance(slopes, list | tuple | np.ndarray):
                checks.fail("a list of numbers or None", "slopes", slopes)
            slopes = tuple(float(slope) for slope in slopes)
            for slope in slopes:
                checks.positive(slopes=slope)
        self.slopes = slopes
        self.num_heads = None
        if num_heads is None and slopes is not None:
            num_heads = len(slopes)
        if num_heads is not None:
            self.bind(num_heads)

    def bind(self, num_heads: int):
        """Fixes the number of heads; a second call must agree."""
        checks.positive_int(num_heads=num_heads)
        expected = self.num_heads
        if expected is None and self.slopes is not None:
            expected = len(self.slopes)
        if expected not in (None, num_heads):
            checks.fail(
                f"{expected}, as this ALiBi already has that many",
                "num_heads",
                num_heads,
                "Give each layer its own ALiBi.",
            )
        self.num_heads = num_heads

    def call(self, query_positions, key_positions):
        if self.num_heads is None:
            checks.fail(
                "known before the call",
                "num_heads",
                None,
                "Call `bind(num_heads)` first, or pass `num_heads`.",
            )
        slopes = self.slopes or alibi_slopes(self.num_heads)
        slopes = np.asarray(slopes, "float32")[:, None, None]
        distance = ops.abs(pairwise_offsets(query_positions, key_positions))
        return ops.multiply(ops.cast(distance, "float32")[:, None], -slopes)

    def get_config(self):
        return {
            **super().get_config(),
            "slopes": self.slopes,
            "num_heads": self.num_heads,
        }
