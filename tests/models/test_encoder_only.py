import functools

import keras
import numpy as np
import pytest

from keras_transformer.masks import Causal, Documents
from keras_transformer.models import encoder_only
from keras_transformer.models.pooling import MeanPooling
from tests.layer_contract import check_layer
from tests.models.checks import (
    DTYPE_OPTION,
    MODEL_OPTIONS,
    NAME_OPTION,
    arguments,
    copies_of,
    layer_names,
    steps_lower_the_loss,
)
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.option_walk import (
    assert_complete,
    cases,
    check_option,
    model_again,
)
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH, VOCABULARY_SIZE

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 28, 0, 0, 0]], "int32")
PADDING = np.arange(5) < np.array([[5], [3], [1]])
BASE = arguments(max_length=9)
PADDED = ("token_ids", "padding_mask")
CLASSIFIER = {"head": "classification", "num_classes": 3}


@functools.cache
def model(**options):
    made = encoder_only(**BASE, inputs=PADDED, **options)
    randomize_weights(made, scale=0.2)
    return made


def outputs(made, ids=IDS):
    return to_numpy(made({"token_ids": ids, "padding_mask": PADDING}))


@pytest.mark.parametrize(
    ("options", "shape", "tail"),
    [
        ({}, (None, None, MODEL_DIM), []),
        (
            {"head": "masked_token"},
            (None, None, VOCABULARY_SIZE),
            ["token_transform", "token_norm", "unembedding"],
        ),
        (CLASSIFIER, (None, 3), ["pooling", "classes"]),
    ],
)
def test_ends_as_its_head_says(options, shape, tail):
    made = model(**options)
    assert made.output_shape == shape
    assert layer_names(made) == [
        "embedding",
        "encoder_0",
        "encoder_1",
        "final_norm",
        *tail,
    ]


@pytest.mark.parametrize("options", [{}, CLASSIFIER])
def test_pads_change_nothing_else(options):
    changed = np.where(PADDING, IDS, 7)
    before, after = (outputs(model(**options), ids) for ids in (IDS, changed))
    if not options:
        before, after = before[PADDING], after[PADDING]
    np.testing.assert_array_equal(after, before)


def test_a_row_is_what_it_is_alone():
    alone = model()(
        {"token_ids": IDS[1:2, :3], "padding_mask": PADDING[1:2, :3]}
    )
    assert_close(alone, outputs(model())[1:2, :3])


def test_the_masked_token_head_follows_its_formula():
    made = model(head="masked_token")
    hidden = keras.Model(made.input, made.get_layer("final_norm").output)
    dense = made.get_layer("token_transform")
    stream = dense(outputs(hidden).astype("float32"))
    stream = to_numpy(made.get_layer("token_norm")(stream))
    table = to_numpy(made.get_layer("embedding")._embedding.embeddings)
    bias = to_numpy(made.get_layer("unembedding")._bias)
    assert_close(outputs(made), stream @ table.T + bias)
    assert dense.activation is keras.activations.gelu


def test_the_classifier_reads_the_mean_of_the_real_tokens():
    made = model(**CLASSIFIER)
    hidden = keras.Model(made.input, made.get_layer("final_norm").output)
    states, real = outputs(hidden), PADDING[..., None]
    means = (states * real).sum(1) / real.sum(1)
    kernel, bias = made.get_layer("classes").get_weights()
    assert_close(outputs(made), means @ kernel + bias)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({"head": "masked_token"}, IDS),
        (CLASSIFIER, np.array([0, 2, 1])),
    ],
)
def test_one_step_of_fit_lowers_the_loss(options, targets):
    made = encoder_only(**BASE, inputs=PADDED, **options)
    inputs = {"token_ids": IDS, "padding_mask": PADDING}
    steps_lower_the_loss(made, inputs, targets)


@pytest.mark.parametrize("copy", ["saved", "cloned", "rebuilt"])
def test_a_tied_head_survives(copy, tmp_path):
    made = model(head="masked_token")
    for again in copies_of(made, copy, tmp_path):
        assert len(again.weights) == len(made.weights)
        again.set_weights(made.get_weights())
        assert_close(outputs(again), outputs(made))


OPTIONS = {
    **MODEL_OPTIONS,
    "max_length": (12, "weights"),
    "head": ("masked_token", "weights"),
    "num_classes": (
        4,
        "weights",
        {"head": "classification", "num_classes": 3},
    ),
    "mask": (Causal(), "outputs"),
    "position": (None, "weights"),
    "dtype": DTYPE_OPTION,
    "name": NAME_OPTION,
}


def test_the_table_of_options_is_complete():
    assert_complete(encoder_only, {**OPTIONS, "inputs": None})


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    check_option(
        encoder_only,
        arguments(num_layers=1, max_length=9),
        OPTIONS[name],
        name,
        (IDS,),
        model_again,
    )


def test_packed_documents_are_each_alone():
    made = encoder_only(
        **BASE,
        mask=Documents(),
        inputs=("token_ids", "segment_ids", "positions"),
    )
    randomize_weights(made, scale=0.2)
    segments = np.array([[0, 0, 1, 1, 1]] * 3, "int32")
    positions = np.array([[0, 1, 0, 1, 2]] * 3, "int32")

    def states(part):
        names = ("token_ids", "segment_ids", "positions")
        arrays = (IDS, segments, positions)
        return to_numpy(
            made({n: a[:, part] for n, a in zip(names, arrays, strict=True)})
        )

    packed = states(slice(None))
    assert_close(packed[:, :2], states(slice(0, 2)))
    assert_close(packed[:, 2:], states(slice(2, 5)))


def test_mean_pooling_keeps_the_layer_contract():
    check_layer(
        MeanPooling,
        {},
        {
            "inputs": normal(BATCH, QUERY_LENGTH, MODEL_DIM),
            "padding_mask": PADDING,
        },
        output_shape=(BATCH, MODEL_DIM),
        num_weights=0,
    )


def test_mean_pooling_of_a_row_without_tokens_is_zero():
    inputs = normal(2, QUERY_LENGTH, MODEL_DIM)
    padding = np.array([[False] * 5, [True, False, False, False, False]])
    pooled = to_numpy(MeanPooling()(inputs, padding_mask=padding))
    assert (pooled[0] == 0).all()
    np.testing.assert_allclose(pooled[1], inputs[1, 0], rtol=1e-6)


def test_mean_pooling_does_not_overflow_in_half_precision():
    inputs = np.full((1, 200, 2), 1000, "float32")
    pooled = MeanPooling(dtype="mixed_float16")(inputs)
    assert (to_numpy(keras.ops.cast(pooled, "float32")) == 1000).all()


def test_mean_pooling_reads_the_implicit_mask():
    embedding = keras.layers.Embedding(30, 4, mask_zero=True)
    states = embedding(IDS)
    pooled = to_numpy(MeanPooling()(states))
    assert_close(pooled[2], to_numpy(states)[2, :2].mean(axis=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "tagging"}, r"`head` must be one of.*'masked_token'"),
        ({"head": "classification"}, "`num_classes` must be given with head"),
        ({"num_classes": 3}, "`num_classes` must be given with head=.*=3"),
        (
            {"head": "classification", "num_classes": 0},
            "`num_classes` must be a positive integer",
        ),
        ({"max_length": None}, "`max_length` must be given"),
        ({"num_layers": 1.5}, "`num_layers` must be a positive integer"),
        ({"inputs": ("token_ids", "segment_ids")}, "Add `Documents"),
    ],
)
def test_rejects_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        encoder_only(**{**BASE, **options})


def test_refuses_a_mask_without_the_input_that_it_reads():
    with pytest.raises(ValueError, match="hold 'segment_ids'"):
        encoder_only(29, 1, 24, 4, 10, 8, mask=Documents())
