import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer._internal.decoding_scope import DecodingScope
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerEncoder,
    Unembedding,
)
from keras_transformer.decoding import Sample, generate, program
from keras_transformer.masks import Causal, SlidingWindow
from tests.decoding.uncached import (
    PROMPTS,
    check_against_whole,
    decoder_block,
    language_model,
    randomized,
)
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    VOCABULARY_SIZE,
)

pytestmark = pytest.mark.usefixtures("_quick_compilation")


class Counter(keras.layers.Layer):
    """Counts how often its `call` runs: once a step, or once a compilation."""

    count = 0

    def call(self, inputs):
        self.count += 1
        return inputs

    def counted(self, function, *args, **kwargs):
        """How many calls `function` causes."""
        before = self.count
        function(*args, **kwargs)
        return self.count - before


def expected_calls(steps):
    """Calls of a program that was compiled before."""
    return steps if backend.RUNS_STEP_BY_STEP else 0


def test_nothing_is_compiled_again_inside_a_bucket():
    counter = Counter()
    model = language_model(counter, decoder_block(mask=Causal()))
    options = {"max_new_tokens": 4, "decoder": Sample(top_k=5)}
    counted = counter.counted(generate, model, PROMPTS, **options)
    if not backend.RUNS_STEP_BY_STEP:
        # Check with and without caches, prefill, loop.
        assert 0 < counted <= 2 + 4
    for prompts, changed in [
        (PROMPTS, {}),
        (PROMPTS[::-1], {"seed": 5}),
        ([[1], [2, 3, 4, 5, 6, 7, 8]], {"max_new_tokens": 8}),
        ([[1] * 10, [2]], {"max_new_tokens": 6, "row_ids": [8, 2]}),
        (PROMPTS, {"stop": 28, "return_log_probs": True}),
        (PROMPTS, {"stop": [26, 27, 28], "pad_id": 1}),
    ]:
        settings = {**options, **changed}
        counted = counter.counted(generate, model, prompts, **settings)
        assert counted <= expected_calls(settings["max_new_tokens"])
    # Another decoder compiles a program of its own.
    assert counter.counted(generate, model, PROMPTS, max_new_tokens=4) > 0


@pytest.mark.slow
def test_other_weights_do_not_compile():
    counter = Counter()
    model = language_model(counter, decoder_block())
    texts = []
    for seed in range(2):
        weights = [
            np.random.default_rng(seed).normal(size=w.shape)
            for w in model.get_weights()
        ]
        model.set_weights(weights)
        counted = counter.counted(check_against_whole, model, PROMPTS)
        if seed and not backend.RUNS_STEP_BY_STEP:
            # That is the oracle.
            assert counted == 1
        texts.append(generate(model, PROMPTS, max_new_tokens=8).tokens)
    assert not np.array_equal(*texts)


def translator_with(counter):
    names = ("encoder_token_ids", "decoder_token_ids", "encoder_padding_mask")
    inputs = {
        name: keras.Input(
            (None,), dtype="bool" if "mask" in name else "int32", name=name
        )
        for name in names
    }
    padding = inputs["encoder_padding_mask"]
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, 40)
    encoded = counter(embedding(inputs["encoder_token_ids"]))
    encoded = TransformerEncoder(INTERMEDIATE_DIM, NUM_HEADS)(
        encoded, padding_mask=padding
    )
    stream = embedding(inputs["decoder_token_ids"])
    stream = decoder_block()(stream, encoded, encoder_padding_mask=padding)
    return randomized(keras.Model(inputs, Unembedding(embedding)(stream)))


def test_the_encoder_runs_once():
    counter = Counter()
    model = translator_with(counter)
    options = {"start_token": 1, "max_new_tokens": 6}
    generate(model, {"encoder_token_ids": [[3, 8, 1], [2, 9]]}, **options)
    for sources in ([[5, 6, 7, 2], [1]], [[4] * 11, [2, 2]]):
        counted = counter.counted(
            generate, model, {"encoder_token_ids": sources}, **options
        )
        assert counted == expected_calls(1)


@pytest.mark.slow
def test_a_window_keeps_no_more_than_it_sees(monkeypatch):
    sizes = {}

    class Scope(DecodingScope):
        def put(self, name, cache):
            sizes.setdefault(name.split("/")[0], set()).add(
                cache["slots"].shape[1]
            )
            super().put(name, cache)

    monkeypatch.setattr(program, "DecodingScope", Scope)
    window = decoder_block(mask=Causal() & SlidingWindow(4), name="window")
    model = language_model(window, decoder_block(name="all"))
    generate(model, [[1] * 20], max_new_tokens=3)
    assert sizes == {"window": {4}, "all": {24}}


# --- inside of `fit` ----------------------------------------------------------


def trainable(counter):
    model = language_model(counter, decoder_block(position="rope"))
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


ROWS = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, (8, 6), "int32")


class Writing(keras.callbacks.Callback):
    """Generates in the middle and at the end of each epoch."""

    def __init__(self, closure_model, counter):
        super().__init__()
        self.closure_model, self.counter = closure_model, counter
        self.seen = []

    def write(self, model):
        counted = self.counter.counted(
            lambda: self.seen.append(
                (
                    generate(
                        model, PROMPTS, max_new_tokens=6, return_log_probs=True
                    ),
                    model.get_weights(),
                )
            )
        )
        if len(self.seen) > 1:
            assert counted == expected_calls(6)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.write(self.closure_model)

    def on_epoch_end(self, epoch, logs=None):
        self.write(self.model)


def test_generation_inside_of_fit_sees_the_new_weights():
    counter = Counter()
    model = trainable(counter)
    first = model.get_weights()
    callback = Writing(model, counter)
    history = model.fit(
        ROWS[:, :-1],
        ROWS[:, 1:],
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    losses = history.history["loss"]
    assert losses[1] < losses[0]
    final = model.get_weights()
    assert len(callback.seen) == 4
    log_probs = [result.log_probs for result, _ in callback.seen]
    for before, after in itertools.pairwise(log_probs):
        assert not np.array_equal(before, after)
    for result, weights in callback.seen:
        model.set_weights(weights)
        again = generate(
            model, PROMPTS, max_new_tokens=6, return_log_probs=True
        )
        np.testing.assert_array_equal(result.tokens, again.tokens)
        np.testing.assert_allclose(result.log_probs, again.log_probs, atol=1e-6)
    # Training went on from where it was: the same steps without generation.
    model.set_weights(first)
    model.fit(
        ROWS[:, :-1],
        ROWS[:, 1:],
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    for weight, expected in zip(model.get_weights(), final, strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


@pytest.mark.slow
def test_a_model_inside_of_the_trained_one_generates():
    counter = Counter()
    model = trainable(counter)
    (token_ids,) = model.inputs
    shared = keras.Model(token_ids, ops.softmax(model.outputs[0]))
    shared.compile("sgd", "sparse_categorical_crossentropy")
    seen = []
    shared.fit(
        ROWS[:, :-1],
        ROWS[:, 1:],
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(
                    generate(
                        model, PROMPTS, max_new_tokens=6, return_log_probs=True
                    )
                )
            )
        ],
    )
    again = generate(model, PROMPTS, max_new_tokens=6, return_log_probs=True)
    np.testing.assert_allclose(seen[1].log_probs, again.log_probs, atol=1e-6)
    assert not np.array_equal(seen[0].log_probs, seen[1].log_probs)


@pytest.mark.slow
def test_added_weights_make_a_new_program():
    dense = keras.layers.Dense(MODEL_DIM)
    model = language_model(dense, decoder_block())
    before = generate(model, PROMPTS, max_new_tokens=8, return_log_probs=True)
    dense.enable_lora(2)
    dense.lora_kernel_b.assign(np.ones(dense.lora_kernel_b.shape))
    after = check_against_whole(model, PROMPTS)
    assert not np.array_equal(before.log_probs, after.log_probs)
