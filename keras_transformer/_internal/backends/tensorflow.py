"""TensorFlow."""

import contextlib

import tensorflow as tf


def fused_refusal(**_):
    """TensorFlow has no fused attention."""
    return "TensorFlow has no fused attention kernel"


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not tf.is_symbolic_tensor(tensor)


def write_token(cache, new, indices, in_place):
    """`cache[row, indices[row]] = new[row]` for every row.

    Tensors do not change, but in a compiled loop XLA writes in place.

    Args:
        cache: (batch, size, ...).
        new: (batch, ...).
        indices: int32 (batch,), below size.
        in_place: Without meaning here.
    """
    del in_place
    places = tf.stack([tf.range(tf.shape(indices)[0]), indices], axis=-1)
    return tf.tensor_scatter_nd_update(cache, places, tf.cast(new, cache.dtype))


def compiled(function):
    """The function as one XLA program."""
    return tf.function(function, jit_compile=True)


def while_loop(condition, body, state):
    """`state = body(state)` while `condition(state)`, for any structure."""
    return tf.while_loop(condition, lambda state: (body(state),), (state,))[0]


TAKES_WEIGHTS = False
RUNS_STEP_BY_STEP = False

no_gradients = contextlib.nullcontext
