import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.blocks import Unembedding
from keras_transformer.training import (
    LabelSmoothedCrossentropy,
    linear_crossentropy,
)
from tests.decoding.compiling import compiled, operations
from tests.numerics import assert_close, gradients, normal, to_numpy
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH, VOCABULARY_SIZE

SHAPE = (BATCH, QUERY_LENGTH)
INPUTS = normal(*SHAPE, MODEL_DIM)
KERNEL = normal(MODEL_DIM, VOCABULARY_SIZE, seed=1)
BIAS = normal(VOCABULARY_SIZE, seed=2)
TARGETS = np.random.default_rng(3).integers(0, VOCABULARY_SIZE, SHAPE)
WEIGHTS = np.random.default_rng(4).uniform(0.5, 2, SHAPE).astype("float32")
MEAN = "mean_with_sample_weight"


def reference(inputs, kernel, bias, targets, soft_cap, smoothing):
    """Losses, and the gradients of their logits before the cap, in float64."""
    logits = inputs.astype("float64") @ kernel + bias
    slope = 1.0
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
        slope = 1 - (logits / soft_cap) ** 2
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    wanted = np.full(logits.shape, smoothing / logits.shape[-1])
    wanted += (1 - smoothing) * np.eye(logits.shape[-1])[targets]
    losses = -(wanted * (shifted - np.log(total))).sum(axis=-1)
    return losses, (exponentials / total - wanted) * slope


def mean_loss(targets, *, way="late", transposed=False, **options):
    """The weighted mean as a function of inputs, kernel, bias and weights.

    Its gradients are taken in the backward pass ("late") or in the forward
    pass ("early").
    """
    targets = ops.convert_to_tensor(targets)

    def function(inputs, kernel, bias, weights):
        losses = linear_crossentropy(
            inputs,
            ops.transpose(kernel) if transposed else kernel,
            targets,
            weights,
            bias=bias,
            transposed=transposed,
            reduction=MEAN if way == "early" else None,
            **options,
        )
        if way == "early":
            return losses
        return ops.sum(losses) / ops.sum(weights)

    return function


@pytest.mark.parametrize("way", ["late", "early"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("soft_cap", "smoothing"), [(None, 0.0), (None, 0.1), (3.0, 0.2)]
)
def test_values_and_gradients_match_the_formula(
    way, transposed, soft_cap, smoothing
):
    function = mean_loss(
        TARGETS,
        way=way,
        transposed=transposed,
        soft_cap=soft_cap,
        label_smoothing=smoothing,
        chunk_size=4,  # does not divide the number of tokens
    )
    arrays = (INPUTS, KERNEL, BIAS, WEIGHTS)
    losses, of_logits = reference(
        INPUTS, KERNEL, BIAS, TARGETS, soft_cap, smoothing
    )
    mean = (WEIGHTS * losses).sum() / WEIGHTS.sum()
    assert_close(function(*map(ops.convert_to_tensor, arrays)), mean)
    of_logits *= (WEIGHTS / WEIGHTS.sum())[..., None]
    expected = (
        of_logits @ KERNEL.T,
        np.einsum("btd,btv->dv", INPUTS, of_logits),
        of_logits.sum(axis=(0, 1)),
        (losses - mean) / WEIGHTS.sum(),
    )
    actual = gradients(function, *arrays)
    for gradient, wanted in zip(actual, expected, strict=True):
        assert_close(gradient, wanted)


def test_losses_of_tokens_are_weighted_one_by_one():
    losses, _ = reference(INPUTS, KERNEL, 0.0, TARGETS, None, 0.0)
    assert_close(linear_crossentropy(INPUTS, KERNEL, TARGETS), losses)
    assert_close(
        linear_crossentropy(INPUTS, KERNEL, TARGETS, WEIGHTS), WEIGHTS * losses
    )
    for training in (True, False):
        mean = linear_crossentropy(
            INPUTS, KERNEL, TARGETS, reduction=MEAN, training=training
        )
        assert_close(mean, losses.mean())


@pytest.mark.parametrize("way", ["late", "early"])
def test_equals_an_unembedding_and_its_loss(way):
    layer = Unembedding(
        vocabulary_size=VOCABULARY_SIZE, use_bias=True, soft_cap=2.0
    )
    layer.build((*SHAPE, MODEL_DIM))
    dense_loss = LabelSmoothedCrossentropy(0.1)

    def dense(inputs, kernel, bias, weights):
        logits = ops.matmul(inputs, kernel) + bias
        logits = 2 * ops.tanh(logits / 2)
        return dense_loss(ops.convert_to_tensor(TARGETS), logits, weights)

    arrays = (INPUTS, KERNEL, BIAS, WEIGHTS)
    layer.set_weights([KERNEL, BIAS])
    loss = dense_loss(TARGETS, layer(INPUTS), WEIGHTS)
    ours = mean_loss(TARGETS, way=way, soft_cap=2.0, label_smoothing=0.1)
    assert_close(ours(*map(ops.convert_to_tensor, arrays)), to_numpy(loss))
    expected = gradients(dense, *arrays)
    for gradient, wanted in zip(
        gradients(ours, *arrays), expected, strict=True
    ):
        assert_close(gradient, wanted)


@pytest.mark.parametrize("chunk_size", [1, 5, 15, 64, None])
def test_the_chunk_size_does_not_change_the_losses(chunk_size):
    losses, _ = reference(INPUTS, KERNEL, 0.0, TARGETS, None, 0.0)
    for targets, inputs, expected in (
        (TARGETS, INPUTS, losses),
        (TARGETS[0, 0], INPUTS[0, 0], losses[0, 0]),
    ):
        actual = linear_crossentropy(
            inputs, KERNEL, targets, chunk_size=chunk_size
        )
        assert_close(actual, expected)


def test_runs_compiled_for_any_number_of_tokens():
    run = compiled(
        lambda inputs, kernel, targets: linear_crossentropy(
            inputs, kernel, targets, chunk_size=4
        )
    )
    losses, _ = reference(INPUTS, KERNEL, 0.0, TARGETS, None, 0.0)
    for size in (1, 2, 3):
        tensors = INPUTS[:size], KERNEL, TARGETS[:size]
        actual = run(*map(ops.convert_to_tensor, tensors))
        assert_close(actual, losses[:size])


@pytest.mark.parametrize("way", ["late", "early"])
def test_tokens_without_weight_may_hold_any_id(way):
    weights = WEIGHTS.copy()
    weights[:, 2:] = 0
    arrays = (INPUTS, KERNEL, BIAS)
    results = []
    for strange in (0, -100, VOCABULARY_SIZE, 2**31 - 1):
        targets = np.where(weights == 0, strange, TARGETS)
        function = mean_loss(targets, way=way, chunk_size=4)
        fixed = ops.convert_to_tensor(weights)

        def weighted(*tensors, function=function, fixed=fixed):
            return function(*tensors, fixed)

        tensors = map(ops.convert_to_tensor, arrays)
        results.append([weighted(*tensors), *gradients(weighted, *arrays)])
    losses, _ = reference(INPUTS, KERNEL, BIAS, TARGETS, None, 0.0)
    assert_close(results[0][0], (losses * weights).sum() / weights.sum())
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_close(actual, to_numpy(expected))


@pytest.mark.parametrize("training", [True, False])
def test_negative_targets_do_not_count_and_large_ones_are_not_hidden(training):
    targets = TARGETS.copy()
    targets[:, 0] = -1
    options = {"reduction": MEAN, "training": training}
    losses, _ = reference(INPUTS, KERNEL, 0.0, TARGETS, None, 0.0)
    mean = linear_crossentropy(INPUTS, KERNEL, targets, **options)
    assert_close(mean, losses[:, 1:].mean())
    targets[0, 0] = VOCABULARY_SIZE
    mean = linear_crossentropy(INPUTS, KERNEL, targets, **options)
    assert np.isnan(to_numpy(mean))


@pytest.mark.parametrize("way", ["late", "early"])
def test_a_target_beyond_the_vocabulary_pulls_no_other_token(way):
    targets = TARGETS.copy()
    targets[0, 0] = VOCABULARY_SIZE
    function = mean_loss(targets, way=way)
    _, _, of_bias, _ = gradients(function, INPUTS, KERNEL, BIAS, WEIGHTS)
    _, slopes = reference(INPUTS, KERNEL, BIAS, TARGETS, None, 0.0)
    # Of that token only the probabilities are left.
    slopes[0, 0, TARGETS[0, 0]] += 1.0
    slopes = slopes * WEIGHTS[..., None] / WEIGHTS.sum()
    assert_close(of_bias, slopes.sum((0, 1)))


def test_sums_of_half_precision_do_not_overflow():
    # The gradients of single tokens fit into float16, their sum does not.
    weights = np.full(SHAPE, 1e4, "float32")
    targets = np.zeros(SHAPE, "int32")
    found = {
        way: gradients(
            lambda *arrays, way=way: ops.cast(
                mean_loss(targets, way=way, chunk_size=1)(
                    ops.cast(arrays[0], "float16"), *arrays[1:]
                ),
                "float32",
            ),
            abs(INPUTS),
            0.1 * KERNEL,
            BIAS,
            weights,
        )
        for way in ("late", "early")
    }
    for late, early in zip(*found.values(), strict=True):
        assert np.isfinite(early).all()
        assert_close(early, late, "float16")


@pytest.mark.parametrize("way", ["late", "early"])
def test_nothing_to_learn_is_a_loss_of_zero(way):
    function = mean_loss(np.full(SHAPE, -1), way=way)
    ones = np.ones(SHAPE, "float32")
    arrays = (INPUTS, KERNEL, BIAS, ones)
    assert_close(function(*map(ops.convert_to_tensor, arrays)), 0.0)
    for gradient in gradients(function, *arrays):
        assert not gradient.any()


@pytest.mark.parametrize("way", ["late", "early"])
def test_huge_logits_are_safe(way):
    function = mean_loss(TARGETS, way=way)
    arrays = (1e4 * INPUTS, KERNEL, BIAS, WEIGHTS)
    losses, _ = reference(1e4 * INPUTS, KERNEL, BIAS, TARGETS, None, 0.0)
    expected = (WEIGHTS * losses).sum() / WEIGHTS.sum()
    assert_close(function(*map(ops.convert_to_tensor, arrays)), expected)
    for gradient in gradients(function, *arrays):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["late", "early"])
def test_half_precision_rounds_products_only(way, dtype):
    def rounded(array):
        return to_numpy(ops.cast(ops.cast(array, dtype), "float32"))

    loss = mean_loss(TARGETS, way=way, chunk_size=4)

    def function(inputs, kernel, *others):
        result = loss(ops.cast(inputs, dtype), kernel, *others)
        assert keras.backend.standardize_dtype(result.dtype) == "float32"
        return result

    arrays = (INPUTS, KERNEL, BIAS, WEIGHTS)
    inputs, kernel = rounded(INPUTS), rounded(KERNEL)
    losses, of_logits = reference(inputs, kernel, BIAS, TARGETS, None, 0.0)
    expected = (WEIGHTS * losses).sum() / WEIGHTS.sum()
    actual = function(*map(ops.convert_to_tensor, arrays))
    assert_close(actual, expected, dtype)
    of_logits *= (WEIGHTS / WEIGHTS.sum())[..., None]
    of_inputs, of_kernel, of_bias, _ = gradients(function, *arrays)
    assert_close(of_inputs, of_logits @ kernel.T, dtype)
    assert_close(of_kernel, np.einsum("btd,btv->dv", inputs, of_logits), dtype)
    assert_close(of_bias, of_logits.sum(axis=(0, 1)), dtype)


def largest_tensor(function, *arrays):
    """Number of elements of the largest one that the gradient makes."""
    tensors = [ops.convert_to_tensor(array) for array in arrays]
    if keras.backend.backend() == "jax":
        import jax

        text = operations(jax.grad(function, argnums=(0, 1)), *tensors)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def gradient(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
            return tape.gradient(value, tensors)

        text = operations(gradient, *tensors)
    else:
        return largest_torch_tensor(function, *arrays)
    shapes = re.findall(r"\b(?:f|s|u|bf|pred)\d*\[([\d,]*)\]", text)
    return max(math.prod(map(int, s.split(","))) for s in shapes if s)


def largest_torch_tensor(function, *arrays):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            outputs = operation(*args, **(kwargs or {}))
            sizes.extend(
                tensor.numel()
                for tensor in keras.tree.flatten(outputs)
                if isinstance(tensor, torch.Tensor)
            )
            return outputs

    with Recorder():
        gradients(function, *arrays)
    return max(sizes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reduction", [None, MEAN])
def test_no_tensor_of_tokens_times_vocabulary_is_made(reduction, transposed):
    num_tokens, vocabulary_size, chunk_size = 64, 96, 8
    inputs = normal(num_tokens, 4)
    table = normal(vocabulary_size, 4)
    kernel = table if transposed else np.ascontiguousarray(table.T)
    targets = ops.convert_to_tensor(np.arange(num_tokens, dtype="int32"))

    def chunked(inputs, kernel):
        losses = linear_crossentropy(
            inputs,
            kernel,
            targets,
            transposed=transposed,
            reduction=reduction,
            chunk_size=chunk_size,
        )
        return ops.sum(losses)

    def dense(inputs, kernel):
        if transposed:
            kernel = ops.transpose(kernel)
        logits = ops.matmul(inputs, kernel)
        return LabelSmoothedCrossentropy(0.0)(targets, logits)

    held = chunk_size * vocabulary_size
    assert largest_tensor(chunked, inputs, kernel) <= held
    # The witness sees the logits where they are.
    dense_size = largest_tensor(dense, inputs, kernel)
    assert dense_size >= num_tokens * vocabulary_size


def test_rejects_what_does_not_fit():
    def rejects(message, *arrays, **options):
        with pytest.raises(ValueError, match=message):
            linear_crossentropy(*arrays, **options)

    rejects(
        r"`kernel.shape` must be \(vocabulary_size, model_dim\) with "
        r"model_dim=24.*transposed=True",
        *(INPUTS, KERNEL, TARGETS),
        transposed=True,
    )
    rejects("`kernel.shape` must be", INPUTS, KERNEL.T, TARGETS)
    rejects("`kernel.shape` must be", INPUTS, KERNEL[None], TARGETS)
    rejects(
        r"`bias.shape` must be \(29,\)",
        *(INPUTS, KERNEL, TARGETS),
        bias=BIAS[1:],
    )
    rejects(
        r"`targets.shape` must be \(3, 5\)", INPUTS, KERNEL, TARGETS[..., None]
    )
    rejects(
        r"`sample_weight.shape` must be \(3, 5\)",
        *(INPUTS, KERNEL, TARGETS, WEIGHTS[:, :1]),
    )
    rejects("`targets.dtype` must be integers", INPUTS, KERNEL, WEIGHTS)
    integers = np.ones(INPUTS.shape, "int32")
    rejects("`inputs.dtype` must be floats", integers, KERNEL, TARGETS)
    for option, value in (
        ("transposed", 1),
        ("soft_cap", 0.0),
        ("label_smoothing", 1.0),
        ("reduction", "mean"),
        ("training", None),
        ("chunk_size", 0),
    ):
        rejects(
            f"`{option}` must be", INPUTS, KERNEL, TARGETS, **{option: value}
        )
