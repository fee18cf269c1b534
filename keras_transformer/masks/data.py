"""The data of one batch that a mask may read."""

import dataclasses

import numpy as np

from keras_transformer.masks.arrays import (
    as_type,
    integers,
    is_static,
    on_host,
)

_RANKS = {
    "padding_mask": ((2,), "(batch, key length)"),
    "segment_ids": ((2,), "(batch, query length)"),
    "key_segment_ids": ((2,), "(batch, key length)"),
    "prefix_length": ((0, 1), "a number or (batch,)"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class MaskData:
    """What differs from batch to batch: arrays or tensors, never a rule.

    Every array is aligned with the queries or keys as they are passed, not
    with their slots.

    Args:
        padding_mask: `(batch, key length)`; True marks a real key.
        segment_ids: `(batch, query length)`; the document of each query.
        key_segment_ids: `(batch, key length)`; the document of each key.
            None takes `segment_ids`.
        prefix_length: A number or `(batch,)`; how many slots form the prefix.

    Example:

    >>> data = MaskData(padding_mask=[[True, True, False]])
    """

    padding_mask: object = None
    segment_ids: object = None
    key_segment_ids: object = None
    prefix_length: object = None
    # What is known of whole blocks (`BlockBounds`); then `tile` answers for
    # each batch row, in tensors where the data is.
    bounds: object = None

    def __post_init__(self):
        for name, (ranks, expected) in _RANKS.items():
            value = on_host(getattr(self, name))
            if value is None:
                continue
            if len(value.shape) not in ranks:
                raise ValueError(
                    f"`{name}` must be of shape {expected}. "
                    f"Received: {name} of shape {tuple(value.shape)}."
                )
            dtype = "bool"
            if name != "padding_mask":
                dtype, value = "int32", integers(name, value)
            object.__setattr__(self, name, as_type(value, dtype))

    def required(self, name: str, rule: str):
        """The array called `name`; an error when `rule` lacks it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"`{name}` must be given because the mask contains {rule}. "
                f"Received: {name}=None. Pass `{name}` in the call, or take "
                f"{rule} out of the mask."
            )
        return value

    def for_plan(self, query_length, key_length, query_start):
        """What is on the host, with one entry a slot."""
        arrays = {name: getattr(self, name) for name in _RANKS}
        arrays = {
            name: value if is_static(value) else None
            for name, value in arrays.items()
        }
        query_ids, key_ids = arrays["segment_ids"], arrays["key_segment_ids"]
        if self.key_segment_ids is None:
            key_ids = query_ids
        MaskData(**arrays).check_lengths(query_length, key_length)
        if query_ids is not None and query_start:
            query_ids = np.pad(query_ids, ((0, 0), (query_start, 0)))
        arrays["segment_ids"], arrays["key_segment_ids"] = query_ids, key_ids
        return MaskData(**arrays)

    def check_rows(self, batch):
        """Requires one row, or one for each of the batch, of every array."""
        for name in _RANKS:
            shape = getattr(getattr(self, name), "shape", ())
            if None in (batch, *shape[:1]) or not shape:
                continue
            if shape[0] not in (1, batch):
                raise ValueError(
                    f"`{name}` must have one row for each of the {batch} of "
                    f"the batch. Received: {name} of shape {tuple(shape)}."
                )

    def check_lengths(self, query_length, key_length):
        """Requires one entry a slot of all arrays that are given."""
        ids_of_keys = "key_segment_ids"
        if self.key_segment_ids is None:
            ids_of_keys = "segment_ids"
        for name, length in (
            ("padding_mask", key_length),
            ("segment_ids", query_length),
            (ids_of_keys, key_length),
        ):
            if getattr(self, name) is not None:
                check_length(name, getattr(self, name), length)


def check_length(name: str, value, expected):
    """Requires a batch array to have one entry a slot, where both are known."""
    length = value.shape[-1]
    if None in (length, expected) or length == expected:
        return
    raise ValueError(
        f"`{name}` must have one entry for each of the {expected} slots. "
        f"Received: {name} of shape {tuple(value.shape)}."
        + (
            " Pass `key_segment_ids` where keys are not the queries."
            if name == "segment_ids"
            else ""
        )
    )


def padding_of_keys(data, key_slots):
    """The padding mask as `(B, 1, 1, S)`."""
    check_length("padding_mask", data.padding_mask, key_slots.shape[-1])
    return data.padding_mask[:, None, None, :]


def padding_tile(data, k0, k1):
    """Whether tiles of keys hold any real key, and only such, in all rows."""
    some = np.append(0, np.cumsum(data.padding_mask.any(0)))
    every = np.append(0, np.cumsum(data.padding_mask.all(0)))
    return some[k1] > some[k0], every[k1] - every[k0] == k1 - k0
