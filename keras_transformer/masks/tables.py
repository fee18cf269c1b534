"""Rules that are tables: one entry a block, or one a pair."""

import functools

import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.masks.arrays import is_static
from keras_transformer.masks.mask import Mask


class _Entries:
    """The entries of a table: compared and hashed by content, once."""

    def __init__(self, table):
        self._key = (table.shape, np.packbits(table).tobytes())
        self._hash = hash(self._key)
        self.table = table

    def __eq__(self, other):
        return isinstance(other, _Entries) and self._key == other._key

    def __hash__(self):
        return self._hash

    def __repr__(self):
        return repr(self.lists())

    def lists(self):
        """Nested lists of zeros and ones: the form that JSON keeps."""
        return self.table.astype(int).tolist()


class _Table(Mask):
    """A table over blocks of slots; nothing outside it is allowed."""

    _block = 1

    @property
    def _table(self):
        return self._arguments[0][1].table

    @functools.cached_property
    def _counts(self):
        # How many entries lie above and to the left of each corner.
        rows, columns = self._table.shape
        counts = np.zeros((rows + 1, columns + 1), "int64")
        np.cumsum(self._table, axis=0, out=counts[1:, 1:])
        np.cumsum(counts, axis=1, out=counts)
        return counts

    def allowed(self, query_slots, key_slots, data):
        rows, columns = self._table.shape
        row, column = query_slots // self._block, key_slots // self._block
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        if is_static(row, column):
            row, column = row.clip(0, rows - 1), column.clip(0, columns - 1)
            return self._table[row, column] & inside
        row = ops.clip(row, 0, rows - 1)
        column = ops.clip(column, 0, columns - 1)
        return ops.take(self._table.ravel(), row * columns + column) & inside

    def tile(self, q0, q1, k0, k1, data):
        rows, columns = self._table.shape
        top, bottom = q0 // self._block, (q1 - 1) // self._block + 1
        left, right = k0 // self._block, (k1 - 1) // self._block + 1
        area = (bottom - top) * (right - left)
        top, bottom = top.clip(0, rows), bottom.clip(0, rows)
        left, right = left.clip(0, columns), right.clip(0, columns)
        count = (
            self._counts[bottom, right]
            - self._counts[top, right]
            - self._counts[bottom, left]
            + self._counts[top, left]
        )
        return count > 0, count == area


@register
class BlockSparse(_Table):
    """Blocks of slots, each allowed or not by a table.

    Allows `table[q // block_size, k // block_size]`; slots outside the table
    are not allowed.

    Reference: [Zaheer et al., 2020](https://arxiv.org/abs/2007.14062)

    Args:
        table: `(query blocks, key blocks)` booleans, or zeros and ones.
        block_size: Slots in a block.

    Example:

    >>> print(BlockSparse([[1, 0], [1, 1]], 2).show(4))
    ##..
    ##..
    ####
    ####
    """

    def __init__(self, table, block_size):
        checks.positive_int(block_size=block_size)
        entries = _Entries(_boolean_table("table", table))
        self._set(table=entries, block_size=int(block_size))

    @property
    def _block(self):
        return self.block_size

    def get_config(self):
        return {"table": self.table.lists(), "block_size": self.block_size}


@register
class Explicit(_Table):
    """Each pair of slots allowed or not by an array, whatever the pattern.

    Slots outside the array are not allowed. The array is part of the mask and
    is saved with it; use a call argument for what differs between batches.

    Args:
        array: `(query, key)` booleans, or zeros and ones.

    Example:

    >>> print(Explicit([[1, 0], [1, 1]]).show(2))
    #.
    ##
    """

    def __init__(self, array):
        self._set(array=_Entries(_boolean_table("array", array)))

    def get_config(self):
        return {"array": self.array.lists()}


def _boolean_table(name, values):
    if not isinstance(values, (list, tuple, np.ndarray)):
        values = ops.convert_to_numpy(values)
    try:
        table = np.array(values)
    except ValueError:  # rows of unequal length
        table = np.empty(0)
    if (
        table.ndim != 2
        or table.size == 0
        or table.dtype.kind not in "biuf"
        or not ((table == 0) | (table == 1)).all()
    ):
        raise ValueError(
            f"`{name}` must be a two-dimensional array of booleans, or of "
            f"zeros and ones. Received: {name} of shape {table.shape} and "
            f"type {table.dtype}."
        )
    table = table.astype(bool)
    table.setflags(write=False)
    return table
