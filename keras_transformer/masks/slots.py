"""Slots as callers give them: lengths or arrays of any rank."""

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.masks.arrays import as_type, integers, on_host


def expanded(name, slots, axis):
    """Slots `(N,)` or `(B, N)` as `(N, 1)` or `(B, 1, N, 1)`, or along keys."""
    slots = as_type(integers(name, on_host(slots)), "int32")
    rank = len(slots.shape)
    if rank not in (1, 2):
        raise ValueError(
            f"`{name}` must be of shape (length,) or (batch, length). "
            f"Received: {name} of shape {tuple(slots.shape)}."
        )
    if rank == 2:
        slots = slots[:, None, :]
    return slots[..., None] if axis == -1 else slots[..., None, :]


def slots_of(kind, length, slots):
    """The slots of queries or keys, from their number where that is given."""
    if (length is None) == (slots is None):
        raise ValueError(
            f"Exactly one of `{kind}_length` and `{kind}_slots` must be given. "
            f"Received: {kind}_length={length}, {kind}_slots={slots}."
        )
    if slots is not None:
        return slots
    if not checks.is_integer(length) or length < 0:
        checks.fail("an integer of at least 0", f"{kind}_length", length)
    return np.arange(length, dtype="int32")
