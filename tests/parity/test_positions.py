"""Against KerasHub, where it is right (its "dynamic" RoPE is not)."""

import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import (
    ALiBi,
    Learned,
    RoPE,
    RoPEScaling,
    sinusoidal_encoding,
)
from tests.numerics import normal, to_numpy
from tests.sizes import BATCH, MODEL_DIM, NUM_HEADS, QUERY_LENGTH

pytestmark = pytest.mark.parity

HEAD_DIM = 32
# Near positions: further out, KerasHub's float32 angles lose digits.
POSITIONS = np.array([[0, 1, 2, 3, 4], [30, 7, 7, 90, 91], [5, 6, 7, 8, 9]])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, {}),
        (RoPEScaling.linear(4.0), {"scaling_factor": 4.0}),
        (
            RoPEScaling.yarn(4.0, 512),
            {
                "rope_type": "yarn",
                "scaling_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        (
            RoPEScaling.yarn(
                8.0, 4096, beta_fast=16, beta_slow=2, truncate=False
            ),
            {
                "rope_type": "yarn",
                "scaling_factor": 8.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        ),
    ],
)
def test_rope_equals_kerashub(ours, theirs):
    inputs = normal(BATCH, QUERY_LENGTH, NUM_HEADS, HEAD_DIM)
    outputs = RoPE(scaling=ours)(inputs, positions=POSITIONS)
    expected = keras_hub.layers.RotaryEmbedding(**theirs)(
        inputs, positions=POSITIONS
    )
    np.testing.assert_allclose(to_numpy(outputs), to_numpy(expected), atol=5e-5)


def test_sinusoidal_equals_kerashub():
    expected = keras_hub.layers.SinePositionEncoding()(
        normal(1, QUERY_LENGTH, MODEL_DIM)
    )
    outputs = sinusoidal_encoding(np.arange(QUERY_LENGTH), MODEL_DIM)
    np.testing.assert_allclose(
        to_numpy(outputs), to_numpy(expected)[0], atol=1e-6
    )


def test_learned_equals_kerashub():
    inputs = normal(1, QUERY_LENGTH, MODEL_DIM)
    theirs = keras_hub.layers.PositionEmbedding(9)
    expected = to_numpy(theirs(inputs))
    ours = Learned(9)
    ours.build(inputs.shape)
    ours.set_weights(theirs.get_weights())
    np.testing.assert_array_equal(to_numpy(ours(inputs)), expected[0])


def test_alibi_equals_kerashub_in_causal_rows():
    # KerasHub counts from the end: each row is off by a constant, which the
    # softmax removes.
    scores = np.zeros((1, NUM_HEADS, QUERY_LENGTH, QUERY_LENGTH), "float32")
    expected = to_numpy(keras_hub.layers.AlibiBias()(scores))
    positions = np.arange(QUERY_LENGTH)
    bias = to_numpy(ALiBi(num_heads=NUM_HEADS)(positions, positions))
    causal = np.tril(np.ones((QUERY_LENGTH, QUERY_LENGTH)))
    first = slice(0, 1)
    ours = (bias - bias[..., first]) * causal
    theirs = (expected - expected[..., first]) * causal
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert ops.shape(bias) == (1, NUM_HEADS, QUERY_LENGTH, QUERY_LENGTH)
