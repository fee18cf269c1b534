"""A mask asked by indices, for kernels that inline it.

The rules are written in indexing and arithmetic alone, so that any array
library and any compiler of kernels can read them.
"""

import dataclasses
import functools

import numpy as np

from keras_transformer.masks.algebra import And, Not, Operator, Or
from keras_transformer.masks.batch import Documents, Padding
from keras_transformer.masks.data import MaskData, check_length
from keras_transformer.masks.mask import Mask
from keras_transformer.masks.order import (
    Causal,
    Full,
    Global,
    Prefix,
    SlidingWindow,
)
from keras_transformer.masks.per_head import PerHead
from keras_transformer.masks.periodic import Chunked, Fixed, Strided
from keras_transformer.masks.tables import BlockSparse, Explicit
from keras_transformer.masks.tiles import tile_table

# Their `allowed` is arithmetic on slots.
_PLAIN = (Causal, SlidingWindow, Global, Chunked, Strided, Fixed)
_KNOWN = (*_PLAIN, Full, Prefix, Documents, Padding, BlockSparse, Explicit)


def foreign_rule(mask: Mask) -> Mask | None:
    """A rule of the mask that is none of the library's, or None."""
    if not isinstance(mask, Operator):
        return None if type(mask) in _KNOWN else mask
    if type(mask) not in (And, Or, Not, PerHead):
        return mask
    found = (foreign_rule(part) for part in mask.masks)
    return next((rule for rule in found if rule is not None), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Who may attend to whom, pair by pair and block by block.

    Args:
        mask: The mask, in slots that count from 0, without a foreign rule.
        data: The batch's data.
        query_length, key_length: Lengths of the sequences.
    """

    mask: Mask
    data: MaskData
    query_length: int
    key_length: int

    @property
    def rule(self):
        """A function `(arrays, row, head, query, key)` of indices.

        `arrays` are `constants` and `batch` in one; the result is boolean.
        Equal masks have one and the same function.
        """
        return self._parts[0]

    @property
    def constants(self) -> dict:
        """Name to NumPy array: what the rule reads of the mask."""
        return self._parts[1]

    @property
    def batch(self) -> dict:
        """Name to array with one or `batch` rows: what it reads of the data."""
        data, names = self.data, self.mask.data_names
        arrays = {}
        if self._has_padding:
            padding = data.required("padding_mask", "`Padding()`")
            check_length("padding_mask", padding, self.key_length)
            arrays["padding_mask"] = padding
        if "segment_ids" in names:
            ids = data.required("segment_ids", "`Documents()`")
            key_ids, name = data.key_segment_ids, "key_segment_ids"
            if key_ids is None:
                key_ids, name = ids, "segment_ids"
            check_length("segment_ids", ids, self.query_length)
            check_length(name, key_ids, self.key_length)
            arrays.update(segment_ids=ids, key_segment_ids=key_ids)
        if "prefix_length" in names:
            length = data.required("prefix_length", "`Prefix()`")
            arrays["prefix_length"] = length if length.shape else length[None]
        return arrays

    def table(self, block_size: int):
        """The `TileTable` of square blocks."""
        return tile_table(
            self.mask,
            self.query_length,
            self.key_length,
            block_size,
            block_size,
            self.data,
        )

    @property
    def _has_padding(self):
        named = "padding_mask" in self.mask.data_names
        return named or self.data.padding_mask is not None

    @property
    def _parts(self):
        return _rule_and_constants(self.mask, self._has_padding)


@functools.lru_cache(maxsize=128)
def _rule_and_constants(mask, has_padding):
    constants = {}
    rule = _rule(mask, constants)
    if not has_padding or "padding_mask" in mask.data_names:
        return rule, constants

    def padded(arrays, row, head, query, key):
        real = arrays["padding_mask"][row, key]
        return rule(arrays, row, head, query, key) & real

    return padded, constants


def _rule(mask, constants):
    """The function of a mask; notes the arrays that it reads of the mask."""
    if isinstance(mask, PerHead):
        return _per_head(mask, constants)
    if isinstance(mask, Operator):
        return _operator(mask, constants)
    if isinstance(mask, (BlockSparse, Explicit)):
        return _in_table(mask, constants)
    if isinstance(mask, Prefix) and mask.length is None:
        return lambda arrays, row, head, query, key: (
            key < arrays["prefix_length"][row]
        )
    if isinstance(mask, Prefix):
        return lambda arrays, row, head, query, key: key < mask.length
    if isinstance(mask, Documents):
        return lambda arrays, row, head, query, key: (
            arrays["segment_ids"][row, query]
            == arrays["key_segment_ids"][row, key]
        )
    if isinstance(mask, Padding):
        return lambda arrays, row, head, query, key: arrays["padding_mask"][
            row, key
        ]
    if isinstance(mask, Full):
        return lambda arrays, row, head, query, key: query == query
    return lambda arrays, row, head, query, key: mask.allowed(query, key, None)


def _operator(mask, constants):
    first, *rest = (_rule(part, constants) for part in mask.masks)
    if isinstance(mask, Not):
        return lambda *pair: ~first(*pair)
    is_and = isinstance(mask, And)

    def joined(*pair):
        result = first(*pair)
        for rule in rest:
            other = rule(*pair)
            result = result & other if is_and else result | other
        return result

    return joined


def _per_head(mask, constants):
    parts = []
    for part in dict.fromkeys(mask.masks):
        name = f"constant_{len(constants)}"
        constants[name] = np.array([other == part for other in mask.masks])
        parts.append((name, _rule(part, constants)))

    def of_head(arrays, row, head, query, key):
        result = query != query
        for name, rule in parts:
            of_part = rule(arrays, row, head, query, key)
            result = result | arrays[name][head] & of_part
        return result

    return of_head


def _in_table(mask, constants):
    block, table = mask._block, mask._table
    rows, columns = table.shape
    name = f"constant_{len(constants)}"
    constants[name] = table

    def in_table(arrays, row, head, query, key):
        i, j = query // block, key // block
        # What lies outside must still be read from somewhere.
        entry = arrays[name][i % rows, j % columns]
        return entry & (i < rows) & (j < columns)

    return in_table
