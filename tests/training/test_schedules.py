import keras
import numpy as np
import pytest

from keras_transformer.training import InverseSquareRootDecay
from tests.numerics import to_numpy


@pytest.mark.parametrize(
    "options", [{}, {"warmup_steps": 10}, {"scale": 2.0, "warmup_steps": 7}]
)
def test_matches_the_formula_of_the_paper(options):
    schedule = InverseSquareRootDecay(512, **options)
    warmup_steps = options.get("warmup_steps", 4000)
    for step in (0, 1, warmup_steps - 1, warmup_steps, 100_000):
        n = step + 1  # the paper counts from 1
        expected = 512**-0.5 * min(n**-0.5, n * warmup_steps**-1.5)
        rate = to_numpy(schedule(step))
        expected *= options.get("scale", 1)
        np.testing.assert_allclose(rate, expected, rtol=1e-5)


def test_survives_its_configuration():
    schedule = InverseSquareRootDecay(64, 10, scale=0.5, name="warm")
    config = keras.optimizers.schedules.serialize(schedule)
    assert config["registered_name"] == (
        "keras_transformer>InverseSquareRootDecay"
    )
    again = keras.optimizers.schedules.deserialize(config)
    assert isinstance(again, InverseSquareRootDecay)
    assert again.get_config() == schedule.get_config()


def test_drives_an_optimizer_from_the_first_update():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(InverseSquareRootDecay(4, 5)), "mse")
    before = model.get_weights()[0]
    ones = np.ones((2, 1), "float32")
    model.fit(ones, 10 * ones, epochs=1, verbose=0)
    change = (model.get_weights()[0] - before).item()
    rate = 4**-0.5 * 5**-1.5
    np.testing.assert_allclose(
        change, rate * 2 * (10 - before.item()), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_dim": 0}, "`model_dim` must be a positive integer.*=0"),
        ({"warmup_steps": 0}, "`warmup_steps` must be a positive integer.*=0"),
        ({"scale": 0}, "`scale` must be a finite number above 0.*=0"),
    ],
)
def test_rejects_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        InverseSquareRootDecay(**{"model_dim": 4, **options})
