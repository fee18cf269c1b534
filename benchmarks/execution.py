"""How each backend runs a function at its best.

JAX and TensorFlow compile with XLA, PyTorch runs eagerly. Every function made
here returns finished results.
"""

import functools
import inspect

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()

if BACKEND == "jax":
    import jax
elif BACKEND == "tensorflow":
    import tensorflow as tf
else:
    import torch


def random_tensor(shape, dtype="float32", seed=0):
    """Standard normal numbers, the same in all dtypes, on the device."""
    values = np.random.default_rng(seed).normal(size=shape)
    rounded = ops.convert_to_tensor(values.astype("float32"), "bfloat16")
    return ops.cast(rounded, dtype)


def compiled(function):
    """The function as the backend runs it best."""
    if BACKEND == "jax":
        return jax.jit(function)
    if BACKEND == "tensorflow":
        return tf.function(function, jit_compile=True, autograph=False)
    return function


def finished(outputs):
    """The outputs, as soon as they are there."""
    if BACKEND == "jax":
        jax.block_until_ready(outputs)
    elif BACKEND == "tensorflow":
        tf.test.experimental.sync_devices()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()
    return outputs


def runner(function, *tensors):
    """`function(*tensors)`, compiled, as a function without arguments."""
    function = compiled(function)

    def run():
        return finished(function(*tensors))

    def run_without_gradients():
        with torch.no_grad():
            return run()

    return run_without_gradients if BACKEND == "torch" else run


def gradient_runner(function, count, gradient, *tensors):
    """Forward and backward, compiled, as a function without arguments.

    It returns the output and the list of gradients.

    Args:
        function: Takes the tensors, returns one.
        count: How many of them, the first ones, get gradients.
        gradient: The gradient of the output; None: ones.
        *tensors: The arguments. For JAX the first may be a list.
    """
    if BACKEND == "torch":
        return _torch_gradients(function, count, gradient, tensors)
    step = _jax_step if BACKEND == "jax" else _tensorflow_step
    step = compiled(functools.partial(step, function, count))
    return lambda: finished(step(gradient, *tensors))


def _jax_step(function, count, gradient, *tensors):
    def of_the_first(*first):
        return function(*first, *tensors[count:])

    outputs, pull = jax.vjp(of_the_first, *tensors[:count])
    if gradient is None:
        gradient = ops.ones_like(outputs)
    return outputs, pull(gradient)


def _tensorflow_step(function, count, gradient, *tensors):
    with tf.GradientTape() as tape:
        tape.watch(tensors[:count])
        outputs = function(*tensors)
    sources = [*tensors[:count], *tape.watched_variables()]
    return outputs, tape.gradient(outputs, sources, gradient)


def _torch_gradients(function, count, gradient, tensors):
    first = [tensor.detach().requires_grad_() for tensor in tensors[:count]]

    def run():
        outputs = function(*first, *tensors[count:])
        ones = torch.ones_like(outputs) if gradient is None else gradient
        outputs.backward(ones)
        gradients = [tensor.grad for tensor in first]
        for tensor in first:
            tensor.grad = None
        return finished((outputs.detach(), gradients))

    return run


def layer_runner(layer, *inputs):
    """The forward pass of a layer at inference, without arguments."""
    if BACKEND != "jax":
        return runner(lambda *inputs: layer(*inputs), *inputs)
    layer(*inputs)
    weights, call = _stateless(layer, training=False)
    return runner(call, weights, *inputs)


def layer_gradient_runner(layer, *inputs):
    """Forward and backward of a layer in training.

    The gradients are those of its weights and of its first input.
    """
    layer(*inputs)
    if BACKEND == "jax":
        weights, call = _stateless(layer, training=True)
        return gradient_runner(call, 2, None, weights, *inputs)

    options = _training_option(layer, True)

    def call(*inputs):
        return layer(*inputs, **options)

    step = gradient_runner(call, 1, None, *inputs)
    if BACKEND == "tensorflow":
        return step

    def run():
        step()
        layer.zero_grad()

    return run


def _training_option(layer, training):
    takes_it = "training" in inspect.signature(layer.call).parameters
    return {"training": training} if takes_it else {}


def _stateless(layer, training):
    options = _training_option(layer, training)
    weights = [weight.value for weight in layer.trainable_variables]
    others = [weight.value for weight in layer.non_trainable_variables]

    def call(weights, *inputs):
        # Weights are arguments: XLA would fold constants.
        outputs, _ = layer.stateless_call(weights, others, *inputs, **options)
        return outputs

    return weights, call
