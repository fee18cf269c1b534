import dataclasses
import json
import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.decoding.decoders import Greedy, Sample
from keras_transformer.decoding.noise import gumbel
from tests.decoding.compiling import compiled, operations
from tests.numerics import normal, to_numpy
from tests.sizes import BATCH, VOCABULARY_SIZE

# Rows that draw from one distribution, for the sets and the frequencies.
DRAWS = 1536
SEED = 5
ROWS = np.arange(DRAWS, dtype="int32") % 7
POSITIONS = np.arange(DRAWS, dtype="int32") // 7

SAMPLERS = [
    Sample(),
    Sample(0.5),
    Sample(3.0),
    Sample(top_k=1),
    Sample(top_k=5),
    Sample(top_k=VOCABULARY_SIZE - 1),
    Sample(top_p=0.3),
    Sample(top_p=0.9),
    Sample(top_p=1.0),
    Sample(min_p=0.0),
    Sample(min_p=0.2),
    Sample(min_p=1.0),
    Sample(2.0, top_k=9, top_p=0.8),
    Sample(2.0, top_k=20, top_p=0.9, min_p=0.2),
    Sample(1.5, top_p=0.7, min_p=0.3),
]


def log_softmax(logits):
    logits = np.asarray(logits, "float64")
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def reference_kept(logits, sampler):
    """Ids that the filters keep for one row, by the words of the papers."""
    with np.errstate(divide="ignore"):
        probabilities = np.exp(log_softmax(logits / sampler.temperature))
    ids = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if sampler.top_k is not None:
        ids = ids[: sampler.top_k]
    if sampler.top_p is not None:
        total, mass, nucleus = sum(probabilities[ids]), 0.0, []
        for i in ids:
            nucleus.append(i)
            mass += probabilities[i] / total
            if mass >= sampler.top_p:
                break
        ids = nucleus
    if sampler.min_p is not None:
        floor = sampler.min_p * max(probabilities[ids])
        ids = [i for i in ids if probabilities[i] >= floor]
    return ids


def reference_tokens(logits, sampler, rows, positions):
    """The kept token with the largest score plus noise, row by row."""
    noise = to_numpy(gumbel(SEED, rows, positions, logits.shape[1]))
    tokens = []
    for row, row_noise in zip(logits.astype("float64"), noise, strict=True):
        kept = reference_kept(row, sampler)
        scores = row[kept] / sampler.temperature + row_noise[kept]
        tokens.append(kept[np.argmax(scores)])
    return np.array(tokens)


def choose(decoder, logits, rows=None, positions=None):
    rows = ROWS[: len(logits)] if rows is None else rows
    positions = POSITIONS[: len(logits)] if positions is None else positions
    tokens, log_probs = decoder.choose(
        logits, seed=SEED, row_ids=rows, positions=positions
    )
    assert tokens.shape == log_probs.shape == (len(logits),)
    assert keras.backend.standardize_dtype(tokens.dtype) == "int32"
    assert keras.backend.standardize_dtype(log_probs.dtype) == "float32"
    return to_numpy(tokens), to_numpy(log_probs)


def draws(decoder, logits):
    """Many tokens drawn from the distribution of one row of logits."""
    logits = np.asarray(logits, "float32")
    return choose(decoder, np.tile(logits, (DRAWS, 1)))[0]


@pytest.fixture(scope="module")
def logits():
    return normal(DRAWS, VOCABULARY_SIZE) * np.float32(2)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_draws_the_kept_token_with_the_largest_noisy_score(sampler, logits):
    tokens, _ = choose(sampler, logits)
    few = slice(0, 200)
    expected = reference_tokens(logits[few], sampler, ROWS[few], POSITIONS[few])
    np.testing.assert_array_equal(tokens[few], expected)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_draws_each_kept_token_and_no_other(sampler):
    # Nearly flat, so that the draws meet every token.
    row = normal(VOCABULARY_SIZE, seed=1) * np.float32(0.5)
    kept = reference_kept(row, sampler)
    assert set(draws(sampler, row)) == set(kept)


@pytest.mark.parametrize(
    "sampler",
    [Sample(), Sample(0.7), Sample(1.5, top_k=12, top_p=0.9, min_p=0.05)],
    ids=repr,
)
def test_frequencies_are_the_probabilities(sampler):
    row = normal(VOCABULARY_SIZE, seed=2) * np.float32(0.5)
    kept = reference_kept(row, sampler)
    scores = row[kept] / sampler.temperature
    expected = np.exp(log_softmax(scores)) * DRAWS
    counts = np.bincount(draws(sampler, row), minlength=VOCABULARY_SIZE)[kept]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("sampler", "kept"),
    [
        (Sample(top_k=1), {1}),
        (Sample(top_k=3), {1, 3, 6}),
        (Sample(top_k=5), {0, 1, 3, 6, 7}),
        # Three quarters of the mass lie on four equal logits.
        (Sample(top_p=0.75 / 4), {1}),
        (Sample(top_p=0.75 / 2), {1, 3}),
        (Sample(top_p=0.75), {1, 3, 6, 7}),
        (Sample(top_p=0.8), {0, 1, 3, 6, 7}),
        (Sample(top_k=4, top_p=0.5), {1, 3}),
        (Sample(top_k=4, top_p=0.51), {1, 3, 6}),
        (Sample(min_p=1.0), {1, 3, 6, 7}),
    ],
    ids=repr,
)
def test_of_equal_tokens_the_lower_ids_are_kept(sampler, kept):
    row = [0, 2, -np.inf, 2, 0, 0, 2, 2, 0] + [-np.inf] * 20
    row = np.array(row) * np.log(3) / 2
    assert set(draws(sampler, row)) == kept


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize(
    "decoder", [Greedy(), Sample(top_k=1), Sample(top_p=0.1)], ids=repr
)
def test_zeros_of_both_signs_are_equal(decoder, zero):
    row = [-3.0] * 5 + [zero, -zero, zero] + [-3.0] * 21
    assert set(draws(decoder, row)) == {5}


def test_the_nucleus_is_exact_in_a_large_vocabulary():
    rows, size = 24, 2003
    wide = normal(rows, size, seed=3) * np.float32(3)
    # Halves, so that many tokens are equally likely.
    tied = np.round(wide * 2) / 2
    for logits in (wide, tied):
        for sampler in (Sample(1.3, top_p=0.8), Sample(top_p=0.999)):
            tokens, _ = choose(sampler, logits)
            expected = reference_tokens(
                logits, sampler, ROWS[:rows], POSITIONS[:rows]
            )
            np.testing.assert_array_equal(tokens, expected)


def test_top_p_after_a_top_k_that_drops_nothing_much_is_top_p(logits):
    # The last token has no chance, so both take the same, on two paths.
    logits = np.concatenate([logits[:, :-1], logits[:, :1] * 0 - 60], axis=1)
    alone, _ = choose(Sample(top_p=0.6), logits)
    after, _ = choose(Sample(top_k=VOCABULARY_SIZE - 1, top_p=0.6), logits)
    np.testing.assert_array_equal(alone, after)


@pytest.mark.parametrize("size", [VOCABULARY_SIZE, 1000 * VOCABULARY_SIZE])
def test_a_top_k_beyond_the_vocabulary_keeps_all(size, logits):
    tokens, _ = choose(Sample(top_k=size), logits)
    np.testing.assert_array_equal(tokens, choose(Sample(), logits)[0])


@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS], ids=repr)
def test_never_chooses_a_token_at_minus_infinity(decoder):
    row = np.full(VOCABULARY_SIZE, -np.inf)
    # Fewer tokens than some top-k ask for.
    row[[3, 11, 17]] = [-50.0, -50.5, -51.0]
    logits = np.tile(row.astype("float32"), (DRAWS, 1))
    tokens, log_probs = choose(decoder, logits)
    assert set(tokens) <= {3, 11, 17}
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS[-3:]], ids=repr)
def test_log_probs_are_those_of_the_model(decoder, logits):
    # A shift changes no probability.
    tokens, log_probs = choose(decoder, logits + np.float32(30))
    expected = log_softmax(logits)[np.arange(DRAWS), tokens]
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-5)


def test_greedy_chooses_the_largest_and_the_first_of_equals(logits):
    rounded = np.round(logits)
    for values in (logits, rounded):
        tokens, _ = choose(Greedy(), values)
        np.testing.assert_array_equal(tokens, values.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_tiny_temperature_is_greedy(temperature, scale, logits):
    values = logits * np.float32(scale)
    apart = np.sort(logits, -1)
    clear = apart[:, -1] - apart[:, -2] > 0.03
    tokens, _ = choose(Sample(temperature, top_p=0.99), values)
    expected, _ = choose(Greedy(), values)
    np.testing.assert_array_equal(tokens[clear], expected[clear])


def test_a_huge_temperature_evens_out(logits):
    tokens, _ = choose(Sample(1e30), logits)
    even, _ = choose(Sample(), np.zeros_like(logits))
    np.testing.assert_array_equal(tokens, even)


@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS[-3:]], ids=repr)
def test_a_row_draws_the_same_in_any_batch(decoder, logits):
    tokens, log_probs = choose(decoder, logits)
    order = np.random.default_rng(0).permutation(DRAWS)
    shuffled = choose(decoder, logits[order], ROWS[order], POSITIONS[order])
    np.testing.assert_array_equal(shuffled[0], tokens[order])
    for i in range(BATCH):
        one = slice(i, i + 1)
        alone = choose(decoder, logits[one], ROWS[one], POSITIONS[one])
        np.testing.assert_array_equal(alone[0], tokens[one])
        np.testing.assert_allclose(alone[1], log_probs[one], rtol=1e-5)


def test_seed_row_and_position_each_change_the_draws(logits):
    tokens, _ = choose(Sample(), logits)
    others = [
        choose(Sample(), logits, rows=ROWS + 1)[0],
        choose(Sample(), logits, positions=POSITIONS + 1)[0],
        to_numpy(
            Sample().choose(
                logits, seed=SEED + 1, row_ids=ROWS, positions=POSITIONS
            )[0]
        ),
    ]
    for other in others:
        assert (tokens != other).mean() > 0.3


@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS[-3:]], ids=repr)
def test_compiled_equals_eager(decoder, logits):
    def step(logits, seed, rows, positions):
        return decoder.choose(
            logits, seed=seed, row_ids=rows, positions=positions
        )

    program = compiled(step)
    for batch in (BATCH, DRAWS):
        rows, positions = ROWS[:batch], POSITIONS[:batch]
        arguments = logits[:batch], np.int32(SEED), rows, positions
        tensors = [ops.convert_to_tensor(value) for value in arguments]
        tokens, log_probs = map(to_numpy, program(*tensors))
        eager = choose(decoder, logits[:batch])
        np.testing.assert_array_equal(tokens, eager[0])
        np.testing.assert_allclose(log_probs, eager[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS[-3:]], ids=repr)
def test_half_precision_logits_are_chosen_from_in_float32(
    decoder, dtype, logits
):
    half = ops.cast(ops.convert_to_tensor(logits), dtype)
    single = ops.cast(half, "float32")
    for actual, expected in zip(
        choose(decoder, half), choose(decoder, single), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "sampler",
    [
        Sample(0.7),
        Sample(min_p=0.1),
        Sample(top_k=40),
        Sample(top_k=40, top_p=0.9),
        Sample(top_p=0.9),
    ],
    ids=repr,
)
def test_the_vocabulary_is_never_sorted(sampler):
    # XLA sorts in full where it does not recognise a top-k.
    size = 5000
    text = operations(
        lambda logits, keys: sampler.choose(
            logits, seed=SEED, row_ids=keys, positions=keys
        ),
        ops.convert_to_tensor(normal(2, size)),
        ops.convert_to_tensor(ROWS[:2]),
    )
    assert " sort(" not in text
    assert "sort" in operations(
        lambda logits: ops.sort(logits, axis=-1),
        ops.convert_to_tensor(normal(2, size)),
    )


@pytest.mark.parametrize("decoder", [Greedy(), *SAMPLERS], ids=repr)
def test_survives_its_configuration(decoder):
    config = keras.saving.serialize_keras_object(decoder)
    name = type(decoder).__name__
    assert config["registered_name"] == f"keras_transformer>{name}"
    again = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(config))
    )
    assert again == decoder
    assert hash(again) == hash(decoder)
    assert eval(repr(decoder)) == decoder


def test_numpy_numbers_survive_the_configuration():
    sampler = Sample(np.float32(0.5), top_k=np.int64(3), min_p=np.float64(0.1))
    text = json.dumps(keras.saving.serialize_keras_object(sampler))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert again == sampler


def test_decoders_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample().temperature = 2.0
    assert len({*SAMPLERS}) == len(SAMPLERS)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, math.nan, "1", True])
def test_rejects_a_temperature_out_of_range_and_names_greedy(value):
    with pytest.raises(
        ValueError, match=r"`temperature` must be a finite.*`Greedy\(\)`"
    ):
        Sample(value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_rejects_a_top_k_that_is_no_count(value):
    with pytest.raises(ValueError, match="`top_k` must be a positive integer"):
        Sample(top_k=value)


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.1, math.nan, "1", True])
def test_rejects_a_top_p_out_of_range(value):
    with pytest.raises(ValueError, match=r"`top_p` must be a number in \(0, 1"):
        Sample(top_p=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "1", True])
def test_rejects_a_min_p_out_of_range(value):
    with pytest.raises(ValueError, match=r"`min_p` must be a number in \[0, 1"):
        Sample(min_p=value)
