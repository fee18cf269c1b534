import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import Sinusoidal, sinusoidal_encoding
from tests.layer_contract import check_layer
from tests.numerics import normal, to_numpy
from tests.positions.compiling import compiled
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH

INPUTS = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
POSITIONS = np.array(
    [
        [0, 1, 2, 3, 4],
        [7, 8, 0, 1, 2],
        [99_996, 99_997, 99_998, 99_999, 100_000],
    ]
)


def formula(positions, dim, max_wavelength=10000.0):
    encoding = np.zeros((*np.shape(positions), dim))
    for feature in range(dim):
        rate = max_wavelength ** (-(feature - feature % 2) / dim)
        wave = np.cos if feature % 2 else np.sin
        encoding[..., feature] = wave(np.float64(positions) * rate)
    return encoding


def test_keeps_the_layer_contract():
    check_layer(
        Sinusoidal,
        {"max_wavelength": 500.0},
        {"inputs": INPUTS, "positions": POSITIONS.astype("int32")},
        output_shape=INPUTS.shape,
        num_weights=0,
    )


def test_matches_the_published_values():
    expected = [
        [0, 1, 0, 1],
        [0.841471, 0.540302, 0.01, 0.99995],
        [0.909297, -0.416147, 0.019999, 0.9998],
        [0.141120, -0.989992, 0.029996, 0.99955],
    ]
    encoding = to_numpy(sinusoidal_encoding(range(4), 4))
    np.testing.assert_allclose(encoding, expected, atol=1e-6)


def test_matches_the_formula_at_far_positions():
    layer = Sinusoidal()
    encoding = to_numpy(layer(INPUTS, positions=POSITIONS))
    expected = formula(POSITIONS, MODEL_DIM)
    np.testing.assert_allclose(encoding, expected, atol=1e-6)
    traced = compiled(lambda p: sinusoidal_encoding(p, MODEL_DIM, 300.0))
    encoding = to_numpy(traced(ops.convert_to_tensor(POSITIONS, "int32")))
    expected = formula(POSITIONS, MODEL_DIM, 300.0)
    np.testing.assert_allclose(encoding, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_rounds_last(dtype):
    layer = Sinusoidal(dtype=dtype)
    encoding = layer(INPUTS, positions=POSITIONS)
    expected = ops.cast(formula(POSITIONS, MODEL_DIM), layer.compute_dtype)
    # One unit of the last place at most, where float32 met a tie.
    np.testing.assert_allclose(
        to_numpy(encoding), to_numpy(expected), rtol=2**-7, atol=1e-6
    )


def test_positions_default_to_slots():
    encoding = Sinusoidal()(INPUTS)
    assert tuple(encoding.shape) == (QUERY_LENGTH, MODEL_DIM)
    given = Sinusoidal()(INPUTS, positions=np.arange(QUERY_LENGTH))
    np.testing.assert_array_equal(to_numpy(encoding), to_numpy(given))


def test_default_policy_leaves_half_precision_inputs():
    encoding = Sinusoidal()(ops.cast(INPUTS, "bfloat16"))
    assert keras.backend.standardize_dtype(encoding.dtype) == "bfloat16"


def test_the_encoding_carries_no_mask():
    inputs = keras.layers.Masking()(INPUTS)
    encoding = Sinusoidal()(inputs)
    assert getattr(encoding, "_keras_mask", None) is None
    assert inputs._keras_mask is not None


def test_rejects_an_odd_width():
    with pytest.raises(ValueError, match=r"`dim` must be even.*dim=5"):
        sinusoidal_encoding([0], 5)


def test_rejects_positions_that_are_no_integers():
    with pytest.raises(ValueError, match=r"`positions` must be integers"):
        Sinusoidal()(INPUTS, positions=np.ones(QUERY_LENGTH, "float32"))


def test_rejects_positions_of_another_rank():
    with pytest.raises(ValueError, match=r"`positions` must be of shape \(len"):
        Sinusoidal()(INPUTS, positions=np.ones((1, 1, 5), "int32"))


def test_rejects_inputs_of_another_rank():
    with pytest.raises(ValueError, match=r"`inputs` must be of shape \(batch"):
        Sinusoidal()(INPUTS[0])
