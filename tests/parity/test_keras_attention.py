"""Against Keras's attention layers, with the same weights."""

import keras
import numpy as np
import pytest

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.masks import Causal, SlidingWindow
from tests.numerics import normal, randomize_weights
from tests.parity.peers import assert_same, copy_from_keras
from tests.sizes import (
    BATCH,
    KEY_DIM,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    QUERY_LENGTH,
    VALUE_DIM,
)

pytestmark = pytest.mark.parity

# Width of the other sequence; Keras's grouped layer wants the query's.
KEY_WIDTH = 16
PADDING_MASK = np.arange(KEY_LENGTH) < np.array([[7], [4], [1]])
# Each query sees at least one key: what Keras makes of others depends on the
# path it takes.
ATTENTION_MASK = (
    np.random.default_rng(1).random((BATCH, QUERY_LENGTH, KEY_LENGTH)) < 0.5
) | (np.arange(KEY_LENGTH) == 0)


def query():
    return normal(BATCH, QUERY_LENGTH, MODEL_DIM)


def multi_head_pair(*shapes, ours=(), **options):
    """Keras's layer and ours with the same weights and options."""
    theirs = keras.layers.MultiHeadAttention(NUM_HEADS, KEY_DIM, **options)
    options.pop("sliding_window", None)
    if "output_shape" in options:
        options["output_dim"] = options.pop("output_shape")
    layer = MultiHeadAttention(NUM_HEADS, KEY_DIM, **options, **dict(ours))
    return _same_weights(theirs, layer, shapes)


def grouped_pair(*shapes, ours=(), **options):
    """Keras's grouped-query layer and ours, likewise."""
    theirs = keras.layers.GroupQueryAttention(
        KEY_DIM, NUM_HEADS, NUM_KEY_VALUE_HEADS, **options
    )
    options.pop("sliding_window", None)
    layer = MultiHeadAttention(
        NUM_HEADS,
        KEY_DIM,
        num_key_value_heads=NUM_KEY_VALUE_HEADS,
        **options,
        **dict(ours),
    )
    return _same_weights(theirs, layer, shapes)


def _same_weights(theirs, layer, shapes):
    theirs.build(*shapes)
    layer.build(*shapes)
    randomize_weights(theirs)
    copy_from_keras(layer, theirs)
    return theirs, layer


PAIRS = pytest.mark.parametrize("pair", [multi_head_pair, grouped_pair])


@PAIRS
@pytest.mark.parametrize(
    "options", [{}, {"use_bias": False}, {"use_gate": True}]
)
def test_self_attention_equals_keras(pair, options):
    inputs = query()
    theirs, ours = pair(inputs.shape, inputs.shape, **options)
    assert_same(ours(inputs), theirs(inputs, inputs))


@PAIRS
def test_causal_attention_equals_keras(pair):
    inputs = query()
    theirs, ours = pair(inputs.shape, inputs.shape, ours={"mask": Causal()})
    expected = theirs(inputs, inputs, use_causal_mask=True)
    assert_same(ours(inputs), expected)
    _, ours = pair(inputs.shape, inputs.shape)
    assert_same(ours(inputs, use_causal_mask=True), expected)


@PAIRS
def test_sliding_window_equals_keras(pair):
    inputs = query()
    theirs, ours = pair(
        inputs.shape,
        inputs.shape,
        sliding_window=2,
        ours={"mask": SlidingWindow(2)},
    )
    assert_same(ours(inputs), theirs(inputs, inputs))
    assert_same(
        ours(inputs, use_causal_mask=True),
        theirs(inputs, inputs, use_causal_mask=True),
    )


@PAIRS
def test_cross_attention_equals_keras_with_each_mask(pair):
    inputs, others = query(), normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=1)
    theirs, ours = pair(inputs.shape, others.shape)
    for padding_mask in (None, PADDING_MASK):
        for attention_mask in (None, ATTENTION_MASK):
            assert_same(
                ours(
                    inputs,
                    others,
                    padding_mask=padding_mask,
                    attention_mask=attention_mask,
                ),
                theirs(
                    inputs,
                    others,
                    value_mask=padding_mask,
                    attention_mask=attention_mask,
                ),
            )


@PAIRS
def test_scores_equal_those_of_keras(pair):
    inputs, others = query(), normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=1)
    theirs, ours = pair(inputs.shape, others.shape)
    outputs, scores = ours(
        inputs,
        others,
        padding_mask=PADDING_MASK,
        return_attention_scores=True,
    )
    expected, expected_scores = theirs(
        inputs, others, value_mask=PADDING_MASK, return_attention_scores=True
    )
    assert_same(outputs, expected)
    assert_same(scores, expected_scores)


def test_separate_keys_and_widths_equal_keras():
    inputs = query()
    keys = normal(BATCH, KEY_LENGTH, KEY_WIDTH, seed=1)
    values = normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=2)
    # Keras's fused path wants values as wide as keys; scores avoid it.
    theirs, ours = multi_head_pair(
        inputs.shape,
        values.shape,
        keys.shape,
        value_dim=VALUE_DIM,
        output_shape=KEY_WIDTH,
        use_gate=True,
    )
    expected, _ = theirs(inputs, values, keys, return_attention_scores=True)
    assert_same(ours(inputs, values, keys), expected)


# Keras's grouped layer warns that its projections drop the mask.
@pytest.mark.filterwarnings("ignore:.*destroy the mask")
@PAIRS
def test_an_implicit_mask_of_the_keys_acts_as_in_keras(pair):
    tokens = np.where(PADDING_MASK, np.arange(1, KEY_LENGTH + 1), 0)
    embedding = keras.layers.Embedding(
        KEY_LENGTH + 1, MODEL_DIM, mask_zero=True
    )
    inputs = query()
    theirs, ours = pair(inputs.shape, (BATCH, KEY_LENGTH, MODEL_DIM))
    expected = theirs(inputs, embedding(tokens))
    assert_same(ours(inputs, embedding(tokens)), expected)
