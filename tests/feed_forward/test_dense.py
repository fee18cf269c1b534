import keras
import numpy as np
import pytest

from keras_transformer.feed_forward import FeedForward
from tests.layer_contract import check_layer
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.sizes import BATCH, INTERMEDIATE_DIM, MODEL_DIM, QUERY_LENGTH

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)


def reference(inputs, up, up_bias, down, down_bias):
    hidden = np.maximum(inputs.astype("float64") @ up + up_bias, 0)
    return hidden @ down + down_bias


def test_keeps_the_layer_contract():
    check_layer(
        FeedForward,
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
        num_weights=4,
    )


def test_matches_the_formula():
    layer = FeedForward(INTERMEDIATE_DIM)
    inputs = normal(*SHAPE)
    layer.build(SHAPE)
    randomize_weights(layer)
    assert_close(layer(inputs), reference(inputs, *layer.get_weights()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_the_formula_in_half_precision(dtype):
    layer = FeedForward(INTERMEDIATE_DIM, dtype=f"mixed_{dtype}")
    inputs = normal(*SHAPE)
    layer.build(SHAPE)
    randomize_weights(layer)
    outputs = layer(inputs)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = reference(inputs, *layer.get_weights())
    assert_close(keras.ops.cast(outputs, "float32"), expected, dtype)


def test_names_its_weights_by_part():
    layer = FeedForward(INTERMEDIATE_DIM, name="mlp")
    layer.build(SHAPE)
    assert [weight.path for weight in layer.weights] == [
        "mlp/up/kernel",
        "mlp/up/bias",
        "mlp/down/kernel",
        "mlp/down/bias",
    ]


def test_without_bias_has_two_kernels():
    layer = FeedForward(INTERMEDIATE_DIM, use_bias=False)
    inputs = normal(*SHAPE)
    layer.build(SHAPE)
    randomize_weights(layer)
    up, down = layer.get_weights()
    assert_close(layer(inputs), reference(inputs, up, 0, down, 0))


def test_initializers_reach_their_weights():
    layer = FeedForward(
        INTERMEDIATE_DIM, kernel_initializer="ones", bias_initializer="ones"
    )
    layer.build(SHAPE)
    assert all((weight == 1).all() for weight in layer.get_weights())


def test_treats_each_position_alone():
    layer = FeedForward(INTERMEDIATE_DIM)
    inputs = normal(*SHAPE)
    assert_close(layer(inputs[:, ::-1]), to_numpy(layer(inputs))[:, ::-1])


def test_dropout_acts_in_training_only_and_repeats_with_its_seed():
    inputs = normal(*SHAPE)

    def training_outputs(seed):
        keras.utils.set_random_seed(0)
        layer = FeedForward(
            INTERMEDIATE_DIM,
            dropout=0.5,
            seed=seed,
            kernel_initializer="ones",
        )
        return to_numpy(layer(inputs, training=True)), to_numpy(layer(inputs))

    first, inference = training_outputs(seed=1)
    again, _ = training_outputs(seed=1)
    other, _ = training_outputs(seed=2)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    kernels = np.ones((MODEL_DIM, INTERMEDIATE_DIM))
    assert_close(inference, reference(inputs, kernels, 0, kernels.T, 0))
    # The hidden units are equal here, so a row is a whole number of them:
    # each kept one counts double.
    rows = inference[..., 0] > 1e-3
    kept = first[..., 0][rows] / inference[..., 0][rows] * INTERMEDIATE_DIM / 2
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)


def test_passes_the_implicit_mask_on():
    token_ids = np.array([[3, 1, 0], [2, 0, 0]], "int32")
    embedded = keras.layers.Embedding(5, MODEL_DIM, mask_zero=True)(token_ids)
    outputs = FeedForward(INTERMEDIATE_DIM)(embedded)
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), token_ids != 0)


def test_takes_any_callable_as_activation():
    inputs = normal(*SHAPE)
    layer = FeedForward(
        INTERMEDIATE_DIM, activation=lambda x: keras.ops.maximum(x, 0)
    )
    layer.build(SHAPE)
    randomize_weights(layer)
    assert_close(layer(inputs), reference(inputs, *layer.get_weights()))


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
        FeedForward(**{"intermediate_dim": INTERMEDIATE_DIM, **arguments})


def test_rejects_an_unknown_width():
    with pytest.raises(
        ValueError, match=r"last axis is known.*Give `keras.Inp"
    ):
        FeedForward(INTERMEDIATE_DIM)(keras.Input((QUERY_LENGTH, None)))
