import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import (
    PositionalEmbedding,
    Unembedding,
    decoder_only,
    generate,
)
from keras_transformer.training import (
    LabelSmoothedCrossentropy,
    LinearCrossentropyModel,
)
from tests.numerics import assert_close, randomize_weights
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
    VOCABULARY_SIZE,
)

# Two batches, the second of which is smaller.
NUM_ROWS, BATCH_SIZE = 5, 3
SHAPE = (NUM_ROWS, QUERY_LENGTH)
_generator = np.random.default_rng(0)
IDS = _generator.integers(1, VOCABULARY_SIZE, SHAPE).astype("int32")
TARGETS = _generator.integers(0, VOCABULARY_SIZE, SHAPE)
WEIGHTS = _generator.uniform(0, 2, SHAPE).astype("float32")


def language_model(**options):
    model = decoder_only(
        VOCABULARY_SIZE,
        num_layers=1,
        model_dim=MODEL_DIM,
        num_heads=NUM_HEADS,
        intermediate_dim=INTERMEDIATE_DIM,
        **options,
    )
    randomize_weights(model)
    return model


def masked_model():
    """Tokens to logits; token 0 is padding; the head has all options."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, mask_zero=True)
    stream = keras.layers.LayerNormalization()(embedding(token_ids))
    # An added loss, which must be added here too.
    stream = keras.layers.ActivityRegularization(l2=1e-3)(stream)
    unembedding = Unembedding(embedding, use_bias=True, soft_cap=3.0)
    model = keras.Model(token_ids, unembedding(stream))
    randomize_weights(model)
    return model


def sequential_model(dtype=None):
    """Tokens to logits, without attention, by a kernel of its own."""
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY_SIZE, MODEL_DIM, dtype=dtype),
            Unembedding(vocabulary_size=VOCABULARY_SIZE, dtype=dtype),
        ]
    )
    randomize_weights(model)
    return model


MODELS = {
    "tied": language_model,
    "own": lambda: language_model(tie_embeddings=False),
    "masked": masked_model,
    "sequential": sequential_model,
}


def compiled_pair(model, smoothing=0.0, learning_rate=0.5):
    """The model to train without logits, and a copy to train with them."""
    dense = keras.models.clone_model(model)
    dense.set_weights(model.get_weights())
    dense.compile(
        keras.optimizers.SGD(learning_rate),
        LabelSmoothedCrossentropy(smoothing),
    )
    trained = LinearCrossentropyModel(model, label_smoothing=smoothing)
    trained.compile(keras.optimizers.SGD(learning_rate))
    return trained, dense


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_the_loss_of_the_logits_does(name):
    model = MODELS[name]()
    trained, dense = compiled_pair(model, smoothing=0.1)
    ids = IDS.copy()
    if name == "masked":
        ids[1, 3:] = 0
    histories = [
        candidate.fit(
            ids,
            TARGETS,
            sample_weight=WEIGHTS,
            batch_size=BATCH_SIZE,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history["loss"]
        for candidate in (trained, dense)
    ]
    assert_close(np.array(histories[0]), histories[1])
    weights = zip(model.get_weights(), dense.get_weights(), strict=True)
    for actual, expected in weights:
        assert_close(actual, expected)
    losses = [
        candidate.evaluate(ids, TARGETS, batch_size=BATCH_SIZE, verbose=0)
        for candidate in (trained, dense)
    ]
    assert_close(losses[0], losses[1])


def test_shares_every_weight_with_the_wrapped_model():
    model = sequential_model()
    trained = LinearCrossentropyModel(model)
    assert [id(w) for w in trained.trainable_weights] == [
        id(w) for w in model.trainable_weights
    ]
    model.layers[0].trainable = False
    assert len(trained.trainable_weights) == 1


@pytest.mark.parametrize("name", ["masked", "sequential"])
def test_training_and_evaluation_make_no_logits(name, monkeypatch):
    trained, _ = compiled_pair(MODELS[name]())

    def refuse(*args, **kwargs):
        raise AssertionError("logits were made")

    monkeypatch.setattr(Unembedding, "call", refuse)
    trained.fit(IDS, TARGETS, verbose=0)
    trained.evaluate(IDS, TARGETS, verbose=0)
    with pytest.raises(AssertionError, match="logits were made"):
        trained.predict(IDS, verbose=0)


def test_the_wrapped_model_predicts_and_generates():
    model = language_model()
    trained, _ = compiled_pair(model)
    before = model.predict(IDS, verbose=0)
    texts = []

    class Generates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            texts.append(generate(model, IDS[:1], max_new_tokens=2).tokens)

    trained.fit(IDS, TARGETS, callbacks=[Generates()], verbose=0)
    assert texts[0].shape == (1, QUERY_LENGTH + 2)
    logits = model.predict(IDS, verbose=0)
    assert np.abs(logits - before).max() > 0.1
    assert_close(trained.predict(IDS, verbose=0), logits)
    assert_close(trained.predict_on_batch(IDS), logits)


@pytest.mark.parametrize("name", ["masked", "sequential"])
def test_is_saved_with_the_state_of_its_training(name, tmp_path):
    trained, _ = compiled_pair(MODELS[name](), smoothing=0.2)
    trained.fit(IDS, TARGETS, verbose=0)
    trained.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, LinearCrossentropyModel)
    assert loaded.label_smoothing == 0.2
    assert int(loaded.optimizer.iterations) == 1
    loss = trained.evaluate(IDS, TARGETS, verbose=0)
    assert_close(loaded.evaluate(IDS, TARGETS, verbose=0), loss)
    loaded.fit(IDS, TARGETS, verbose=0)
    trained.fit(IDS, TARGETS, verbose=0)
    for actual, expected in zip(
        loaded.model.get_weights(), trained.model.get_weights(), strict=True
    ):
        assert_close(actual, expected)


def test_the_wrapped_model_is_saved_as_if_never_wrapped(tmp_path):
    model = masked_model()
    trained, _ = compiled_pair(model)
    trained.fit(IDS, TARGETS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))


def test_takes_inputs_by_name():
    model = language_model(inputs=("token_ids", "padding_mask"))
    trained, dense = compiled_pair(model)
    inputs = {"token_ids": IDS, "padding_mask": TARGETS > 5}
    weights = inputs["padding_mask"].astype("float32")
    losses = [
        candidate.evaluate(inputs, TARGETS, sample_weight=weights, verbose=0)
        for candidate in (trained, dense)
    ]
    assert_close(losses[0], losses[1])


def test_weights_of_rows_are_weights_of_their_tokens():
    model = sequential_model()
    of_rows = WEIGHTS[:, 0]
    of_tokens = np.repeat(of_rows[:, None], QUERY_LENGTH, axis=1)
    losses = []
    for weights in (of_rows, of_tokens, None):
        trained = LinearCrossentropyModel(model)
        trained.compile("sgd")
        loss = trained.evaluate(IDS, TARGETS, sample_weight=weights, verbose=0)
        losses.append(loss)
    assert_close(losses[0], losses[1])
    assert losses[0] != losses[2]


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_trains_in_half_precision(dtype):
    trained, dense = compiled_pair(sequential_model(dtype))
    optimizer = keras.optimizers.SGD(0.5)
    if dtype == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    trained.compile(optimizer)
    loss = trained.evaluate(IDS, TARGETS, verbose=0)
    half = dtype.removeprefix("mixed_")
    assert_close(loss, dense.evaluate(IDS, TARGETS, verbose=0), half)
    trained.fit(IDS, TARGETS, epochs=3, verbose=0)
    assert trained.evaluate(IDS, TARGETS, verbose=0) < loss


def test_survives_its_configuration():
    model = LinearCrossentropyModel(sequential_model(), label_smoothing=0.1)
    again = LinearCrossentropyModel.from_config(model.get_config())
    assert again.get_config() == model.get_config()


def test_rejects_a_model_that_it_cannot_open():
    token_ids = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    dense = keras.layers.Dense(VOCABULARY_SIZE, name="head")(embedded)
    unembedding = Unembedding(vocabulary_size=VOCABULARY_SIZE)
    two = keras.Model(token_ids, [unembedding(embedded), embedded])
    with pytest.raises(
        ValueError, match=r"`model` must be .* an Unembedding.*Dense 'head'"
    ):
        LinearCrossentropyModel(keras.Model(token_ids, dense))
    for model in (two, keras.Sequential(), unembedding):
        with pytest.raises(ValueError, match="`model` must be a functional"):
            LinearCrossentropyModel(model)
    with pytest.raises(ValueError, match="`label_smoothing` must be a rate"):
        LinearCrossentropyModel(sequential_model(), label_smoothing=1.0)


def test_rejects_what_would_need_logits():
    trained = LinearCrossentropyModel(sequential_model())
    with pytest.raises(ValueError, match=r"`loss` must be None.*'mse'"):
        trained.compile("sgd", "mse")
    for name in ("metrics", "weighted_metrics"):
        with pytest.raises(ValueError, match=f"`{name}` must be None here"):
            trained.compile("sgd", **{name: ["accuracy"]})
    trained.compile("sgd")
    with pytest.raises(ValueError, match="`y` must be given"):
        trained.train_on_batch(IDS, None)
    one_hot = np.zeros((*SHAPE, VOCABULARY_SIZE), "int32")
    with pytest.raises(ValueError, match=r"`targets.shape` must be"):
        trained.train_on_batch(IDS, one_hot)


def test_an_untrained_uniform_head_has_the_perplexity_of_a_guess():
    model = sequential_model()
    model.set_weights([0 * weight for weight in model.get_weights()])
    trained = LinearCrossentropyModel(model)
    trained.compile("sgd")
    loss = trained.evaluate(IDS, TARGETS, verbose=0)
    assert_close(ops.exp(loss), VOCABULARY_SIZE)
