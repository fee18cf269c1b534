import json
import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import RelativePositionBias
from keras_transformer.positions.relative import bucket_table
from tests.numerics import gradients, to_numpy
from tests.sizes import KEY_LENGTH, NUM_HEADS, QUERY_LENGTH

QUERIES = np.arange(QUERY_LENGTH) + 40
KEYS = np.stack([np.arange(KEY_LENGTH) + 38, np.arange(KEY_LENGTH) * 30])
OFFSETS = [-200, -128, -100, -64, -20, -16, -15, -9, -8, -7]
OFFSETS += [-1, 0, 1, 7, 8, 9, 16, 64, 127, 128, 200]
# Of the T5 of Hugging Face transformers, 32 buckets, distance 128.
BIDIRECTIONAL = [15, 15, 15, 14, 10, 10, 9, 8, 8, 7]
BIDIRECTIONAL += [1, 0, 17, 23, 24, 24, 26, 30, 31, 31, 31]
CAUSAL = [31, 31, 30, 26, 17, 16, 15, 9, 8, 7, 1, 0] + [0] * 9


def bias_layer(**kwargs):
    layer = RelativePositionBias(
        num_heads=NUM_HEADS, initializer="random_normal", **kwargs
    )
    layer.bind(NUM_HEADS)
    return layer


def formula(offset, num_buckets, max_distance, bidirectional):
    """The published bucket; the small term mends logarithms of powers."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    ratio = math.log(distance / exact) / math.log(max_distance / exact)
    large = exact + math.floor(ratio * (num_buckets - exact) + 1e-9)
    return bucket + min(large, num_buckets - 1)


@pytest.mark.parametrize(
    ("bidirectional", "expected"), [(True, BIDIRECTIONAL), (False, CAUSAL)]
)
def test_buckets_are_those_of_t5(bidirectional, expected):
    layer = bias_layer(bidirectional=bidirectional)
    bias = to_numpy(layer(np.array([0]), np.array(OFFSETS)))
    table = to_numpy(layer.embeddings)
    np.testing.assert_array_equal(bias[0, :, 0], table[expected].T)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (12, 50)])
def test_table_matches_the_formula(num_buckets, max_distance, bidirectional):
    table = bucket_table(num_buckets, max_distance, bidirectional)
    expected = [
        formula(offset, num_buckets, max_distance, bidirectional)
        for offset in range(-max_distance, max_distance + 1)
    ]
    np.testing.assert_array_equal(table, expected)


def test_adds_the_number_of_the_bucket_for_each_head():
    layer = bias_layer(num_buckets=12, max_distance=50)
    bias = layer(QUERIES, KEYS)
    table = to_numpy(layer.embeddings)
    expected = np.zeros((2, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH))
    for index in np.ndindex(expected.shape):
        batch, head, query, key = index
        offset = KEYS[batch, key] - QUERIES[query]
        expected[index] = table[formula(offset, 12, 50, True), head]
    np.testing.assert_array_equal(to_numpy(bias), expected)


def test_the_table_learns():
    layer = bias_layer(num_buckets=4, max_distance=8)

    def total(table):
        bias, _ = layer.stateless_call(
            [table], [], np.array([0]), np.array([-9, -1, 0, 2, 3])
        )
        return ops.sum(bias)

    (gradient,) = gradients(total, to_numpy(layer.embeddings).astype("float32"))
    # Buckets of the offsets: 1, 1, 0, 3, 3.
    expected = np.array([1, 2, 0, 2])[:, None] * np.ones(NUM_HEADS)
    np.testing.assert_allclose(gradient, expected)


def test_is_float32_in_half_precision():
    layer = bias_layer(dtype="mixed_float16")
    bias = layer(QUERIES, KEYS[0])
    assert layer.embeddings.dtype == "float32"
    assert keras.backend.standardize_dtype(bias.dtype) == "float32"
    assert tuple(bias.shape) == (1, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH)
    table = to_numpy(layer.embeddings)
    assert np.isin(to_numpy(bias), table).all()


def test_symbolic_lengths_may_be_unknown():
    positions = keras.KerasTensor((None, None), dtype="int32")
    bias = RelativePositionBias(num_heads=NUM_HEADS)(positions, positions)
    assert bias.shape == (None, NUM_HEADS, None, None)


def test_configuration_survives_json():
    layer = bias_layer(num_buckets=12, max_distance=50, bidirectional=False)
    config = json.loads(json.dumps(layer.get_config()))
    again = RelativePositionBias.from_config(config)
    assert again.get_config() == layer.get_config()
    again.build_from_config(layer.get_build_config() or {})
    again.bind(NUM_HEADS)
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(
        to_numpy(again(QUERIES, KEYS)), to_numpy(layer(QUERIES, KEYS))
    )


@keras.saving.register_keras_serializable(package="test_relative")
class Scores(keras.layers.Layer):
    """Stands for an attention layer: binds the scheme when it is built."""

    def __init__(self, position=None, **kwargs):
        super().__init__(**kwargs)
        if isinstance(position, dict):
            position = keras.saving.deserialize_keras_object(position)
        self.position = position

    def build(self, input_shape):
        self.position.bind(NUM_HEADS)

    def call(self, inputs):
        positions = ops.arange(ops.shape(inputs)[1])
        return inputs + ops.mean(self.position(positions, positions)[0], 0)

    def get_config(self):
        position = keras.saving.serialize_keras_object(self.position)
        return {**super().get_config(), "position": position}


def test_a_table_inside_another_layer_survives_a_saved_file(tmp_path):
    inputs = keras.Input((KEY_LENGTH, KEY_LENGTH))
    scheme = RelativePositionBias(initializer="random_normal")
    model = keras.Model(inputs, Scores(scheme)(inputs))
    assert model.weights == scheme.weights
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = np.ones((1, KEY_LENGTH, KEY_LENGTH), "float32")
    np.testing.assert_array_equal(to_numpy(again(x)), to_numpy(model(x)))


def test_one_object_in_two_layers_is_one_table():
    shared = RelativePositionBias()
    inputs = keras.Input((KEY_LENGTH, KEY_LENGTH))
    model = keras.Model(inputs, Scores(shared)(Scores(shared)(inputs)))
    assert model.weights == shared.weights


def test_binding_twice_must_agree():
    layer = bias_layer()
    layer.bind(NUM_HEADS)
    assert len(layer.weights) == 1
    with pytest.raises(ValueError, match=r"`num_heads` must be 4, as this"):
        layer.bind(8)


def test_rejects_a_call_before_binding():
    with pytest.raises(ValueError, match=r"`num_heads` must be known before"):
        RelativePositionBias()(QUERIES, KEYS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_buckets": 7}, "`num_buckets` must be even and at least 4"),
        ({"num_buckets": 2}, "`num_buckets` must be even and at least 4"),
        (
            {"num_buckets": 1, "bidirectional": False},
            "`num_buckets` must be at least 2",
        ),
        ({"max_distance": 8}, "`max_distance` must be above 8"),
        ({"bidirectional": None}, "`bidirectional` must be True or False"),
    ],
)
def test_rejects_buckets_that_cannot_be_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(**arguments)
