import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.blocks.residual import PLACEMENTS, ResidualBranch
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.reference import blocks as reference
from tests.sizes import MODEL_DIM, QUERY_LENGTH

BATCH = 32
SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)


def leave(layer, inputs, outputs, training=False):
    """The stream after the sub-layer, from arrays."""
    inputs, outputs = map(ops.convert_to_tensor, (inputs, outputs))
    return layer.leave(inputs, outputs, training)


def branch(**options):
    layer = ResidualBranch(
        **{
            "placement": "pre",
            "normalization": "layer_norm",
            "epsilon": 1e-5,
            "dropout": 0.0,
            "layer_scale": None,
            "stochastic_depth": 0.0,
            "seed": 1,
            "name": "branch",
            **options,
        }
    )
    layer.build(SHAPE)
    return layer


@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_follows_the_formula_of_each_placement(placement, normalization):
    layer = branch(placement=placement, normalization=normalization)
    randomize_weights(layer)
    inputs = normal(*SHAPE)

    def function(x):
        return 2 * x + 1

    entered = layer.enter(ops.convert_to_tensor(inputs))
    outputs = leave(layer, inputs, function(entered), training=False)
    weights = {
        f"branch/{path}": value
        for path, value in reference.weights_of(layer).items()
    }
    if placement == "parallel":
        expected = inputs + function(inputs.astype("float64"))
    else:
        expected = reference.block(
            weights,
            placement,
            inputs.astype("float64"),
            [("branch", function)],
        )
    assert_close(outputs, expected)


def test_stochastic_depth_skips_whole_rows_and_keeps_the_mean():
    layer = branch(stochastic_depth=0.25)
    inputs, outputs = normal(*SHAPE), normal(*SHAPE, seed=1)
    left = to_numpy(leave(layer, inputs, outputs, training=True))
    is_skipped = np.array(
        [np.array_equal(a, b) for a, b in zip(left, inputs, strict=True)]
    )
    assert 0 < is_skipped.sum() < BATCH / 2
    kept = ~is_skipped
    # What is kept makes up for what is skipped.
    np.testing.assert_allclose(
        left[kept], inputs[kept] + outputs[kept] / 0.75, rtol=1e-5, atol=1e-5
    )


def test_dropping_is_for_training_only():
    layer = branch(stochastic_depth=0.5, dropout=0.5)
    inputs, outputs = normal(*SHAPE), normal(*SHAPE, seed=1)
    for training in (False, None):
        left = leave(layer, inputs, outputs, training=training)
        assert_close(left, inputs.astype("float64") + outputs)


def test_dropout_and_stochastic_depth_draw_apart():
    # With one stream of noise a row's fate would follow from its first unit.
    layer = branch(stochastic_depth=0.5, dropout=0.5)
    ones = np.ones(SHAPE, "float32")
    rows = to_numpy(layer._skip(ones, training=True))[:, 0, 0] > 0
    units = to_numpy(layer._dropout(ones, training=True)).reshape(-1) > 0
    assert (rows != units[:BATCH]).any()


def test_layer_scale_starts_at_its_value_and_scales_the_sublayer_alone():
    layer = branch(layer_scale=0.1)
    inputs, outputs = normal(*SHAPE), normal(*SHAPE, seed=1)
    left = leave(layer, inputs, outputs, training=False)
    assert_close(left, inputs + 0.1 * outputs.astype("float64"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_dtype(dtype):
    layer = branch(
        placement="sandwich", layer_scale=0.5, dtype=f"mixed_{dtype}"
    )
    inputs = ops.cast(normal(*SHAPE), dtype)
    left = leave(layer, inputs, layer.enter(inputs), training=False)
    assert keras.backend.standardize_dtype(left.dtype) == dtype
    assert np.isfinite(to_numpy(ops.cast(left, "float32"))).all()


def test_a_given_norm_is_copied_for_each_place():
    given = keras.layers.LayerNormalization(epsilon=0.1)
    layer = branch(placement="sandwich", normalization=given)
    assert not given.built
    assert len(layer.trainable_weights) == 4
    assert layer._norm.epsilon == layer._output_norm.epsilon == 0.1


def test_rejects_an_unknown_norm():
    with pytest.raises(
        ValueError, match=r'"layer_norm", "rms_norm" or a layer.*batch'
    ):
        branch(normalization="batch")
