"""Against KerasHub's blocks, a model of it, and its samplers."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_transformer.blocks import TransformerDecoder, TransformerEncoder
from keras_transformer.decoding import Greedy, Sample, generate
from keras_transformer.models import decoder_only
from tests.numerics import normal, randomize_weights, to_numpy
from tests.parity.peers import assert_same, copy_from_keras
from tests.sizes import (
    BATCH,
    INTERMEDIATE_DIM,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
    VOCABULARY_SIZE,
)

pytestmark = pytest.mark.parity

PLACEMENTS = pytest.mark.parametrize("norm_placement", ["pre", "post"])
LENGTHS = np.array([[5], [3], [1]])
PADDING_MASK = np.arange(QUERY_LENGTH) < LENGTHS
ENCODER_PADDING_MASK = np.arange(KEY_LENGTH) < LENGTHS + 2
# Each query sees itself: KerasHub has no answer for one that sees nothing.
ATTENTION_MASK = (
    np.random.default_rng(1).random((BATCH, QUERY_LENGTH, QUERY_LENGTH)) < 0.5
) | np.eye(QUERY_LENGTH, dtype=bool)


def block_pair(name, norm_placement, *shapes):
    """KerasHub's block and ours with the same weights."""
    theirs = getattr(keras_hub.layers, name)(
        INTERMEDIATE_DIM,
        NUM_HEADS,
        activation="gelu",
        normalize_first=norm_placement == "pre",
    )
    our_class = {
        "TransformerEncoder": TransformerEncoder,
        "TransformerDecoder": TransformerDecoder,
    }[name]
    ours = our_class(
        INTERMEDIATE_DIM,
        NUM_HEADS,
        activation="gelu",
        norm_placement=norm_placement,
    )
    theirs.build(*shapes)
    ours.build(*shapes)
    randomize_weights(theirs)
    copy_from_keras(ours, theirs)
    return theirs, ours


@PLACEMENTS
def test_encoder_equals_kerashub_with_each_mask(norm_placement):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    theirs, ours = block_pair(
        "TransformerEncoder", norm_placement, inputs.shape
    )
    for masks in (
        {},
        {"padding_mask": PADDING_MASK},
        {"attention_mask": ATTENTION_MASK},
    ):
        assert_same(ours(inputs, **masks), theirs(inputs, **masks))


@PLACEMENTS
def test_decoder_equals_kerashub_with_each_mask(norm_placement):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    theirs, ours = block_pair(
        "TransformerDecoder", norm_placement, inputs.shape
    )
    assert_same(ours(inputs), theirs(inputs))
    assert_same(
        ours(inputs, padding_mask=PADDING_MASK),
        theirs(inputs, decoder_padding_mask=PADDING_MASK),
    )
    assert_same(
        ours(inputs, attention_mask=ATTENTION_MASK),
        theirs(inputs, decoder_attention_mask=ATTENTION_MASK),
    )


@PLACEMENTS
def test_cross_attention_equals_kerashub_with_each_mask(norm_placement):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    encoded = normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=1)
    theirs, ours = block_pair(
        "TransformerDecoder", norm_placement, inputs.shape, encoded.shape
    )
    assert_same(ours(inputs, encoded), theirs(inputs, encoded))
    assert_same(
        ours(
            inputs,
            encoded,
            padding_mask=PADDING_MASK,
            encoder_padding_mask=ENCODER_PADDING_MASK,
        ),
        theirs(
            inputs,
            encoded,
            decoder_padding_mask=PADDING_MASK,
            encoder_padding_mask=ENCODER_PADDING_MASK,
        ),
    )


def test_cached_steps_equal_a_whole_call_of_kerashub():
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    theirs, ours = block_pair("TransformerDecoder", "pre", inputs.shape)
    cache, outputs = ours.init_cache(BATCH, QUERY_LENGTH), []
    for step in range(QUERY_LENGTH):
        output, cache = ours.call_with_cache(inputs[:, step : step + 1], cache)
        outputs.append(to_numpy(output))
    assert_same(np.concatenate(outputs, axis=1), theirs(inputs))


def approximate_gelu(inputs):
    return keras.activations.gelu(inputs, approximate=True)


def gpt2_pair(max_length):
    """KerasHub's GPT-2 and our decoder-only model with the same weights."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY_SIZE,
        num_layers=2,
        num_heads=NUM_HEADS,
        hidden_dim=MODEL_DIM,
        intermediate_dim=INTERMEDIATE_DIM,
        max_sequence_length=max_length,
    )
    theirs = keras_hub.models.GPT2CausalLM(backbone=backbone)
    randomize_weights(theirs)
    ours = decoder_only(
        VOCABULARY_SIZE,
        num_layers=2,
        model_dim=MODEL_DIM,
        num_heads=NUM_HEADS,
        intermediate_dim=INTERMEDIATE_DIM,
        max_length=max_length,
        position="learned",
        activation=approximate_gelu,
    )
    embedding = ours.get_layer("embedding")
    embedding.position.set_weights(backbone.position_embedding.get_weights())
    (table,) = [w for w in embedding.weights if w.shape[0] == VOCABULARY_SIZE]
    table.assign(*backbone.token_embedding.get_weights())
    for index, block in enumerate(backbone.transformer_layers):
        copy_from_keras(ours.get_layer(f"decoder_{index}"), block)
    ours.get_layer("final_norm").set_weights(backbone.layer_norm.get_weights())
    return theirs, ours


def test_gpt2_gives_the_same_logits_and_the_same_text():
    length = 12
    theirs, ours = gpt2_pair(length)
    prompts = [[1, 5, 7, 11, 3], [2, 4], [6]]
    tokens, is_real = np.zeros((2, 3, length), "int32")
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        is_real[row, : len(prompt)] = 1
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    assert_same(ours(tokens), theirs(inputs))

    theirs.compile(sampler="greedy")
    expected = theirs.generate(
        {"token_ids": tokens, "padding_mask": is_real},
        max_length=length,
        stop_token_ids=None,
    )["token_ids"]
    # KerasHub fills each row; ours adds as much to each as fits the longest.
    result = generate(ours, prompts, max_new_tokens=length - len(prompts[0]))
    for row, size in enumerate(result.lengths):
        np.testing.assert_array_equal(
            result.tokens[row, :size], to_numpy(expected)[row, :size]
        )


def test_the_greedy_sampler_of_kerashub_writes_what_generate_writes():
    length, prompts = 12, np.array([[1, 5, 7], [2, 4, 6]], "int32")
    model = decoder_only(
        VOCABULARY_SIZE,
        num_layers=2,
        model_dim=MODEL_DIM,
        num_heads=NUM_HEADS,
        intermediate_dim=INTERMEDIATE_DIM,
    )
    randomize_weights(model)

    def next_token(tokens, cache, index):
        logits = model(tokens)
        return ops.take(logits, index - 1, axis=1), None, cache

    buffer = np.pad(prompts, ((0, 0), (0, length - 3)))
    expected = keras_hub.samplers.GreedySampler()(
        next=next_token,
        prompt=ops.convert_to_tensor(buffer),
        index=3,
        mask=ops.convert_to_tensor(np.arange(length) < 3 + 0 * buffer),
        model=model,
    )
    result = generate(
        model, prompts, max_new_tokens=length - 3, decoder=Greedy()
    )
    np.testing.assert_array_equal(result.tokens, to_numpy(expected))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            keras_hub.samplers.TopKSampler(k=5, temperature=1.7, seed=0),
            Sample(1.7, top_k=5),
        ),
        # KerasHub's `k` beside `p` cuts off without renormalising.
        (
            keras_hub.samplers.TopPSampler(p=0.8, temperature=0.6, seed=0),
            Sample(0.6, top_p=0.8),
        ),
        (
            keras_hub.samplers.RandomSampler(temperature=0.5, seed=0),
            Sample(0.5),
        ),
    ],
    ids=["top_k", "top_p", "all"],
)
def test_samplers_draw_from_the_same_distribution(theirs, ours):
    draws, size = 4000, 12
    logits = np.tile(normal(1, size), (draws, 1))
    expected = theirs.get_next_token(theirs.compute_probabilities(logits))
    tokens, _ = ours.choose(
        ops.convert_to_tensor(logits),
        seed=0,
        row_ids=np.arange(draws, dtype="int32"),
        positions=np.zeros(draws, "int32"),
    )
    ours, theirs = (
        np.bincount(to_numpy(drawn), minlength=size)
        for drawn in (tokens, expected)
    )
    total = ours + theirs
    assert np.count_nonzero(total) > 1
    # Homogeneity of two samples: chi-square with at most 11 degrees of
    # freedom passes 38 in one case of 10,000.
    statistic = np.sum((ours - theirs) ** 2 / np.maximum(total, 1))
    assert statistic < 38
