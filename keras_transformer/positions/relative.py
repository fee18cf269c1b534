"""The learned bias of T5: one number a head and bucket of distance."""

import keras
import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register, serialize
from keras_transformer.positions.arguments import (
    pairwise_offsets,
    table_initializer,
)


def bucket_table(num_buckets: int, max_distance: int, bidirectional: bool):
    """Buckets of the offsets `key - query` from -max to +max distance.

    Half of a side's buckets hold one distance each; the rest grow
    geometrically up to `max_distance`. The thresholds are compared as whole
    numbers, since a float32 logarithm may fall short of one.

    Returns:
        Int32 array of `2 * max_distance + 1` buckets.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    steps = side - exact
    buckets = []
    for distance in range(max_distance + 1):
        bucket = min(distance, exact)
        # distance >= exact * (max_distance / exact) ** (step / steps)
        for step in range(1, steps if distance >= exact else 0):
            bucket += (
                distance**steps * exact**step
                >= exact**steps * max_distance**step
            )
        buckets.append(bucket)
    past = buckets[:0:-1]
    if bidirectional:
        future = [side + bucket for bucket in buckets[1:]]
    else:
        future = [0] * max_distance
    return np.asarray([*past, 0, *future], "int32")


@register
class RelativePositionBias(keras.layers.Layer):
    """Adds to each score a learned number for its bucket of distance.

    One object given to several layers is one shared table, as in T5.

    Reference: [Raffel et al., 2019](https://arxiv.org/abs/1910.10683)

    Args:
        num_buckets: Number of buckets, both sides together.
        max_distance: Distance from which on all share the last bucket.
        bidirectional: Whether future keys have buckets of their own (an
            encoder) or share that of distance 0 (a decoder).
        initializer: Of the table; normal with deviation 0.02 when None.
        num_heads: Number of heads; `bind` sets it when None.

    Call arguments:
        query_positions: `(query_length,)` or `(batch, query_length)`.
        key_positions: `(key_length,)` or `(batch, key_length)`.

    Returns:
        Float32 `(1 or batch, heads, query_length, key_length)`.

    Raises:
        ValueError: bound to another number of heads, or to none.
    """

    acts_on = "scores"

    def __init__(
        self,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
        initializer=None,
        num_heads: int | None = None,
        **kwargs,
    ):
        checks.positive_int(num_buckets=num_buckets)
        checks.positive_int(max_distance=max_distance)
        checks.boolean(bidirectional=bidirectional)
        checks.positive_int(optional=True, num_heads=num_heads)
        sides = 2 if bidirectional else 1
        if num_buckets < 2 * sides or num_buckets % sides:
            checks.fail(
                "even and at least 4" if bidirectional else "at least 2",
                "num_buckets",
                num_buckets,
            )
        if max_distance <= num_buckets // sides // 2:
            checks.fail(
                f"above {num_buckets // sides // 2}, the distances that have "
                "a bucket each",
                "max_distance",
                max_distance,
            )
        super().__init__(autocast=False, **kwargs)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.initializer = table_initializer(initializer)
        self.num_heads = num_heads
        self._table = bucket_table(num_buckets, max_distance, bidirectional)

    def bind(self, num_heads: int):
        """Makes the table for `num_heads`; a second call must agree."""
        checks.positive_int(num_heads=num_heads)
        if self.num_heads not in (None, num_heads):
            checks.fail(
                f"{self.num_heads}, as this bias already has that many",
                "num_heads",
                num_heads,
                "Give each layer its own RelativePositionBias.",
            )
        self.num_heads = num_heads
        if not self.built:
            self.build()

    def build(self, query_positions_shape=None, key_positions_shape=None):
        if self.num_heads is None:
            checks.fail(
                "known before the call",
                "num_heads",
                None,
                "Call `bind(num_heads)` first, or pass `num_heads`.",
            )
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.num_buckets, self.num_heads),
            initializer=self.initializer,
            # Read as float32 in half precision too, and rounded last.
            autocast=False,
        )

    def call(self, query_positions, key_positions):
        offsets = pairwise_offsets(query_positions, key_positions)
        offsets = ops.clip(offsets, -self.max_distance, self.max_distance)
        buckets = ops.take(self._table, offsets + self.max_distance, axis=0)
        bias = ops.take(self.embeddings, buckets, axis=0)
        return ops.transpose(bias, (0, 3, 1, 2))

    def get_config(self):
        return {
            **super().get_config(),
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "initializer": serialize(self.initializer),
            "num_heads": self.num_heads,
        }
