"""JAX."""

import contextlib

import jax
import jax.extend

from keras_transformer._internal import hashing
from keras_transformer._internal.backends import jax_kernels


def device_of(tensor):
    """Where the tensor is, or is to be: "cpu", "gpu" or "tpu"."""
    if is_concrete(tensor):
        return next(iter(tensor.devices())).platform
    return jax.default_backend()


KERNELS = jax_kernels.KERNELS


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not isinstance(tensor, jax.core.Tracer)


def current_trace():
    """What is being traced now; equal inside of one function only."""
    return jax.extend.core.get_opaque_trace_state()


def traced(function, *specs):
    """Calls the function with tensors of these shapes and dtypes, no values.

    Args:
        function: Takes the tensors; what it returns is dropped.
        *specs: Anything with `shape` and `dtype`.
    """

    def call(*tensors):
        function(*tensors)

    jax.eval_shape(
        call, *(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs)
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

    @jax.custom_vjp
    def function(*tensors):
        return forward(*tensors)[0]

    function.defvjp(forward, backward)
    return function(*tensors)


def pulled_back(function, tensors, gradient):
    """The gradients of `tensors` from that of `function(*tensors)`."""
    return jax.vjp(function, *tensors)[1](gradient)


random_halves = hashing.random_halves

# Pairs of slots from which on blocks are faster than dense scores.
BLOCKS_FROM = 1 << 16
# Sizes of tiles of attention, and what a pair of slots in one costs.
TILE_SIZES = {(256, 512): 1.0, (256, 256): 1.05, (128, 128): 1.3}


def write_token(cache, new, indices, in_place):
    """`cache[row, indices[row]] = new[row]` for every row.

    Arrays do not change, but in a compiled loop XLA writes in place.

    Args:
        cache: (batch, size, ...).
        new: (batch, ...).
        indices: int32 (batch,), below size.
        in_place: Without meaning here.
    """
    del in_place
    rows = jax.numpy.arange(cache.shape[0])
    return cache.at[rows, indices].set(new.astype(cache.dtype))


def compiled(function, donated=None):
    """The jitted function; the memory of argument `donated` may be reused."""
    return jax.jit(function, donate_argnums=donated)


def for_one_run(function):
    """The jitted function, compiled quickly: it will run once.

    Eager execution would compile each of its operations by itself.
    """
    return jax.jit(
        function,
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        },
    )


while_loop = jax.lax.while_loop

# Compiled functions would keep weights that they only refer to as constants.
TAKES_WEIGHTS = True
RUNS_STEP_BY_STEP = False

no_gradients = contextlib.nullcontext
