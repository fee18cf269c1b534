import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.blocks import PositionalEmbedding, Unembedding
from tests.layer_contract import check_layer
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.option_walk import (
    assert_complete,
    cases,
    check_option,
    layer_again,
)
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH, VOCABULARY_SIZE

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
INPUTS = normal(*SHAPE)
TABLE = normal(VOCABULARY_SIZE, MODEL_DIM, seed=1)
LOGITS = (BATCH, QUERY_LENGTH, VOCABULARY_SIZE)
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 28, 0, 0, 0]], "int32")


def built(**options):
    layer = Unembedding(vocabulary_size=VOCABULARY_SIZE, **options)
    layer.build(SHAPE)
    randomize_weights(layer)
    return layer


def tied_model():
    """Tokens to logits: embedder, norm, tied de-embedding."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    stream = keras.layers.LayerNormalization()(embedding(token_ids))
    model = keras.Model(
        token_ids, Unembedding(embedding, use_bias=True)(stream)
    )
    randomize_weights(model)
    return model


def test_keeps_the_layer_contract():
    check_layer(
        Unembedding,
        {
            "vocabulary_size": VOCABULARY_SIZE,
            "use_bias": True,
            "soft_cap": 3.0,
            "kernel_initializer": "he_normal",
        },
        {"inputs": INPUTS},
        output_shape=LOGITS,
        num_weights=2,
    )


def test_a_tied_layer_takes_its_table_as_an_input():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    config = Unembedding(embedding, soft_cap=2.0).get_config()
    layer = Unembedding.from_config(json.loads(json.dumps(config)))
    assert layer.get_config() == config
    logits = layer(
        keras.KerasTensor((None, None, MODEL_DIM)),
        keras.KerasTensor(TABLE.shape),
    )
    assert logits.shape == (None, None, VOCABULARY_SIZE)
    expected = 2 * np.tanh(INPUTS.astype("float64") @ TABLE.T / 2)
    assert_close(layer(INPUTS, TABLE), expected)


def test_projects_with_a_kernel_of_its_own():
    layer = built(use_bias=True, soft_cap=2.0)
    kernel, bias = (w.astype("float64") for w in layer.get_weights())
    logits = 2 * np.tanh((INPUTS.astype("float64") @ kernel + bias) / 2)
    assert_close(layer(INPUTS), logits)


def test_a_tied_layer_projects_with_the_table():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    layer = Unembedding(embedding)
    logits = layer(INPUTS)
    table = to_numpy(embedding._embedding.embeddings)
    assert_close(logits, INPUTS.astype("float64") @ table.T)
    # The table is the embedding's weight; here it is not counted again.
    assert layer.weights == []


def test_follows_the_embedding_when_it_changes():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    layer = Unembedding(embedding)
    layer(INPUTS)
    embedding._embedding.embeddings.assign(TABLE)
    assert_close(layer(INPUTS), INPUTS.astype("float64") @ TABLE.T)


OPTIONS = {
    "vocabulary_size": (31, "weights"),
    "use_bias": (True, "weights"),
    "soft_cap": (0.5, "outputs"),
    "kernel_initializer": ("ones", "initial"),
}


def test_the_table_of_options_is_complete():
    # `embedding` excludes `vocabulary_size` and has tests of its own.
    assert_complete(Unembedding.__init__, {**OPTIONS, "embedding": None})


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    check_option(
        Unembedding,
        {"vocabulary_size": VOCABULARY_SIZE},
        OPTIONS[name],
        name,
        (INPUTS,),
        layer_again((INPUTS,)),
    )


def saved_and_loaded(model, folder):
    path = folder / "model.keras"
    model.save(path)
    return keras.models.load_model(path)


COPIES = {
    "saved": saved_and_loaded,
    "cloned": lambda model, _: keras.models.clone_model(model),
    "rebuilt": lambda model, _: keras.Model.from_config(model.get_config()),
}


@pytest.mark.parametrize("copy", list(COPIES))
def test_a_tie_survives(copy, tmp_path):
    model = tied_model()
    again = COPIES[copy](model, tmp_path)
    assert len(again.weights) == len(model.weights) == 4
    if copy == "saved":
        assert_close(again(IDS), to_numpy(model(IDS)))
    again.set_weights(model.get_weights())
    assert_close(again(IDS), to_numpy(model(IDS)))
    # One training step moves both uses of the one table.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    again.compile(keras.optimizers.SGD(0.5), loss)
    table = again.layers[1]._embedding.embeddings
    before = to_numpy(table)
    again.fit(IDS, IDS, verbose=0)
    assert not np.allclose(to_numpy(table), before)
    # Row 20 is no input here: it moves only as a row of the output's table.
    assert not np.allclose(to_numpy(table)[20], before[20])
    stream = keras.Model(again.input, again.layers[2].output)(IDS)
    bias = to_numpy(again.layers[3]._bias)
    assert_close(again(IDS), to_numpy(stream) @ to_numpy(table).T + bias)
    # The copy and the model are two.
    assert not np.allclose(to_numpy(again(IDS)), to_numpy(model(IDS)))


def test_passes_the_mask_of_the_inputs_on():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, mask_zero=True)
    logits = Unembedding(embedding)(embedding(IDS))
    np.testing.assert_array_equal(to_numpy(logits._keras_mask), IDS != 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_half_precision_is_near_the_formula(is_tied, dtype):
    dtype_policy = f"mixed_{dtype}"
    if is_tied:
        embedding = PositionalEmbedding(
            VOCABULARY_SIZE, MODEL_DIM, dtype=dtype_policy
        )
        layer = Unembedding(embedding, dtype=dtype_policy)
        embedding.build((None, None))
        embedding._embedding.embeddings.assign(TABLE)
    else:
        layer = built(dtype=dtype_policy)
        layer.set_weights([TABLE.T])
    logits = layer(INPUTS)
    assert keras.backend.standardize_dtype(logits.dtype) == dtype
    expected = INPUTS.astype("float64") @ TABLE.T
    assert_close(ops.cast(logits, "float32"), expected, dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `embedding`.*and `vocabulary_size`"),
        (
            {"embedding": "tied", "vocabulary_size": 3},
            "Exactly one of `embedding`.*Received: embedding='tied'",
        ),
        ({"embedding": 5}, "must be a PositionalEmbedding or None.*kernel of"),
        ({"vocabulary_size": 0}, "`vocabulary_size` must be a positive int"),
        ({"vocabulary_size": 3, "use_bias": 1}, "`use_bias` must be True or"),
        ({"vocabulary_size": 3, "soft_cap": 0}, "`soft_cap` must be a finite"),
        (
            {"embedding": "tied", "kernel_initializer": "ones"},
            "`kernel_initializer` must be None for a tied.*embeddings_init",
        ),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Unembedding(**arguments)


def test_a_tied_layer_from_a_configuration_asks_for_its_table():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM)
    config = Unembedding(embedding).get_config()
    layer = Unembedding.from_config(config)
    with pytest.raises(ValueError, match=r"has no table.*layer\(inputs, table"):
        layer(INPUTS)


def test_rejects_inputs_of_another_width():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM + 1)
    with pytest.raises(ValueError, match="as wide as the tied table, 25"):
        Unembedding(embedding)(INPUTS)
