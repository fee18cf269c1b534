"""Checks and defaults that the door to attention and its layers share."""

import keras
import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer.masks.arrays import integers, on_host

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
    if (
        data.get("key_segment_ids") is not None
        and data.get("segment_ids") is None
    ):
        raise ValueError(
            "`key_segment_ids` are compared with those of the queries. "
            "Received: segment_ids=None. Pass `segment_ids` too."
        )


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


def check_tensors(query, key, value) -> tuple:
    """Requires tensors that fit together.

    Returns:
        `(batch, num_heads, query_length, key_length)`, None where a size is
        unknown.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 4 or 0 in tensor.shape[2:]:
            raise ValueError(
                f"`{name}` must have shape (batch, length, heads, dim), with "
                "at least one head and a dim of at least 1. Received: "
                f"{name}.shape={tuple(tensor.shape)}."
            )
    dtypes = {
        name: keras.backend.standardize_dtype(tensor.dtype)
        for name, tensor in tensors.items()
    }
    if len(set(dtypes.values())) > 1 or "float" not in dtypes["query"]:
        raise ValueError(
            "`query`, `key` and `value` must have one and the same floating "
            f"dtype. Received: {', '.join(dtypes.values())}."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            "`query` and `key` must have the same last axis. Received: "
            f"query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}."
        )
    if key.shape[2] != value.shape[2] or query.shape[2] % key.shape[2]:
        raise ValueError(
            "The heads of `key` and `value` must be equally many and divide "
            f"those of `query`. Received: {query.shape[2]} query, "
            f"{key.shape[2]} key and {value.shape[2]} value heads."
        )
    batches = [tensor.shape[0] for tensor in tensors.values()]
    if len(set(batches) - {None}) > 1:
        raise ValueError(
            "`query`, `key` and `value` must have as many batch rows as each "
            f"other. Received: {batches}."
        )
    if len({key.shape[1], value.shape[1]} - {None}) > 1:
        raise ValueError(
            "`key` and `value` must have the same length. Received: "
            f"key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}."
        )
    batch = next((size for size in batches if size is not None), None)
    return batch, query.shape[2], query.shape[1], key.shape[1]


def check_broadcasts(name: str, shape, scores_shape):
    """Requires a shape that broadcasts to the scores' without growing it."""
    pairs = zip(reversed(shape), reversed(scores_shape), strict=False)
    if len(shape) > 4 or any(
        size not in (1, None, full) for size, full in pairs if full is not None
    ):
        checks.fail(
            "broadcastable to (batch, num_heads, query_length, key_length) = "
            f"{tuple(scores_shape)}",
            f"{name}.shape",
            tuple(shape),
        )


def slots_or_positions(name: str, given, batch, length):
    """The integers as they came, lists as NumPy; None stays None.

    Raises:
        ValueError: Unless they are integers of shape `(length,)`, or with one
            or `batch` rows before, where these sizes are known.
    """
    if given is None:
        return None
    given = integers(name, on_host(given))
    shape = tuple(given.shape)
    fits = len(shape) in (1, 2) and shape[-1] in (length, None)
    if length is None:
        fits = len(shape) in (1, 2)
    if fits and len(shape) == 2 and batch is not None:
        fits = shape[0] in (1, None, batch)
    if not fits:
        checks.fail(
            "of shape (length,) or (batch, length), here "
            f"{(length,)} or {(batch, length)}",
            f"{name}.shape",
            shape,
        )
    return given


def counted(tensor):
    """Slots from 0 for the axis after the batch, NumPy where it is known."""
    length = ops.shape(tensor)[1]
    if isinstance(length, int):
        return np.arange(length, dtype="int32")
    return ops.arange(length, dtype="int32")
