"""Checks and defaults that the door to attention and its layers share."""

import numpy as np
from keras import ops

# What to do with data that a mask does not read.
_READERS = {
    "segment_ids": "Add `Documents()` to the mask, or leave them out.",
    "key_segment_ids": "Add `Documents()` to the mask, or leave them out.",
    "prefix_length": "Add `Prefix()` to the mask, or leave it out.",
}


def check_read(mask, where: str, **data):
    """Requires that a rule of the mask reads what is given.

    Args:
        mask: The `Mask`.
        where: Whose mask it is, for the message.
        **data: Name to value, None where it is not given.
    """
    names = mask.data_names
    if "segment_ids" in names:
        names = names | {"key_segment_ids"}
    for name, value in data.items():
        if value is not None and name not in names:
            fail_unread(name, mask, where)


def fail_unread(name: str, mask, where: str):
    """Raises because no rule reads the data called `name`."""
    raise ValueError(
        f"`{name}` is read by no rule of {where}. Received: mask={mask!r}. "
        f"{_READERS[name]}"
    )


def check_heads(mask, num_heads: int):
    """Requires a mask that differs between heads to have one for each."""
    if mask.num_heads not in (None, num_heads):
        raise ValueError(
            f"`mask` has {mask.num_heads} masks, one a head, which must be as "
            f"many as there are heads. Received: num_heads={num_heads}, "
            f"mask={mask!r}."
        )


def counted(tensor):
    """Slots from 0 for the axis after the batch, NumPy where it is known."""
    length = ops.shape(tensor)[1]
    if isinstance(length, int):
        return np.arange(length, dtype="int32")
    return ops.arange(length, dtype="int32")
