"""Functions as the backend's compiler runs them."""

import keras


def compiled(function):
    """`function` of tensors under XLA; PyTorch runs it as it is."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return function
