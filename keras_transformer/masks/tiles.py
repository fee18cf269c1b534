"""Which tiles each batch row computes, also when only a tensor knows.

What a mask knows without the batch is planned once on the host. The batch's
data then decides about the tiles that the plan keeps, from the extremes of
whole blocks, in NumPy or traced.
"""

import dataclasses
import functools

import numpy as np
from keras import ops

from keras_transformer.masks.arrays import (
    aligned,
    as_type,
    both,
    either,
    is_static,
)
from keras_transformer.masks.data import MaskData


@dataclasses.dataclass(frozen=True, eq=False)
class TileTable:
    """The tiles of each query block: full ones first, then masked ones.

    Args:
        columns: int32 `(rows or 1, tiles)`, key blocks. Those of query block
            `i` begin at `starts[i]`; one row serves the whole batch.
        starts: int32 NumPy `(query blocks,)`.
        num_full: int32 `(rows or 1, query blocks)`: so many tiles of a query
            block need no mask.
        num_kept: Likewise, so many are computed at all.
    """

    columns: object
    starts: np.ndarray
    num_full: object
    num_kept: object


@dataclasses.dataclass(frozen=True, eq=False)
class BlockBounds:
    """What is certain of whole blocks of a batch's data, row by row.

    Args:
        data: The `MaskData`, NumPy or tensors.
        query_length, key_length: Lengths of the sequences.
        block_size, key_block_size: Sizes of the blocks; the last may be cut.
    """

    data: MaskData
    query_length: int
    key_length: int
    block_size: int
    key_block_size: int

    def query_ids(self, q0):
        """Smallest and largest id of the query blocks that begin at `q0`."""
        return self._extremes(self._ids, q0, self.block_size)

    def key_ids(self, k0):
        """Smallest and largest id of the key blocks that begin at `k0`."""
        ids = self.data.key_segment_ids
        ids = self._ids if ids is None else ids
        return self._extremes(ids, k0, self.key_block_size)

    def padding(self, k0):
        """Whether the key blocks hold any real key, and only such."""
        if self.data.padding_mask is None:
            return np.ones_like(k0, bool), np.zeros_like(k0, bool)
        real = as_type(self.data.padding_mask, "int32")
        least, most = self._extremes(real, k0, self.key_block_size)
        return most > 0, least > 0

    def prefix(self, k0, k1):
        """Whether keys from `k0` up to `k1` touch the prefix, and lie in it."""
        length = self.data.prefix_length
        if length is None:
            return np.ones_like(k0, bool), np.zeros_like(k0, bool)
        length = length[:, None] if len(length.shape) else length[None, None]
        length, k0, k1 = aligned(length, k0, k1)
        return k0 < length, k1 <= length

    @property
    def _ids(self):
        return self.data.required("segment_ids", "`Documents()`")

    def _extremes(self, values, start, size):
        xp = _module_of(values)
        short = -values.shape[1] % size
        if short:
            # The last id once more changes no extreme.
            last = xp.repeat(values[:, -1:], short, axis=1)
            values = xp.concatenate([values, last], axis=1)
        blocks = xp.reshape(values, (-1, values.shape[1] // size, size))
        block = start // size
        return (
            xp.take(xp.min(blocks, axis=-1), block, axis=1),
            xp.take(xp.max(blocks, axis=-1), block, axis=1),
        )


@functools.lru_cache(maxsize=64)
def static_plan(mask, query_length, key_length, block_size, key_block_size):
    """The plan of a mask without batch data, remembered."""
    return mask.plan(
        query_length, key_length, block_size, key_block_size=key_block_size
    )


def tile_table(
    mask,
    query_length: int,
    key_length: int,
    block_size: int,
    key_block_size: int,
    data: MaskData,
    *,
    same_for_rows: bool = False,
) -> TileTable:
    """The tiles to compute.

    Args:
        mask: The mask, in slots that count from 0.
        query_length, key_length: Lengths of the sequences.
        block_size, key_block_size: Sizes of a tile.
        data: The batch's data, NumPy or tensors.
        same_for_rows: Whether one list of tiles must serve all batch rows.

    Returns:
        A `TileTable`, NumPy where the data is.
    """
    plan = static_plan(
        mask, query_length, key_length, block_size, key_block_size
    )
    offsets, columns, must = plan.tiles()
    if not plan.num_kept:
        # A tile that no query block counts: arrays without one cannot be
        # indexed in a program.
        none = np.zeros((1, plan.num_query_blocks), "int32")
        return TileTable(none[:, :1], none[0], none, none)
    rows = np.repeat(np.arange(plan.num_query_blocks), np.diff(offsets))
    rows, columns = rows.astype("int32"), columns.astype("int32")
    may = np.ones_like(must)
    has_padding = data.padding_mask is not None
    if has_padding or mask.data_names:
        bounds = BlockBounds(
            data, query_length, key_length, block_size, key_block_size
        )
        data = dataclasses.replace(data, bounds=bounds)
        q0, k0 = rows * block_size, columns * key_block_size
        q1 = np.minimum(q0 + block_size, query_length, dtype="int32")
        k1 = np.minimum(k0 + key_block_size, key_length, dtype="int32")
        may, must = mask.tile(q0, q1, k0, k1, data)
        if has_padding:
            some, every = bounds.padding(k0)
            may, must = both(may, some), both(must, every)
    if key_length % key_block_size:
        # The places behind the last key are no keys.
        must = both(must, columns != plan.num_key_blocks - 1)
    must = both(may, must)
    # This only lends the shape.
    may = either(may, must)
    if len(may.shape) == 1:
        may, must = may[None], must[None]
    elif same_for_rows:
        xp = _module_of(may)
        may = xp.any(may, axis=0, keepdims=True)
        must = xp.all(must, axis=0, keepdims=True)
    return _packed(may, must, rows, columns, offsets)


def _packed(may, must, rows, columns, offsets):
    xp = _module_of(may)
    full, kept = as_type(must, "int32"), as_type(may, "int32")
    rows, full = aligned(rows, full)
    order = xp.argsort(rows * 3 - full - kept, axis=-1)
    return TileTable(
        xp.take(columns, order, axis=0),
        offsets[:-1].astype("int32"),
        _sums(xp, full, offsets),
        _sums(xp, kept, offsets),
    )


def _sums(xp, counts, offsets):
    """How many count in each query block."""
    before = xp.pad(xp.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    first, last = offsets[:-1], offsets[1:]
    sums = xp.take(before, last, axis=1) - xp.take(before, first, axis=1)
    return as_type(sums, "int32")


def _module_of(array):
    return np if is_static(array) else ops
