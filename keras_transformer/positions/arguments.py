"""What the position schemes have in common: their call arguments."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.sublayers import copy_of

_RANKS = {1: "(length,)", 2: "(batch, length)"}


def integer_positions(positions, name="positions", num_axes=None):
    """The int32 tensor behind a `positions` argument, after checking it.

    Args:
        positions: An integer tensor or array.
        name: Name of the argument, for the errors.
        num_axes: Size of a third axis, where there may be one.
    """
    positions = ops.convert_to_tensor(positions)
    dtype = keras.backend.standardize_dtype(positions.dtype)
    if "int" not in dtype:
        checks.fail(
            "integers",
            name,
            dtype,
            "Scale the frequencies (`RoPEScaling`), not the positions.",
        )
    rank = len(positions.shape)
    third_axis_fits = rank == 3 and positions.shape[2] == num_axes
    if rank not in _RANKS and not third_axis_fits:
        shapes = " or ".join(_RANKS.values())
        if num_axes is not None:
            shapes += f" or (batch, length, {num_axes})"
        checks.fail(f"of shape {shapes}", name, tuple(positions.shape))
    return ops.cast(positions, "int32")


def slots(inputs):
    """Positions 0, 1, 2, ... along axis 1 of `inputs`."""
    return ops.arange(ops.shape(inputs)[1], dtype="int32")


def check_axes(inputs, axes):
    """Requires `inputs` to have the axes of a tuple of names."""
    if len(inputs.shape) != len(axes):
        shape = ", ".join(axes)
        checks.fail(f"of shape ({shape})", "inputs", tuple(inputs.shape))


def result_dtype(layer, inputs):
    """Dtype of a scheme's output.

    A scheme is injected into layers of any policy: one of the default policy
    float32 leaves half precision as it comes; another policy decides itself.
    """
    if layer.compute_dtype == "float32":
        return keras.backend.standardize_dtype(inputs.dtype)
    return layer.compute_dtype


def table_initializer(initializer):
    """The initializer of a table; None is normal with deviation 0.02."""
    if initializer is None:
        return keras.initializers.RandomNormal(stddev=0.02)
    return keras.initializers.get(copy_of(initializer, "embeddings"))


def pairwise_offsets(query_positions, key_positions):
    """`key - query`, int32 `(1 or batch, query_length, key_length)`."""
    query = integer_positions(query_positions, "query_positions")
    key = integer_positions(key_positions, "key_positions")
    query = query[None] if len(query.shape) == 1 else query
    key = key[None] if len(key.shape) == 1 else key
    return key[:, None, :] - query[:, :, None]
