"""TensorFlow."""

import contextlib

import tensorflow as tf

from keras_transformer._internal import hashing

KERNELS = ()
NO_KERNELS = "TensorFlow has no fused attention kernel"


def device_of(tensor):
    """Where tensors are by default: "cpu", "gpu" or "tpu"."""
    del tensor
    for kind in ("TPU", "GPU"):
        if tf.config.list_logical_devices(kind):
            return kind.lower()
    return "cpu"


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not tf.is_symbolic_tensor(tensor)


def current_trace():
    """What is being traced now; equal inside of one function only."""
    if tf.executing_eagerly():
        return None
    return id(tf.compat.v1.get_default_graph())


def traced(function, *specs):
    """Calls the function with tensors of these shapes and dtypes, no values.

    Args:
        function: Takes the tensors; what it returns is dropped.
        *specs: Anything with `shape` and `dtype`.
    """

    def call(*tensors):
        function(*tensors)

    tf.function(call, autograph=False).get_concrete_function(
        *(tf.TensorSpec(spec.shape, spec.dtype) for spec in specs)
    )


def with_gradient(forward, backward, *tensors):
    """The outputs of `forward(*tensors)`, with a gradient of its own.

    Args:
        forward: Takes the tensors; returns the output and what `backward`
            needs, any structure of tensors.
        backward: Takes the second of these and the gradient of the output;
            returns one gradient for each tensor, None where there is none.
        *tensors: All tensors that the two functions read: none may be
            closed over.
    """

    @tf.custom_gradient
    def function(*tensors):
        output, saved = forward(*tensors)
        return output, lambda gradient: backward(saved, gradient)

    return function(*map(tf.convert_to_tensor, tensors))


def pulled_back(function, tensors, gradient):
    """The gradients of `tensors` from that of `function(*tensors)`."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs = function(*tensors)
    return tape.gradient(
        outputs,
        tensors,
        output_gradients=gradient,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )


random_halves = hashing.random_halves

# Pairs of slots from which on blocks are faster than dense scores.
BLOCKS_FROM = 1 << 16
# Sizes of tiles of attention, and what a pair of slots in one costs.
TILE_SIZES = {(256, 512): 1.0, (256, 256): 1.05, (128, 128): 1.3}


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
