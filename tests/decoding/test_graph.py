import gc
import weakref

import keras
import numpy as np
import pytest

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerEncoder,
    Unembedding,
)
from keras_transformer.decoding import generate
from keras_transformer.decoding.graph import ModelGraph
from keras_transformer.masks import Causal
from tests.decoding.compiling import compiled
from tests.decoding.uncached import (
    PROMPTS,
    check_against_whole,
    decoder_block,
    language_model,
    randomized,
)
from tests.numerics import assert_close, to_numpy
from tests.sizes import MODEL_DIM, NUM_HEADS, VOCABULARY_SIZE

pytestmark = pytest.mark.usefixtures("_quick_compilation")


def run(graph, tokens, last=None):
    inputs = {graph.token_input: tokens}
    return graph.run_growing(inputs, graph.run_static({}), None, last=last)


def test_runs_as_the_model_does(model):
    tokens = np.array([[7, 3, 11], [5, 2, 2]], "int32")
    graph = ModelGraph(model)
    actual = compiled(lambda tokens: run(graph, tokens))(tokens)
    expected = compiled(lambda tokens: model(tokens))(tokens)
    assert_close(actual, to_numpy(expected))


@pytest.mark.parametrize("end", ["tied", "own", "dense", "softmax", "two_ways"])
def test_only_the_wanted_position_goes_through_the_end(end):
    token_ids = keras.Input((None,), dtype="int32")
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    before = embedding(token_ids)
    stream = keras.layers.LayerNormalization()(before)
    if end == "tied":
        outputs = Unembedding(embedding)(stream)
    elif end == "own":
        stream = keras.layers.RMSNormalization()(stream)
        outputs = Unembedding(vocabulary_size=VOCABULARY_SIZE)(stream)
    elif end == "two_ways":
        # The norm's input is read again after it.
        outputs = keras.layers.Dense(VOCABULARY_SIZE)(stream + before)
    else:
        outputs = keras.layers.Dense(VOCABULARY_SIZE)(stream)
    if end == "softmax":
        outputs = keras.layers.Softmax()(outputs)
    model = randomized(keras.Model(token_ids, outputs))
    tokens = np.array([[7, 3, 11], [5, 2, 2]], "int32")
    last = np.array([2, 0], "int32")
    logits = to_numpy(run(ModelGraph(model), tokens, last))
    expected = to_numpy(model(tokens))[[0, 1], last][:, None]
    assert_close(logits, expected)


def test_separates_what_does_not_depend_on_the_tokens(translator):
    graph = ModelGraph(translator)
    assert graph.token_input == "decoder_token_ids"
    assert graph.growing_inputs == ["decoder_token_ids", "decoder_padding_mask"]
    assert graph.static_inputs == ["encoder_token_ids", "encoder_padding_mask"]
    static = {
        node.operation.name
        for node in graph.static_nodes
        if isinstance(node.operation, TransformerEncoder)
    }
    assert static == {"encoder_0", "encoder_1"}
    # The encoded sequence, its padding and the tied table.
    assert len(graph.frontier) == 3
    assert graph.is_padding("decoder_padding_mask")
    assert not graph.is_padding("encoder_padding_mask")


def test_sources_may_be_called_token_ids():
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "decoder_token_ids")
    }
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    encoded = TransformerEncoder(8, NUM_HEADS)(embedding(inputs["token_ids"]))
    stream = decoder_block()(embedding(inputs["decoder_token_ids"]), encoded)
    model = keras.Model(inputs, Unembedding(embedding)(stream))
    graph = ModelGraph(model)
    assert graph.growing_inputs == ["decoder_token_ids"]
    assert graph.static_inputs == ["token_ids"]


def nested(**options):
    """A model whose embedder is in a model in it."""
    inside = keras.Input((None,), dtype="int32", name="inside")
    embedded = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, **options)(
        inside
    )
    inner = keras.Model(inside, decoder_block()(embedded))
    token_ids = keras.Input((None,), dtype="int32")
    outputs = keras.layers.Dense(VOCABULARY_SIZE)(inner(token_ids))
    return randomized(keras.Model(token_ids, outputs, name="outer"))


def test_limits_are_found_in_nested_models():
    graph = ModelGraph(nested(max_length=9, mask_zero=True))
    assert graph.max_length == 9
    assert graph.vocabulary_size(graph.token_input) == VOCABULARY_SIZE
    assert graph.masks_zero(graph.token_input)


@pytest.mark.slow
def test_a_nested_embedder_limits_the_length():
    model = nested(max_length=9, position="learned")
    with pytest.raises(ValueError, match="fit the 9 positions of 'outer'"):
        generate(model, [[1, 2, 3]], max_new_tokens=7)
    assert generate(model, [[1, 2, 3]], max_new_tokens=6).lengths[0] == 9


@pytest.mark.slow
def test_a_sequential_model_is_run():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM),
            decoder_block(),
            Unembedding(vocabulary_size=VOCABULARY_SIZE),
        ]
    )
    check_against_whole(randomized(model), PROMPTS)


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


def pooled():
    token_ids = keras.Input((None,), dtype="int32")
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    stream = keras.layers.GlobalAveragePooling1D()(stream)
    return keras.Model(token_ids, stream, name="pooled")


def two_outputs():
    token_ids = keras.Input((None,), dtype="int32")
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(token_ids)
    return keras.Model(token_ids, [stream, stream], name="two")


def two_unnamed_inputs():
    ids = [keras.Input((None,), dtype="int32", name=name) for name in "ab"]
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(ids[0])
    return keras.Model(ids, stream, name="unnamed")


def independent():
    names = ("token_ids", "encoder_token_ids")
    ids = [keras.Input((None,), dtype="int32", name=name) for name in names]
    stream = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)(ids[1])
    return keras.Model(ids, stream, name="independent")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Subclassed, "`model` must be a functional or sequential keras.Model"),
        (keras.Sequential, "`model` must be a functional or sequential"),
        (lambda: decoder_block, "`model` must be a keras.Model"),
        (pooled, "to logits of shape .*'pooled' with output shape"),
        (two_outputs, "must have one output.*'two' with 2 outputs"),
        (two_unnamed_inputs, "One input of 'unnamed' must be called"),
        (independent, "does not depend on its input 'token_ids'"),
    ],
)
def test_another_model_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        generate(make(), PROMPTS, max_new_tokens=2)


@pytest.mark.slow
def test_a_model_is_freed_after_use():
    model = language_model(decoder_block())
    generate(model, [[1, 2]], max_new_tokens=2)
    reference = weakref.ref(model)
    del model
    # Twice: what TensorFlow traces is let go by the first.
    gc.collect()
    gc.collect()
    assert reference() is None


# --- what runs the layers of a model in another trace -------------------------


def test_rematerialised_layers_are_decoded():
    with keras.RematScope("full"):
        block = decoder_block(position="rope")
    model = language_model(block)
    # Not under the scope, and so without rematerialisation.
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    results = [generate(m, PROMPTS, max_new_tokens=4) for m in (model, plain)]
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
    # Training goes on as it was asked for.
    assert block._remat_mode.mode == "full"


class Conditional(keras.layers.Layer):
    """Attends inside of a branch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = MultiHeadAttention(
            NUM_HEADS, mask=Causal(), name="inside"
        )

    def build(self, input_shape):
        self.attention.build(input_shape)

    def call(self, inputs):
        return keras.ops.cond(
            keras.ops.all(inputs < 1e6),
            lambda: self.attention(inputs),
            lambda: inputs,
        )

    def compute_output_shape(self, input_shape):
        return input_shape


class Scanned(Conditional):
    """Attends in each step of a loop."""

    def call(self, inputs):
        def step(stream, _):
            return stream + self.attention(stream), None

        return keras.ops.scan(step, inputs, length=2)[0]


@pytest.mark.parametrize("kind", [Conditional, Scanned])
def test_a_cache_inside_of_control_flow_is_refused_where_it_cannot_leave(kind):
    model = language_model(kind(name="control"))
    if keras.backend.backend() == "torch":
        # Control flow runs as plain Python.
        check_against_whole(model, PROMPTS)
        return
    message = "'control/inside' cannot be decoded with caches inside of"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, max_new_tokens=2)


class Projected(keras.layers.Layer):
    """Projects the encoder's sequence inside of the layer that reads it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = keras.layers.Dense(MODEL_DIM)
        self.attention = MultiHeadAttention(NUM_HEADS)

    def build(self, stream_shape, encoded_shape):
        self.project.build(encoded_shape)
        self.attention.build(stream_shape, stream_shape)

    def call(self, stream, encoded):
        return stream + self.attention(stream, self.project(encoded))

    def compute_output_shape(self, stream_shape, encoded_shape):
        return stream_shape


@pytest.mark.slow
def test_a_sequence_that_may_grow_or_not_is_told_or_refused():
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("encoder_token_ids", "decoder_token_ids")
    }
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    encoded = embedding(inputs["encoder_token_ids"])
    stream = decoder_block()(embedding(inputs["decoder_token_ids"]))
    stream = Projected()(stream, encoded)
    logits = Unembedding(vocabulary_size=VOCABULARY_SIZE)(stream)
    model = randomized(keras.Model(inputs, logits))
    prompt = [7, 3, 11, 19, 4, 23, 1, 5]
    for source in ([1, 2, 3, 4, 5], [1, 2, 3], prompt * 2, prompt):
        prompts = {"encoder_token_ids": [source], "decoder_token_ids": [prompt]}
        try:
            result = generate(model, prompts, max_new_tokens=2)
        except ValueError as error:
            assert "cannot be told whether it grows" in str(error)  # noqa: PT017
            assert len(source) in (8, 16)
            continue
        logits = to_numpy(
            model(
                {
                    "encoder_token_ids": np.array([source]),
                    "decoder_token_ids": result.tokens[:, :-1],
                }
            )
        )
        expected = np.argmax(logits[0, 7:], axis=-1)
        np.testing.assert_array_equal(expected, result.tokens[0, 8:])
