"""What a tile of attention is: the part that all blockwise executors share.

An executor walks over tiles, a block of queries and a block of keys, and
asks here for what acts on the scores of one: the mask, the bias and dropout.
"""

import dataclasses
import functools

import keras
import numpy as np
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer._internal.hashing import stream_keys
from keras_transformer._internal.sublayers import run
from keras_transformer.masks import Mask, MaskData
from keras_transformer.masks.arrays import is_static

# Data with a row for each batch row and an entry for each query or key.
BATCH_DATA = ("padding_mask", "segment_ids", "key_segment_ids")
# What has an entry for each query.
OF_QUERIES = ("query", "segment_ids", "query_positions")
# Tiles without batch data are remembered up to this many pairs.
_REMEMBERED = 1 << 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static part of an attention over tiles; equal ones share programs.

    Args:
        mask: Who may attend to whom, in slots that count from 0.
        query_length, key_length: Lengths of the sequences.
        block_size, key_block_size: Sizes of a tile.
        scale: Factor on the scores.
        soft_cap: None or `c`: scores become `c * tanh(scores / c)`.
        bias: None or a position scheme that acts on scores.
        dropout: Rate of attention weights set to zero.
    """

    mask: Mask
    query_length: int
    key_length: int
    block_size: int
    key_block_size: int
    scale: float
    soft_cap: float | None = None
    bias: keras.layers.Layer | None = None
    dropout: float = 0.0

    @property
    def num_query_blocks(self) -> int:
        return -(-self.query_length // self.block_size)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.key_length // self.key_block_size)

    def allowed(self, query_slots, key_slots, data: dict):
        """Who may attend to whom in a tile.

        Args:
            query_slots: int32 `(queries,)`, one after another.
            key_slots: int32 `(keys,)`, likewise; where they are tensors,
                those behind the last key are no keys.
            data: The batch's data of this tile, where there is any.

        Returns:
            Booleans that broadcast to (rows, heads, queries, keys).
        """
        if is_static(query_slots, key_slots) and not data:
            pairs = len(query_slots) * len(key_slots)
            if pairs * (self.mask.num_heads or 1) <= _REMEMBERED:
                return _allowed_of_slots(
                    self.mask,
                    (int(query_slots[0]), len(query_slots)),
                    (int(key_slots[0]), len(key_slots)),
                )
            return self.mask.evaluate(query_slots, key_slots)
        if not is_static(key_slots):
            key_slots = ops.where(key_slots < self.key_length, key_slots, -1)
        names = (*BATCH_DATA, "prefix_length")
        data = MaskData(**{name: data.get(name) for name in names})
        return self.mask.evaluate(query_slots, key_slots, data)

    def bias_of(self, weights, query_positions, key_positions):
        """The bias of a tile, from weights that are passed explicitly.

        Args:
            weights: One tensor for each variable of `bias`.
            query_positions: int32 `(rows, queries)`.
            key_positions: int32 `(rows, keys)`.

        Returns:
            Float32 that broadcasts to (rows, heads, queries, keys).
        """
        pairs = zip(self.bias.variables, weights, strict=True)
        with keras.StatelessScope(state_mapping=list(pairs)):
            return run(self.bias, query_positions, key_positions)

    def dropout_streams(self, seed, batch, num_heads):
        """`dropout_streams` of all queries of `batch` rows."""
        rows, slots = (
            ops.arange(size, dtype="int32")
            for size in (batch, self.query_length)
        )
        return dropout_streams(seed, rows, num_heads, slots)

    def dropout_factors(self, streams, key_slots):
        """`dropout_factors` at the rate of this attention."""
        return dropout_factors(self.dropout, streams, key_slots)


@functools.lru_cache(maxsize=1024)
def _allowed_of_slots(mask, queries, keys):
    """A tile without batch data, as NumPy: the same in each layer and step."""
    (query, num_queries), (key, num_keys) = queries, keys
    return mask.evaluate(
        np.arange(query, query + num_queries, dtype="int32"),
        np.arange(key, key + num_keys, dtype="int32"),
    )


def dropout_streams(seed, rows, num_heads, query_slots):
    """What the dropout of each query's weights depends on, but for the keys.

    Args:
        seed: int32 `(2,)`.
        rows: int32 `(rows,)`, the batch rows.
        num_heads: How many heads.
        query_slots: int32 `(queries,)`.

    Returns:
        Two int32 tensors (rows, heads, queries).
    """
    heads = ops.arange(num_heads, dtype="int32")[:, None]
    return stream_keys(
        seed[0], seed[1], rows[:, None, None], heads, query_slots
    )


def dropout_factors(rate, streams, key_slots):
    """What dropout multiplies each weight by: 0, or 1 / (1 - rate).

    It is a function of the seed, the batch row, the head and the two slots
    alone: the same in every executor, forward and backward.

    Args:
        rate: The rate that is dropped, rounded to a multiple of 2**-16.
        streams: What `dropout_streams` returned.
        key_slots: int32 `(keys,)`, pairs of an even slot and the next one;
            the last may miss its second.

    Returns:
        Float32 (rows, heads, queries, keys).
    """
    halves = backend.random_halves(*streams, key_slots)
    # Every rate above 0 drops some, and every rate below 1 keeps some.
    threshold = min(max(round(rate * 2**16), 1), 2**16 - 1)
    # Of the rounded rate, so that the mean stays what it was.
    factor = np.float32(2**16 / (2**16 - threshold))
    zero = np.float32(0)
    return ops.where(halves >= threshold - 2**15, factor, zero)
