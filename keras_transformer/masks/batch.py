"""Rules that read the batch: padding, and documents packed in one row."""

import numpy as np

from keras_transformer._internal.serialization import register
from keras_transformer.masks.arrays import aligned, is_static
from keras_transformer.masks.data import (
    check_length,
    padding_of_keys,
    padding_tile,
)
from keras_transformer.masks.mask import Mask


@register
class Padding(Mask):
    """A query may attend to keys that are no padding.

    Padding is and-ed to every mask wherever a `padding_mask` is given; this
    rule makes it required. It may stand only under `&`.

    Example:

    >>> mask = Causal() & Padding()
    >>> print(mask.show(3, padding_mask=[[False, True, True]]))
    ...
    .#.
    .##
    """

    data_names = frozenset(["padding_mask"])

    def __init__(self):
        self._set()

    def allowed(self, query_slots, key_slots, data):
        data.required("padding_mask", "`Padding()`")
        return padding_of_keys(data, key_slots)

    def tile(self, q0, q1, k0, k1, data):
        if data.bounds is not None:
            return data.bounds.padding(k0)
        if data.padding_mask is None:
            return super().tile(q0, q1, k0, k1, data)
        may, must = padding_tile(data, k0, k1)
        everywhere = q0 == q0
        return may & everywhere, must & everywhere


@register
class Documents(Mask):
    """A query may attend to keys of its own document.

    Reads `segment_ids`, and `key_segment_ids` where the keys are not the
    queries: equal numbers mark one document.

    Example:

    >>> print(Documents().show(3, segment_ids=[[0, 0, 1]]))
    ##.
    ##.
    ..#
    """

    data_names = frozenset(["segment_ids"])

    def __init__(self):
        self._set()

    def allowed(self, query_slots, key_slots, data):
        query_ids = data.required("segment_ids", "`Documents()`")
        key_ids = data.key_segment_ids
        check_length("segment_ids", query_ids, query_slots.shape[-2])
        if key_ids is None:
            key_ids = query_ids
            check_length("segment_ids", key_ids, key_slots.shape[-1])
        else:
            check_length("key_segment_ids", key_ids, key_slots.shape[-1])
        query_ids, key_ids = aligned(query_ids, key_ids)
        return query_ids[:, None, :, None] == key_ids[:, None, None, :]

    def tile(self, q0, q1, k0, k1, data):
        if data.bounds is not None:
            lowest, highest = data.bounds.query_ids(q0)
            least, most = data.bounds.key_ids(k0)
            may = (lowest <= most) & (least <= highest)
            return may, (lowest == most) & (least == highest)
        query_ids, key_ids = data.segment_ids, data.key_segment_ids
        key_ids = query_ids if key_ids is None else key_ids
        if not is_static(query_ids, key_ids):
            return super().tile(q0, q1, k0, k1, data)
        lowest, highest = _extremes(query_ids, q0, q1)
        least, most = _extremes(key_ids, k0, k1)
        shape = np.broadcast_shapes(q0.shape, k0.shape)
        may, must = np.zeros(shape, bool), np.ones(shape, bool)
        for row in range(max(len(lowest), len(least))):
            # A single row of ids, of queries or of keys, is shared by all.
            q, k = row % len(lowest), row % len(least)
            may |= (lowest[q] <= most[k]) & (least[k] <= highest[q])
            must &= (lowest[q] == most[k]) & (least[k] == highest[q])
        return may, must


def _extremes(ids, starts, ends):
    """Smallest and largest of `ids[:, start:end]`, for arrays of bounds.

    Returns:
        Two arrays, with a row for each row of `ids`.
    """
    # Tiles share few distinct bounds; `reduceat` walks each of them once.
    length = ids.shape[1] + 1
    bounds, inverse = np.unique(
        starts.ravel() * length + ends.ravel(), return_inverse=True
    )
    bounds = np.stack(divmod(bounds, length), axis=1).ravel()
    ids = np.pad(ids, ((0, 0), (0, 1)), mode="edge")
    inverse = inverse.reshape(starts.shape)
    lowest = np.minimum.reduceat(ids, bounds, axis=1)[:, ::2]
    highest = np.maximum.reduceat(ids, bounds, axis=1)[:, ::2]
    return lowest[:, inverse], highest[:, inverse]
