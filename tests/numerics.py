"""Tolerances, chosen once, and small helpers on arrays."""

import keras
import numpy as np
from keras import ops

# Relative to the norm of the expected array.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def assert_close(actual, expected, dtype="float32", scale=1.0, floor=1e-3):
    """Asserts that the difference is small beside the expected norm.

    Norms below `floor` count as `floor`.
    """
    actual = to_numpy(actual)
    expected = np.asarray(expected, "float64")
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all()
    norm = max(np.linalg.norm(expected), floor)
    error = np.linalg.norm(actual - expected) / norm
    assert error <= TOLERANCE[dtype] * scale, f"relative error {error:.3g}"


def to_numpy(tensor):
    """A float64 (or integer, or boolean) NumPy copy of a tensor."""
    array = np.asarray(ops.convert_to_numpy(ops.convert_to_tensor(tensor)))
    return array if array.dtype.kind in "biu" else array.astype("float64")


def normal(*shape, seed=0, dtype="float32"):
    """Standard normal numbers that do not depend on the backend."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def randomize_weights(layer, seed=0, scale=0.3):
    """Gives every float weight random values: a zero would hide a mistake."""
    generator = np.random.default_rng(seed)
    for weight in layer.weights:
        if "float" in keras.backend.standardize_dtype(weight.dtype):
            values = generator.normal(size=weight.shape) * scale
            weight.assign(values.astype("float32"))


def gradients(function, *arrays):
    """Gradients of a scalar function with respect to its float arguments.

    Args:
        function: Takes tensors, returns a scalar tensor.
        *arrays: NumPy arrays.

    Returns:
        A list of NumPy arrays.
    """
    backend = keras.backend.backend()
    tensors = [ops.convert_to_tensor(array) for array in arrays]
    if backend == "jax":
        import jax

        results = jax.grad(function, argnums=tuple(range(len(arrays))))(
            *tensors
        )
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        results = tape.gradient(value, tensors)
    else:
        import torch

        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        results = torch.autograd.grad(function(*tensors), tensors)
    return [to_numpy(result) for result in results]
