import math

import keras
import numpy as np
import pytest

from keras_transformer.feed_forward import GatedFeedForward
from tests.layer_contract import check_layer
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.sizes import BATCH, INTERMEDIATE_DIM, MODEL_DIM, QUERY_LENGTH

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def relu(x):
    return np.maximum(x, 0)


def reference(inputs, weights, activation):
    gate, gate_bias, up, up_bias, down, down_bias = weights
    inputs = inputs.astype("float64")
    hidden = activation(inputs @ gate + gate_bias) * (inputs @ up + up_bias)
    return hidden @ down + down_bias


def test_keeps_the_layer_contract():
    check_layer(
        GatedFeedForward,
        {
            "intermediate_dim": INTERMEDIATE_DIM,
            "activation": "gelu",
            "dropout": 0.1,
            "kernel_initializer": "he_normal",
            "bias_initializer": "ones",
            "seed": 3,
        },
        {"inputs": normal(*SHAPE)},
        output_shape=SHAPE,
        num_weights=6,
    )


@pytest.mark.parametrize(
    ("name", "formula"), [("silu", silu), ("gelu", gelu), ("relu", relu)]
)
def test_swiglu_geglu_and_reglu_match_their_formulas(name, formula):
    layer = GatedFeedForward(INTERMEDIATE_DIM, activation=name)
    inputs = normal(*SHAPE)
    layer.build(SHAPE)
    randomize_weights(layer)
    expected = reference(inputs, layer.get_weights(), formula)
    assert_close(layer(inputs), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_the_formula_in_half_precision(dtype):
    layer = GatedFeedForward(INTERMEDIATE_DIM, dtype=f"mixed_{dtype}")
    inputs = normal(*SHAPE)
    layer.build(SHAPE)
    randomize_weights(layer)
    outputs = layer(inputs)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = reference(inputs, layer.get_weights(), silu)
    assert_close(keras.ops.cast(outputs, "float32"), expected, dtype)


def test_default_is_swiglu():
    assert GatedFeedForward(1).get_config()["activation"] == "silu"


def test_names_its_weights_by_part():
    layer = GatedFeedForward(INTERMEDIATE_DIM, use_bias=False, name="mlp")
    layer.build(SHAPE)
    assert [weight.path for weight in layer.weights] == [
        "mlp/gate/kernel",
        "mlp/up/kernel",
        "mlp/down/kernel",
    ]


def test_initializers_reach_their_weights():
    layer = GatedFeedForward(
        INTERMEDIATE_DIM, kernel_initializer="ones", bias_initializer="ones"
    )
    layer.build(SHAPE)
    assert all((weight == 1).all() for weight in layer.get_weights())


def test_treats_each_position_alone():
    layer = GatedFeedForward(INTERMEDIATE_DIM)
    inputs = normal(*SHAPE)
    assert_close(layer(inputs[:, ::-1]), to_numpy(layer(inputs))[:, ::-1])


def test_dropout_acts_in_training_only_and_repeats_with_its_seed():
    inputs = normal(*SHAPE)

    def outputs(seed, **options):
        keras.utils.set_random_seed(0)
        layer = GatedFeedForward(INTERMEDIATE_DIM, seed=seed, **options)
        return to_numpy(layer(inputs, training=True)), to_numpy(layer(inputs))

    dropped, inference = outputs(1, dropout=0.5)
    again, _ = outputs(1, dropout=0.5)
    other, _ = outputs(2, dropout=0.5)
    undropped, _ = outputs(1)
    np.testing.assert_array_equal(dropped, again)
    np.testing.assert_array_equal(inference, undropped)
    assert not np.allclose(dropped, other)
    assert not np.allclose(dropped, inference)


def test_passes_the_implicit_mask_on():
    token_ids = np.array([[3, 1, 0], [2, 0, 0]], "int32")
    embedded = keras.layers.Embedding(5, MODEL_DIM, mask_zero=True)(token_ids)
    outputs = GatedFeedForward(INTERMEDIATE_DIM)(embedded)
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), token_ids != 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"intermediate_dim": 0}, r"`intermediate_dim` must be a positive.*=0"),
        ({"dropout": 1.0}, r"`dropout` must be a rate in \[0, 1\).*=1.0"),
        ({"use_bias": "no"}, r"`use_bias` must be True or False.*='no'"),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        GatedFeedForward(**{"intermediate_dim": INTERMEDIATE_DIM, **arguments})


def test_rejects_an_unknown_width():
    with pytest.raises(
        ValueError, match=r"last axis is known.*Give `keras.Inp"
    ):
        GatedFeedForward(INTERMEDIATE_DIM)(keras.Input((QUERY_LENGTH, None)))
