import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import RoPEScaling, angles
from keras_transformer.positions.length_dependent import row_turns
from tests.numerics import to_numpy
from tests.positions.compiling import compiled


@pytest.mark.parametrize(
    ("scaling", "dim", "base"),
    [
        (RoPEScaling.dynamic_ntk(8.0, 512), 64, 10_000.0),
        (RoPEScaling.dynamic_ntk(2.0, 4096), 128, 10_000.0),
        (RoPEScaling.dynamic_ntk(0.5, 100), 4, 500_000.0),
        (
            RoPEScaling.longrope([1.1] * 4, [1.7, 3, 9, 40], 99, factor=8),
            8,
            10_000.0,
        ),
    ],
)
def test_angles_at_far_positions_match_float64(scaling, dim, base):
    original = scaling.original_max_length
    edges = [1, original - 1, original, original + 1, original + 2]
    random = np.random.default_rng(0).integers(original, 140_000, 40)
    lengths = np.array([*edges, 100_001, *random, 10**6], "int32")
    assert len(lengths) == 47

    def sine_and_cosine(lengths):
        high, low = row_turns(scaling, base, dim, lengths)
        positions = np.full((len(lengths), 1), 100_000, "int32")
        return angles.sine_and_cosine(
            ops.convert_to_tensor(positions), high, low
        )

    run = compiled(sine_and_cosine)
    sine, cosine = run(ops.convert_to_tensor(lengths))
    exact = 100_000 * np.stack(
        [scaling.frequencies(base, dim, int(length)) for length in lengths]
    )
    np.testing.assert_allclose(to_numpy(sine), np.sin(exact), atol=2e-6)
    np.testing.assert_allclose(to_numpy(cosine), np.cos(exact), atol=2e-6)
