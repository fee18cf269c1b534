import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import angles
from tests.numerics import to_numpy
from tests.positions.compiling import compiled

POSITIONS = np.array(
    [0, 1, 2, 65535, 65536, 99_999, 100_000, 131_071, 1_000_000, -1, -70_000],
    "int32",
)


def far_errors(frequencies, run):
    words = angles.turns(frequencies)
    sine, cosine = run(lambda p: angles.sine_and_cosine(p[:, None], *words))(
        ops.convert_to_tensor(POSITIONS)
    )
    exact = POSITIONS[:, None].astype("float64") * frequencies
    errors = (to_numpy(sine) - np.sin(exact), to_numpy(cosine) - np.cos(exact))
    return np.abs(errors)


@pytest.mark.parametrize("run", [lambda function: function, compiled])
def test_far_positions_match_float64(run):
    frequencies = angles.wavelength_frequencies(10000.0, 64)
    assert far_errors(frequencies, run).max() < 1e-6


def test_frequencies_above_a_turn_a_step_wrap():
    frequencies = np.array([7.3, 2 * np.pi, 12.9999, 1e-7])
    assert far_errors(frequencies, compiled).max() < 1e-6


def test_hundred_million_steps_stay_within_the_tolerance():
    frequencies = angles.wavelength_frequencies(500_000.0, 32)
    position = np.int32(100_000_000)
    sine, _ = angles.sine_and_cosine(
        ops.convert_to_tensor(position), *angles.turns(frequencies)
    )
    # Float64 itself is off by 1e-8 here.
    exact = np.sin(float(position) * frequencies)
    assert np.abs(to_numpy(sine) - exact).max() < 1e-5


def test_rejects_a_wavelength_base_of_one():
    with pytest.raises(ValueError, match=r"`max_wavelength` must be above 1"):
        angles.check_wavelength(1.0)
