import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import RoPE, RoPEScaling
from tests.layer_contract import check_layer
from tests.numerics import assert_close, gradients, normal, to_numpy
from tests.positions.compiling import compiled
from tests.sizes import BATCH, NUM_HEADS, QUERY_LENGTH, VALUE_DIM

HEAD_DIM = VALUE_DIM
INPUTS = normal(BATCH, QUERY_LENGTH, NUM_HEADS, HEAD_DIM)
POSITIONS = np.array(
    [[0, 1, 2, 3, 4], [9, 8, 7, 0, 0], [99_996, 1, 99_998, 7, 100_000]], "int32"
)
AXES = np.stack([POSITIONS, POSITIONS[::-1] // 3, POSITIONS % 7], axis=-1)
SHORT, LONG = [1.0, 1.5, 2.0, 3.0], [1.0, 2.0, 5.0, 9.0]
SCALINGS = {
    "linear": RoPEScaling.linear(4.0),
    "ntk": RoPEScaling.ntk(4.0),
    "dynamic_ntk": RoPEScaling.dynamic_ntk(4.0, 6),
    "yarn": RoPEScaling.yarn(4.0, 64),
    "llama3": RoPEScaling.llama3(8.0, original_max_length=64),
    "longrope": RoPEScaling.longrope(SHORT, LONG, 6, factor=8.0),
}


def rotated(inputs, positions, frequencies, layout="half", multiplier=1.0):
    """Each pair as a complex number, turned: positions `(batch, T[, n])`."""
    inputs = np.asarray(inputs, "float64")
    half = len(frequencies)
    if layout == "half":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    positions = np.asarray(positions, "float64")
    if positions.ndim == 2:
        positions = positions[..., None]
    turn = multiplier * np.exp(1j * positions * frequencies)[:, :, None]
    pairs = (inputs[..., first] + 1j * inputs[..., second]) * turn
    outputs = inputs.copy()
    outputs[..., first], outputs[..., second] = pairs.real, pairs.imag
    return outputs


def plain_frequencies(dim=HEAD_DIM, base=10000.0):
    return np.array([base ** (-2 * pair / dim) for pair in range(dim // 2)])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "max_wavelength": 500.0,
            "scaling": SCALINGS["yarn"],
            "rotary_dim": 6,
            "layout": "interleaved",
            "sections": (1, 2),
        },
    ],
)
def test_keeps_the_layer_contract(arguments):
    check_layer(
        RoPE,
        arguments,
        {"inputs": INPUTS, "positions": POSITIONS},
        output_shape=INPUTS.shape,
        num_weights=0,
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("run", [lambda function: function, compiled])
def test_turns_each_pair_by_position_times_frequency(layout, run):
    layer = RoPE(layout=layout)
    function = run(lambda x, p: layer(x, positions=p))
    outputs = function(*map(ops.convert_to_tensor, (INPUTS, POSITIONS)))
    expected = rotated(INPUTS, POSITIONS, plain_frequencies(), layout)
    assert_close(outputs, expected)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_features_beyond_the_rotary_dim_pass_unchanged(layout):
    outputs = to_numpy(RoPE(rotary_dim=4, layout=layout)(INPUTS))
    np.testing.assert_array_equal(outputs[..., 4:], INPUTS[..., 4:])
    positions = np.arange(QUERY_LENGTH)[None]
    expected = rotated(INPUTS, positions, plain_frequencies(4), layout)
    assert_close(outputs, expected)


def test_sections_follow_their_axes():
    layer = RoPE(sections=(2, 1, 1))
    outputs = layer(INPUTS, positions=AXES)
    expected = rotated(INPUTS, AXES[..., [0, 0, 1, 2]], plain_frequencies())
    assert_close(outputs, expected)
    # One position for all axes, as text has.
    outputs = layer(INPUTS, positions=POSITIONS)
    expected = rotated(INPUTS, POSITIONS, plain_frequencies())
    assert_close(outputs, expected)


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings_change_the_frequencies(kind):
    scaling = SCALINGS[kind]
    outputs = RoPE(scaling=scaling)(INPUTS, positions=POSITIONS)
    expected = np.empty_like(INPUTS, "float64")
    for row, positions in enumerate(POSITIONS):
        frequencies = scaling.frequencies(
            10000.0, HEAD_DIM, int(positions.max()) + 1
        )
        expected[row] = rotated(
            INPUTS[row : row + 1],
            positions[None],
            frequencies,
            multiplier=scaling.attention_multiplier,
        )[0]
    assert_close(outputs, expected)
    unscaled = rotated(INPUTS, POSITIONS, plain_frequencies())
    assert np.abs(to_numpy(outputs) - unscaled).max() > 0.1


@pytest.mark.parametrize("kind", ["dynamic_ntk", "longrope"])
@pytest.mark.parametrize("run", [lambda function: function, compiled])
def test_running_lengths_choose_the_frequencies_of_each_row(kind, run):
    scaling = SCALINGS[kind]
    layer = RoPE(scaling=scaling)
    assert layer.depends_on_length
    assert not RoPE(scaling=SCALINGS["yarn"]).depends_on_length
    lengths = np.array([6, 7, 100], "int32")
    function = run(lambda x, n: layer(x, positions=POSITIONS[0], lengths=n))
    outputs = function(*map(ops.convert_to_tensor, (INPUTS, lengths)))
    for row, length in enumerate(lengths):
        expected = rotated(
            INPUTS[row : row + 1],
            POSITIONS[:1],
            scaling.frequencies(10000.0, HEAD_DIM, int(length)),
            multiplier=scaling.attention_multiplier,
        )
        assert_close(outputs[row : row + 1], expected)


def test_scores_depend_on_the_distance_alone():
    layer = RoPE()
    near = layer(INPUTS, positions=np.arange(QUERY_LENGTH))
    far = layer(INPUTS, positions=np.arange(QUERY_LENGTH) + 99_000)

    def scores(x):
        return np.einsum("bthd,bshd->bhts", to_numpy(x), to_numpy(x))

    assert_close(scores(far), scores(near))


def test_layouts_differ_by_a_permutation_of_features():
    half = to_numpy(RoPE()(INPUTS, positions=POSITIONS))
    order = np.arange(HEAD_DIM).reshape(2, -1).T.ravel()
    interleaved = RoPE(layout="interleaved")
    outputs = interleaved(INPUTS[..., order], positions=POSITIONS)
    np.testing.assert_allclose(to_numpy(outputs), half[..., order], atol=1e-6)


def test_gradient_is_the_rotation_back():
    layer, target = RoPE(), normal(*INPUTS.shape, seed=1)

    def product(inputs):
        outputs = layer(inputs, positions=POSITIONS)
        return ops.sum(ops.multiply(outputs, target))

    (gradient,) = gradients(product, INPUTS)
    expected = rotated(target, -POSITIONS, plain_frequencies())
    assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_last(dtype):
    inputs = ops.cast(INPUTS, dtype)
    outputs = RoPE()(inputs, positions=POSITIONS)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = rotated(to_numpy(inputs), POSITIONS, plain_frequencies())
    unit = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(
        to_numpy(outputs), expected, rtol=unit * 1.01, atol=1e-5
    )


def test_positions_default_to_slots():
    outputs = to_numpy(RoPE()(INPUTS))
    given = RoPE()(INPUTS, positions=np.arange(QUERY_LENGTH))
    np.testing.assert_array_equal(outputs, to_numpy(given))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_wavelength": 0.5}, "`max_wavelength` must be above 1"),
        ({"layout": "neox"}, "`layout` must be one of.*'interleaved'"),
        ({"scaling": "yarn"}, "`scaling` must be a RoPEScaling.*linear"),
        ({"rotary_dim": 5}, "`rotary_dim` must be even and at most"),
        ({"sections": 4}, "`sections` must be a list of integers"),
        ({"sections": (4, 0)}, "`sections` must be a positive integer"),
        (
            {"sections": (1, 2), "rotary_dim": 4},
            "`sections` must be pairs that add up to rotary_dim / 2, 2",
        ),
    ],
)
def test_rejects_arguments_without_meaning(arguments, message):
    with pytest.raises(ValueError, match=message):
        RoPE(**arguments)


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({"rotary_dim": 10}, {}, "`rotary_dim` must be even and at most.*8"),
        ({"sections": (1, 2)}, {}, "`sections` must be pairs that add up.*4"),
        ({}, {"positions": AXES}, "`positions` must be of shape"),
        (
            {"sections": (2, 2)},
            {"positions": AXES},
            r"`positions` must be of shape .* or \(batch, length, 2\)",
        ),
        (
            {"scaling": SCALINGS["dynamic_ntk"]},
            {"lengths": np.ones((BATCH, 1), "int32")},
            r"`lengths` must be of shape \(batch,\)",
        ),
        (
            {"scaling": SCALINGS["longrope"], "rotary_dim": 4},
            {},
            "`short_factor` must be of length 2",
        ),
    ],
)
def test_rejects_calls_that_do_not_fit(arguments, call, message):
    with pytest.raises(ValueError, match=message):
        RoPE(**arguments)(INPUTS, **call)


def test_rejects_inputs_without_heads():
    with pytest.raises(ValueError, match=r"`inputs` must be of shape.*heads"):
        RoPE()(INPUTS[:, :, 0])
