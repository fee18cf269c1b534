"""JAX."""

import contextlib

import jax
import jax.extend


def fused_refusal(*, has_mask, has_bias, is_half, same_width):
    """Why the kernel cannot take the call, or None when it can."""
    if has_mask:
        return "a row that sees no key would not be exactly zero"
    if has_bias:
        return "score biases are left to the dense executor"
    if not same_width:
        return "values must be as wide as keys"
    if is_half and jax.default_backend() == "cpu":
        return "half-precision products are not available on the CPU"
    return None


def fused_attention(query, key, value, *, allowed, bias, is_causal, scale):
    """Attention by `jax.nn.dot_product_attention`, without mask or bias."""
    del allowed, bias
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not isinstance(tensor, jax.core.Tracer)


def current_trace():
    """What is being traced now; equal inside of one function only."""
    return jax.extend.core.get_opaque_trace_state()


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
