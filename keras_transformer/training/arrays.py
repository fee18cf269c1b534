"""Checked NumPy arrays, as the helpers of this room take them."""

import numpy as np

from keras_transformer._internal import checks


def token_array(*, ndim: int, **argument):
    """An int32 array of token ids of `ndim` axes, or a `ValueError`."""
    ((name, value),) = argument.items()
    array = np.asarray(value)
    # An empty list has no dtype of its own.
    if array.size and array.dtype.kind not in "iu":
        checks.fail("integers", f"{name}.dtype", str(array.dtype))
    if array.ndim != ndim:
        checks.fail(f"an array of rank {ndim}", f"{name}.shape", array.shape)
    return array.astype("int32")


def mask_array(shape, padding_mask):
    """A boolean array of `shape`; None means that all tokens are real."""
    if padding_mask is None:
        return np.ones(shape, "bool")
    mask = np.asarray(padding_mask).astype("bool")
    if mask.shape != shape:
        checks.fail(
            f"of the shape of the tokens, {shape}",
            "padding_mask.shape",
            mask.shape,
        )
    return mask
