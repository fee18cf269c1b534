import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention.dense import dense_attention
from tests.attention.checks import fast_gradients
from tests.numerics import assert_close, normal, to_numpy
from tests.reference.attention import attention
from tests.sizes import (
    BATCH,
    KEY_DIM,
    KEY_LENGTH,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    QUERY_LENGTH,
    VALUE_DIM,
)


def arrays(scale=1.0):
    groups = NUM_KEY_VALUE_HEADS
    query = normal(BATCH, QUERY_LENGTH, NUM_HEADS, KEY_DIM, seed=1)
    return (
        query * scale,
        normal(BATCH, KEY_LENGTH, groups, KEY_DIM, seed=2) * scale,
        normal(BATCH, KEY_LENGTH, groups, VALUE_DIM, seed=3),
    )


def tensors(dtype="float32", scale=1.0):
    return [ops.convert_to_tensor(x, dtype) for x in arrays(scale)]


def as_float(tensor):
    return to_numpy(ops.cast(tensor, "float32"))


def test_returns_outputs_and_weights_of_the_formula():
    allowed = np.tril(np.ones((QUERY_LENGTH, KEY_LENGTH), bool))
    expected = attention(*arrays(), allowed=allowed, scale=0.3)
    outputs, weights = dense_attention(*tensors(), scale=0.3, allowed=allowed)
    assert_close(outputs, expected[0])
    assert_close(weights, expected[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_float32_and_as_exact_in_half_precision(dtype):
    query, key, value = tensors(dtype)
    outputs, weights = dense_attention(query, key, value, scale=1.0)
    _, expected = attention(*map(as_float, (query, key, value)), scale=1.0)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    assert keras.backend.standardize_dtype(weights.dtype) == "float32"
    assert_close(weights, expected)


def test_scores_beyond_float16_neither_overflow_nor_lose_their_gradient():
    # Products reach 1e6; the largest float16 number is 65504.
    query, key, value = tensors("float16", scale=400.0)
    scale = 1e-5
    rounded = [as_float(x) for x in (query, key, value)]
    outputs, weights = dense_attention(query, key, value, scale=scale)
    _, expected = attention(*rounded, scale=scale)
    assert_close(weights, expected)
    assert np.isfinite(as_float(outputs)).all()

    def loss(query, key, value):
        outputs, _ = dense_attention(query, key, value, scale=scale)
        return ops.sum(ops.cast(outputs, "float32") ** 2)

    for gradient in fast_gradients(loss, query, key, value):
        assert np.isfinite(gradient).all()
        assert (gradient != 0).any()


def test_sinks_take_weight_from_the_keys():
    sinks = normal(NUM_HEADS, seed=4)
    _, weights = dense_attention(*tensors(), scale=1.0, sinks=sinks)
    assert (to_numpy(weights).sum(-1) < 1).all()
    _, weights = dense_attention(
        *tensors(), scale=1.0, sinks=np.full(NUM_HEADS, -1e9, "float32")
    )
    np.testing.assert_allclose(to_numpy(weights).sum(-1), 1, rtol=1e-6)


def test_a_large_sink_takes_all_weight_without_nan():
    outputs, weights = dense_attention(
        *tensors(), scale=1.0, sinks=np.full(NUM_HEADS, 1e9, "float32")
    )
    assert (to_numpy(weights) == 0).all()
    assert (to_numpy(outputs) == 0).all()
