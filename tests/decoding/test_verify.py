import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.blocks import PositionalEmbedding, Unembedding
from keras_transformer.decoding import generate
from keras_transformer.decoding.graph import ModelGraph
from keras_transformer.decoding.prompts import read_prompts
from keras_transformer.decoding.verify import CachedCheck
from keras_transformer.masks import Causal, Prefix
from keras_transformer.positions import Learned, Sinusoidal
from tests.decoding.uncached import (
    PROMPTS,
    check_against_whole,
    decoder_block,
    language_model,
    randomized,
)
from tests.sizes import MODEL_DIM, NUM_HEADS, VOCABULARY_SIZE

pytestmark = pytest.mark.usefixtures("_quick_compilation")


class ForeignAttention(keras.layers.Layer):
    """Another library's attention, causal."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, inputs):
        return self.attention(inputs, inputs, use_causal_mask=True)


class Repeated(keras.layers.Layer):
    """Doubles each position: another length than the tokens have."""

    def call(self, inputs):
        return ops.repeat(inputs, 2, axis=1)


class Counted(keras.layers.Layer):
    """Adds a number that depends on the array's shape."""

    def call(self, inputs):
        return inputs + ops.cast(ops.shape(inputs)[1], inputs.dtype)


class Rolled(keras.layers.Layer):
    def call(self, inputs):
        return ops.roll(inputs, 1, axis=1)


SLOW = pytest.mark.slow
MIXING = {
    "causal convolution": lambda **name: keras.layers.Conv1D(
        MODEL_DIM, 3, padding="causal", **name
    ),
    "convolution": lambda **name: keras.layers.Conv1D(
        MODEL_DIM, 3, padding="same", **name
    ),
    "valid convolution": lambda **name: keras.layers.Conv1D(
        MODEL_DIM, 3, **name
    ),
    "pooling": lambda **name: keras.layers.MaxPooling1D(2, 1, "same", **name),
    "recurrence": lambda **name: keras.layers.GRU(
        MODEL_DIM, return_sequences=True, **name
    ),
    "foreign attention": ForeignAttention,
    "repetition": Repeated,
    "length": Counted,
    "roll": Rolled,
}


@pytest.mark.parametrize(
    "kind",
    [
        "causal convolution",
        "valid convolution",
        "foreign attention",
        "repetition",
        pytest.param("convolution", marks=SLOW),
        pytest.param("pooling", marks=SLOW),
        pytest.param("recurrence", marks=SLOW),
        pytest.param("length", marks=SLOW),
        pytest.param("roll", marks=SLOW),
    ],
)
def test_an_operation_that_mixes_positions_is_named(kind):
    token_ids = keras.Input((None,), dtype="int32")
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    stream = MIXING[kind](name="mixing")(stream)
    logits = Unembedding(vocabulary_size=VOCABULARY_SIZE)(stream)
    model = randomized(keras.Model(token_ids, logits, name="mixed"))
    message = "'mixed' cannot be decoded with caches: its operation 'mixing'"
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, max_new_tokens=2)


@pytest.mark.slow
def test_operations_on_single_positions_are_accepted():
    norm = keras.layers.BatchNormalization()
    model = language_model(
        keras.layers.Conv1D(MODEL_DIM, 1),
        norm,
        keras.layers.Activation("gelu"),
        decoder_block(),
        keras.layers.Dropout(0.5),
    )
    norm.moving_variance.assign(np.full(MODEL_DIM, 2.0))
    check_against_whole(model, PROMPTS)


def with_logits(change, dim=MODEL_DIM):
    token_ids = keras.Input((None,), dtype="int32")
    embedding = PositionalEmbedding(VOCABULARY_SIZE, dim)
    attention = MultiHeadAttention(2, mask=Causal(), position="alibi")
    logits = Unembedding(embedding)(attention(embedding(token_ids)))
    return randomized(keras.Model(token_ids, change(logits)))


@pytest.mark.slow
def test_tokens_may_be_forbidden_by_infinite_logits():
    allowed = np.arange(VOCABULARY_SIZE) % 3 == 1
    model = with_logits(lambda x: ops.where(allowed, x, -np.inf))
    result = generate(model, PROMPTS, max_new_tokens=4)
    assert (result.tokens[0, 6:] % 3 == 1).all()


@pytest.mark.slow
def test_a_table_as_wide_as_the_sample_is_long_is_no_sequence():
    model = with_logits(lambda x: x, dim=4)
    check_against_whole(model, [[7, 3, 9], [4, 2, 1]])


def test_a_failing_model_speaks_for_itself():
    class Failing(keras.layers.Layer):
        def call(self, inputs):
            raise RuntimeError("out of paper")

        def compute_output_shape(self, input_shape):
            return input_shape

    model = language_model(decoder_block(), Failing())
    with pytest.raises(Exception, match="out of paper"):
        generate(model, PROMPTS, max_new_tokens=2)


def test_an_attention_mask_is_refused_with_the_reason():
    token_ids = keras.Input((None,), dtype="int32")
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    allowed = ops.equal(token_ids[:, :, None], token_ids[:, None, :])
    stream = MultiHeadAttention(NUM_HEADS, mask=Causal(), name="masked")(
        stream, attention_mask=allowed
    )
    logits = Unembedding(vocabulary_size=VOCABULARY_SIZE)(stream)
    model = randomized(keras.Model(token_ids, logits))
    message = "(?s)'masked' fails when.*`attention_mask` of layer 'masked'"
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, max_new_tokens=2)


class Positioned(keras.layers.Layer):
    """Adds a position scheme by hand."""

    def __init__(self, scheme, **kwargs):
        super().__init__(**kwargs)
        self.scheme = scheme

    def build(self, input_shape):
        self.scheme.build(input_shape)

    def call(self, inputs):
        return inputs + self.scheme(inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize(
    "scheme",
    [Sinusoidal, pytest.param(lambda: Learned(30), marks=pytest.mark.slow)],
)
def test_a_scheme_without_positions_counts_slots_or_is_refused(scheme):
    token_ids = keras.Input((None,), dtype="int32")
    stream = keras.layers.Embedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    stream = Positioned(scheme(), name="positioned")(stream)
    stream = decoder_block()(stream)
    logits = keras.layers.Dense(VOCABULARY_SIZE)(stream)
    model = randomized(keras.Model(token_ids, logits))
    with pytest.raises(ValueError, match="operation 'positioned' gives other"):
        generate(model, PROMPTS, max_new_tokens=2)


@pytest.mark.slow
def test_a_prefix_is_read_in_one_piece():
    model = language_model(decoder_block(mask=Causal() | Prefix(6)))
    graph = ModelGraph(model)
    sample = CachedCheck(model, graph, read_prompts(graph, [[1] * 9], None))
    assert [mask for _, mask in sample.watched] == [Causal() | Prefix(6)]
    sample.compare()


def test_a_model_is_checked_once(model, monkeypatch):
    generate(model, PROMPTS, max_new_tokens=2)
    module = sys.modules["keras_transformer.decoding.generate"]
    monkeypatch.setattr(module, "CachedCheck", None)
    generate(model, PROMPTS, max_new_tokens=2)
