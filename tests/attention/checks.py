"""What the attention tests share."""

import keras
import numpy as np
from keras import ops

from tests.numerics import TOLERANCE, gradients, to_numpy
from tests.reference.attention import slope


def compiled(function):
    """`function` of tensors under XLA; PyTorch runs it as it is."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return function


def fast_gradients(function, *arrays):
    """Like `tests.numerics.gradients`, but JAX compiles it as one program."""
    if keras.backend.backend() != "jax":
        return gradients(function, *arrays)
    import jax

    tensors = [ops.convert_to_tensor(array) for array in arrays]
    differentiated = jax.grad(function, argnums=tuple(range(len(arrays))))
    return [to_numpy(result) for result in jax.jit(differentiated)(*tensors)]


def assert_slopes(found, reference, arrays, dtype="float32"):
    """Asserts that gradients agree with the slopes of a reference.

    The root mean square over random directions of the error's component is
    the norm of the error, so the tolerance is that of a whole gradient.

    Args:
        found: Name to gradient.
        reference: A complex-analytic function of `arrays`, to a scalar.
        arrays: Name to float64 array.
        dtype: Whose tolerance holds.
    """
    generator = np.random.default_rng(7)
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        directions = generator.normal(size=(4, *gradient.shape))
        expected = [slope(reference, arrays, name, d) for d in directions]
        actual = [(gradient * d).sum() for d in directions]
        error = np.sqrt(np.mean(np.subtract(actual, expected) ** 2))
        norm = max(np.linalg.norm(gradient), 1e-3)
        assert np.linalg.norm(gradient) > 1e-4, f"{name} has no gradient"
        assert error <= 2 * TOLERANCE[dtype] * norm, (name, error / norm)
