"""Arithmetic that stays in NumPy as long as everything is known.

Slots that are plain NumPy arrays make a mask a constant; as soon as one part
is a tensor of the backend, all of it is.
"""

import keras
import numpy as np
from keras import ops


def is_static(*values) -> bool:
    """Whether every value is on the host as NumPy."""
    return all(isinstance(value, np.ndarray) for value in values)


def aligned(*values):
    """The values unchanged when all are NumPy, else all as tensors."""
    if is_static(*values):
        return values
    return tuple(
        ops.convert_to_tensor(value) if is_static(value) else value
        for value in values
    )


def both(left, right):
    """Elementwise "and" of arrays or tensors, in any mixture."""
    left, right = aligned(left, right)
    return left & right


def either(left, right):
    """Elementwise "or" of arrays or tensors, in any mixture."""
    left, right = aligned(left, right)
    return left | right


def as_type(value, dtype: str):
    """The value in another dtype, NumPy staying NumPy."""
    if is_static(value):
        return value.astype(dtype, copy=False)
    return ops.cast(value, dtype)


def integers(name: str, value):
    """The array or tensor, which must hold integers."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    if "int" not in dtype:
        raise ValueError(
            f"`{name}` must hold integers. Received: {name} of dtype {dtype}. "
            'Pass int32; a `keras.Input` of it takes `dtype="int32"`.'
        )
    return value


def on_host(value):
    """Lists and numbers as NumPy; arrays, tensors and None unchanged."""
    if value is None or hasattr(value, "shape"):
        return np.asarray(value) if isinstance(value, np.generic) else value
    return np.asarray(value)
