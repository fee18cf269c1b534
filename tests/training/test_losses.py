import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.training import LabelSmoothedCrossentropy
from tests.numerics import assert_close, gradients, normal, to_numpy
from tests.sizes import BATCH, QUERY_LENGTH, VOCABULARY_SIZE

SHAPE = (BATCH, QUERY_LENGTH, VOCABULARY_SIZE)


def batch():
    generator = np.random.default_rng(0)
    targets = generator.integers(0, VOCABULARY_SIZE, SHAPE[:2])
    weights = generator.integers(0, 2, SHAPE[:2]).astype("float32")
    return targets, 3 * normal(*SHAPE), weights


def reference(targets, logits, smoothing):
    logits = logits.astype("float64")
    log_probabilities = logits - np.log(
        np.exp(logits).sum(axis=-1, keepdims=True)
    )
    wanted = np.full(logits.shape, smoothing / logits.shape[-1])
    wanted += (1 - smoothing) * np.eye(logits.shape[-1])[targets]
    return -(wanted * log_probabilities).sum(axis=-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_matches_the_formula(smoothing):
    targets, logits, _ = batch()
    loss = LabelSmoothedCrossentropy(smoothing, reduction=None)
    assert_close(loss(targets, logits), reference(targets, logits, smoothing))


def test_is_the_mean_over_the_weights():
    targets, logits, weights = batch()
    loss = LabelSmoothedCrossentropy(0.1)
    losses = reference(targets, logits, 0.1)
    expected = (weights * losses).sum() / weights.sum()
    assert_close(loss(targets, logits, sample_weight=weights), expected)
    assert_close(loss(targets, logits), losses.mean())
    # More padding does not change it.
    padded = [
        np.concatenate([array, 0 * array], axis=1)
        for array in (targets, logits, weights)
    ]
    assert_close(loss(*padded), expected)


def test_equals_the_losses_of_keras():
    targets, logits, weights = batch()
    one_hot = np.eye(VOCABULARY_SIZE, dtype="float32")[targets]
    ours = LabelSmoothedCrossentropy(0.2)(targets, logits, weights)
    dense = keras.losses.CategoricalCrossentropy(
        from_logits=True,
        label_smoothing=0.2,
        reduction="mean_with_sample_weight",
    )(one_hot, logits, weights)
    assert_close(ours, to_numpy(dense))
    unsmoothed = LabelSmoothedCrossentropy(0.0)(targets, logits, weights)
    sparse = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )(targets, logits, weights)
    assert_close(unsmoothed, to_numpy(sparse))


def test_gradient_is_probability_minus_the_smoothed_target():
    targets, logits, _ = batch()
    loss = LabelSmoothedCrossentropy(0.1, reduction="sum")
    (gradient,) = gradients(
        lambda z: loss(ops.convert_to_tensor(targets), z), logits
    )
    probabilities = np.exp(logits.astype("float64"))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    wanted = 0.9 * np.eye(VOCABULARY_SIZE)[targets] + 0.1 / VOCABULARY_SIZE
    assert_close(gradient, probabilities - wanted)


def test_half_precision_logits_and_large_logits_are_safe():
    targets, logits, _ = batch()
    loss = LabelSmoothedCrossentropy(0.1)
    half = ops.cast(logits, "bfloat16")
    result = loss(targets, half)
    assert keras.backend.standardize_dtype(result.dtype) == "float32"
    rounded = to_numpy(ops.cast(half, "float32"))
    assert_close(result, reference(targets, rounded, 0.1).mean())
    assert np.isfinite(to_numpy(loss(targets, 1e4 * logits)))


def test_token_ids_are_exact_when_floatx_is_half_precision():
    floatx = keras.config.floatx()
    keras.config.set_floatx("bfloat16")
    try:
        loss = LabelSmoothedCrossentropy(0.0)
        # bfloat16 holds integers up to 256 only.
        logits = np.zeros((1, 1, 1000), "float32")
        logits[..., 257] = 50.0
        assert to_numpy(loss(np.array([[257]]), logits)) < 1e-6
    finally:
        keras.config.set_floatx(floatx)


def test_a_class_that_is_ruled_out_is_safe_without_smoothing():
    targets = np.array([[0]])
    logits = np.array([[[0.0, 0.0, -np.inf]]], "float32")
    loss = LabelSmoothedCrossentropy(0.0)
    assert_close(loss(targets, logits), np.log(2))


def test_trains_and_is_saved_with_a_model(tmp_path):
    inputs = keras.Input((None,), dtype="int32")
    outputs = keras.layers.Embedding(VOCABULARY_SIZE, VOCABULARY_SIZE)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", LabelSmoothedCrossentropy(0.3))
    targets, _, weights = batch()
    history = model.fit(
        targets, targets, sample_weight=weights, epochs=2, verbose=0
    )
    assert history.history["loss"][1] < history.history["loss"][0]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, LabelSmoothedCrossentropy)
    assert loaded.loss.get_config() == model.loss.get_config()
    assert loaded.loss.label_smoothing == 0.3


def test_survives_its_configuration():
    loss = LabelSmoothedCrossentropy(0.2, reduction="sum", name="smooth")
    config = keras.losses.serialize(loss)
    assert config["registered_name"] == (
        "keras_transformer>LabelSmoothedCrossentropy"
    )
    assert keras.losses.deserialize(config).get_config() == loss.get_config()


def test_rejects_a_rate_of_one():
    with pytest.raises(ValueError, match=r"`label_smoothing` must be a rate"):
        LabelSmoothedCrossentropy(1.0)


def test_rejects_one_hot_targets():
    _, logits, _ = batch()
    with pytest.raises(ValueError, match=r"`y_true.shape` must be of one axis"):
        LabelSmoothedCrossentropy()(logits, logits)
