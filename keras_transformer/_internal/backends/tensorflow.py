"""TensorFlow."""

import contextlib

import tensorflow as tf


def fused_refusal(**_):
    """TensorFlow has no fused attention."""
    return "TensorFlow has no fused attention kernel"


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not tf.is_symbolic_tensor(tensor)


def current_trace():
    """What is being traced now; equal inside of one function only."""
    if tf.executing_eagerly():
        return None
    return id(tf.compat.v1.get_default_graph())


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


def compiled(function, donated=None):
    """The function as one XLA program for each set of argument shapes."""
    del donated
    programs = {}

    def run(*args):
        leaves = tf.nest.flatten(args)
        key = tuple(
            None if leaf is None else (leaf.dtype, *leaf.shape)
            for leaf in leaves
        )
        # Traced by hand: TensorFlow warns of functions that are traced often.
        if key not in programs:
            traced = tf.function(function, jit_compile=True, autograph=False)
            programs[key] = traced.get_concrete_function(*args)
        return programs[key](*args)

    return run


def for_one_run(function):
    """The function itself: compiling it would cost more than it saves."""
    return function


def while_loop(condition, body, state):
    """`state = body(state)` while `condition(state)`, for any structure."""
    return tf.while_loop(condition, lambda state: (body(state),), (state,))[0]


TAKES_WEIGHTS = False
RUNS_STEP_BY_STEP = False

no_gradients = contextlib.nullcontext
