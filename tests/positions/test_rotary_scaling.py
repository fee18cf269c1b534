import json
import math

import keras
import numpy as np
import pytest

from keras_transformer.positions import RoPEScaling

SHORT = [1.0, 1.05, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0]
LONG = [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 24.0, 32.0]
SCALINGS = {
    "linear": RoPEScaling.linear(4.0),
    "ntk": RoPEScaling.ntk(4),
    "dynamic_ntk": RoPEScaling.dynamic_ntk(4.0, 64),
    "yarn": RoPEScaling.yarn(4.0, 4096),
    "llama3": RoPEScaling.llama3(8.0),
    "longrope": RoPEScaling.longrope(SHORT, LONG, 64, factor=32.0),
}
BASE, DIM = 10000.0, 16
PLAIN = np.array([BASE ** (-2 * pair / DIM) for pair in range(DIM // 2)])


def test_linear_divides_each_frequency():
    actual = RoPEScaling.linear(4.0).frequencies(BASE, DIM)
    np.testing.assert_allclose(actual, PLAIN / 4, rtol=1e-13)


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    actual = RoPEScaling.ntk(4.0).frequencies(BASE, DIM)
    base = BASE * 4.0 ** (DIM / (DIM - 2))
    expected = [base ** (-2 * pair / DIM) for pair in range(DIM // 2)]
    np.testing.assert_allclose(actual, expected, rtol=1e-13)
    np.testing.assert_allclose(PLAIN / actual, 4 ** (np.arange(8) / 7))


@pytest.mark.parametrize("length", [None, 7, 64, 65, 200])
def test_dynamic_ntk_follows_the_length(length):
    actual = SCALINGS["dynamic_ntk"].frequencies(BASE, DIM, length)
    seen = max(length or 64, 64)
    base = BASE * (4.0 * seen / 64 - 3.0) ** (DIM / (DIM - 2))
    expected = [base ** (-2 * pair / DIM) for pair in range(DIM // 2)]
    np.testing.assert_allclose(actual, expected, rtol=1e-13)


def yarn_formula(factor, original, fast, slow, truncate, dim, base=BASE):
    def correction(rotations):
        ratio = original / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(base))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        plain = base ** (-2 * pair / dim)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain / factor * ramp + plain * (1 - ramp))
    return frequencies


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (8, 2)])
def test_yarn_blends_between_the_two_borders(fast, slow, truncate):
    scaling = RoPEScaling.yarn(
        4.0, 4096, beta_fast=fast, beta_slow=slow, truncate=truncate
    )
    expected = yarn_formula(4.0, 4096, fast, slow, truncate, 64)
    actual = scaling.frequencies(BASE, 64)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert actual[0] == 1.0
    np.testing.assert_allclose(actual[-1], BASE ** (-62 / 64) / 4)


def test_yarn_with_one_border_steps_there():
    # Both borders lie below the first pair: it alone stays.
    frequencies = RoPEScaling.yarn(4.0, 6).frequencies(BASE, DIM)
    np.testing.assert_allclose(frequencies[0], 1.0)
    np.testing.assert_allclose(frequencies[1:], PLAIN[1:] / 4)


def test_yarn_attention_follows_the_paper_or_the_settings():
    assert math.isclose(
        RoPEScaling.yarn(4.0, 4096).attention_multiplier,
        0.1 * math.log(4) + 1,
    )
    assert RoPEScaling.yarn(0.5, 4096).attention_multiplier == 1.0
    given = RoPEScaling.yarn(4.0, 4096, attention_factor=1.5)
    assert given.attention_multiplier == 1.5
    # As in DeepSeek-V2: mscale 0.707 for both gives exactly 1.
    same = RoPEScaling.yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert same.attention_multiplier == 1.0
    ratio = RoPEScaling.yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.5)
    expected = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert math.isclose(ratio.attention_multiplier, expected)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 2.0, 9.0, 512)],
)
def test_llama3_keeps_short_wavelengths_and_slows_long_ones(
    factor, low, high, original
):
    scaling = RoPEScaling.llama3(
        factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_max_length=original,
    )
    expected = []
    for pair in range(64):
        frequency = 500_000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency = frequency / factor
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    actual = scaling.frequencies(500_000.0, 128)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("length", "factors"), [(None, SHORT), (64, SHORT), (65, LONG), (900, LONG)]
)
def test_longrope_divides_by_the_factors_of_the_length(length, factors):
    actual = SCALINGS["longrope"].frequencies(BASE, DIM, length)
    np.testing.assert_allclose(actual, PLAIN / factors, rtol=1e-13)


def test_longrope_attention_follows_the_ratio_of_lengths():
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    by_factor = RoPEScaling.longrope(SHORT, LONG, 4096, factor=32.0)
    by_length = RoPEScaling.longrope(SHORT, LONG, 4096, max_length=131_072)
    assert math.isclose(by_factor.attention_multiplier, expected)
    assert math.isclose(by_length.attention_multiplier, expected)
    shorter = RoPEScaling.longrope(SHORT, LONG, 4096, max_length=4096)
    assert shorter.attention_multiplier == 1.0
    given = RoPEScaling.longrope(SHORT, LONG, 4096, attention_factor=1.19)
    assert given.attention_multiplier == 1.19


@pytest.mark.parametrize("kind", SCALINGS)
def test_is_equal_by_value_and_survives_json(kind):
    scaling = SCALINGS[kind]
    config = keras.saving.serialize_keras_object(scaling)
    again = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(config))
    )
    assert again == scaling
    assert hash(again) == hash(scaling)
    assert eval(repr(scaling)) == scaling
    assert scaling != RoPEScaling.linear(1.5)


def test_only_two_kinds_depend_on_the_length():
    dependent = {kind for kind in SCALINGS if SCALINGS[kind].depends_on_length}
    assert dependent == {"dynamic_ntk", "longrope"}


def test_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"cannot be changed"):
        RoPEScaling.linear(2.0).factor = 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoPEScaling("llama4"), "`kind` must be one of.*'yarn'"),
        (
            lambda: RoPEScaling("linear", factor=2.0, beta_fast=32),
            "`beta_fast` must be a setting of 'linear'",
        ),
        (lambda: RoPEScaling("yarn", factor=2.0), "`original_max_length` must"),
        (
            lambda: RoPEScaling.linear(-1.0),
            "`factor` must be a finite number above 0",
        ),
        (
            lambda: RoPEScaling.dynamic_ntk(2.0, 64.5),
            "`original_max_length` must be a positive integer",
        ),
        (
            lambda: RoPEScaling.yarn(2.0, 64, truncate=1),
            "`truncate` must be True or False",
        ),
        (
            lambda: RoPEScaling.yarn(2.0, 64, mscale=1.0),
            "`mscale` must be given together with `mscale_all_dim`",
        ),
        (
            lambda: RoPEScaling.yarn(
                2.0, 64, mscale=1.0, mscale_all_dim=0.5, attention_factor=1.0
            ),
            "`attention_factor` must be None where `mscale` is given",
        ),
        (
            lambda: RoPEScaling.yarn(2.0, 64, beta_fast=1),
            "`beta_fast` must be above `beta_slow`",
        ),
        (
            lambda: RoPEScaling.llama3(2.0, high_frequency_factor=1),
            "`high_frequency_factor` must be above",
        ),
        (
            lambda: RoPEScaling.longrope(SHORT, LONG, 64),
            "`factor` must be given, or else .*exactly one",
        ),
        (
            lambda: RoPEScaling.longrope(
                SHORT, LONG, 64, factor=2.0, attention_factor=1.0
            ),
            "`factor` must be given, or else .*exactly one",
        ),
        (
            lambda: RoPEScaling.longrope(SHORT, LONG[1:], 64, factor=2.0),
            "`long_factor` must be as long as",
        ),
        (
            lambda: RoPEScaling.longrope(2.0, LONG, 64, factor=2.0),
            "`short_factor` must be a list of numbers",
        ),
        (
            lambda: SCALINGS["longrope"].frequencies(BASE, 8),
            "`short_factor` must be of length 4",
        ),
        (
            lambda: RoPEScaling.ntk(2.0).frequencies(BASE, 2),
            "`rotary_dim` must be above 2 with NTK",
        ),
    ],
)
def test_rejects_what_has_no_meaning(make, message):
    with pytest.raises(ValueError, match=message):
        make()
