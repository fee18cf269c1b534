"""What a tile of attention is: the part that all blockwise executors share.

An executor walks over tiles, a block of queries and a block of keys, and
asks here for what acts on the scores of one: the mask, the bias and dropout.
"""

import dataclasses
import functools

import keras
import numpy as np
from keras import ops

from keras_transformer._internal.hashing import random_bits, stream_keys
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
            small = len(query_slots) * len(key_slots) <= _REMEMBERED
            if small:
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

    def kept(self, seed, rows, num_heads, query_slots, key_slots):
        """Which weights of a tile dropout keeps.

        Args:
            seed: int32 `(2,)`.
            rows: int32 `(rows,)`, the batch rows of the tile.
            num_heads: How many heads.
            query_slots: int32 `(queries,)`.
            key_slots: int32 `(keys,)`.

        Returns:
            Booleans (rows, heads, queries, keys), a function of the seed, the
            batch row, the head and the two slots alone.
        """
        return dropout_kept(
            self.dropout, seed, rows, num_heads, query_slots, key_slots
        )


@functools.lru_cache(maxsize=1024)
def _allowed_of_slots(mask, queries, keys):
    """A tile without batch data, as NumPy: the same in each layer and step."""
    (query, num_queries), (key, num_keys) = queries, keys
    return mask.evaluate(
        np.arange(query, query + num_queries, dtype="int32"),
        np.arange(key, key + num_keys, dtype="int32"),
    )


def dropout_kept(rate, seed, rows, num_heads, query_slots, key_slots):
    """Which weights dropout keeps, by a hash of all that tells them apart.

    Args:
        rate: The rate that is dropped.
        seed, rows, num_heads, query_slots, key_slots: As in `Tiling.kept`.

    Returns:
        Booleans (rows, heads, queries, keys).
    """
    heads = ops.arange(num_heads, dtype="int32")[:, None]
    stride, offset = stream_keys(
        seed[0], seed[1], rows[:, None, None], heads, query_slots
    )
    bits = random_bits(stride[..., None], offset[..., None], key_slots)
    return bits >= int(rate * 2**32) - 2**31
