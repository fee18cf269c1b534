import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from tests.attention.layers import (
    KEY_WIDTH,
    VALUE_WIDTH,
    built,
    expected,
)
from tests.numerics import assert_close, randomize_weights, to_numpy
from tests.sizes import BATCH, KEY_LENGTH, MODEL_DIM, NUM_HEADS, QUERY_LENGTH

SLOTS = np.arange(QUERY_LENGTH)
ALLOWED = np.tri(QUERY_LENGTH, dtype=bool)
# 0 is padding.
IDS = np.array([[3, 1, 4, 0, 0], [2, 5, 1, 1, 0], [0, 2, 2, 2, 2]])
OTHER_IDS = np.array([[1, 1, 0, 0, 0, 0, 0], [1] * 7, [2, 0, 1, 0, 0, 0, 0]])
MORE = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 0, 1, 1]], bool)


def embedded(ids, width, seed):
    """A tensor with the mask that an embedding attaches."""
    layer = keras.layers.Embedding(6, width, mask_zero=True)
    layer.build()
    randomize_weights(layer, seed)
    return layer(ops.convert_to_tensor(ids, "int32"))


SELF_FORMS = {
    "alone": lambda layer, x, **rest: layer(x, **rest),
    "twice": lambda layer, x, **rest: layer(x, x, **rest),
    "three times": lambda layer, x, **rest: layer(x, x, key=x, **rest),
    "by name": lambda layer, x, **rest: layer(query=x, value=x, **rest),
}
EXTRA = {
    "nothing": {},
    "padding": {"padding_mask": MORE},
    "attention mask": {
        "attention_mask": np.broadcast_to(ALLOWED, (BATCH, 5, 5))
    },
    "scores": {"return_attention_scores": True},
}


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("form", SELF_FORMS)
def test_self_attention_sees_the_mask_that_keras_carries(form, extra):
    layer = built()
    inputs = embedded(IDS, MODEL_DIM, 1)
    carried = inputs._keras_mask
    outputs = SELF_FORMS[form](layer, inputs, **EXTRA[extra])
    if extra == "scores":
        outputs, scores = outputs
        hidden = np.broadcast_to((IDS == 0)[:, None, None], scores.shape)
        assert (to_numpy(scores)[hidden] == 0).all()
    allowed = (IDS != 0)[:, None, None]
    if extra == "padding":
        allowed = allowed & MORE[:, None, None]
    if extra == "attention mask":
        allowed = allowed & ALLOWED
    query = to_numpy(inputs)
    assert_close(outputs, expected(layer, {"query": query}, allowed=allowed)[0])
    # The caller's mask is where and what it was, and goes on.
    assert inputs._keras_mask is carried
    np.testing.assert_array_equal(to_numpy(carried), IDS != 0)
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), IDS != 0)


@pytest.mark.parametrize("masked_query", [True, False])
@pytest.mark.parametrize("extra", [None, "padding_mask", "value_mask"])
def test_cross_attention_sees_the_mask_of_its_keys_alone(extra, masked_query):
    query = embedded(IDS, MODEL_DIM, 1)
    if not masked_query:
        query = ops.convert_to_tensor(to_numpy(query), "float32")
    value = embedded(OTHER_IDS, VALUE_WIDTH, 2)
    carried = value._keras_mask
    shapes = {"query": query, "value": value}
    layer = built(shapes)
    more = np.arange(KEY_LENGTH)[None] % 3 != np.array([[0], [1], [1]])
    outputs = layer(
        query, value=value, **({} if extra is None else {extra: more})
    )
    visible = more if extra == "value_mask" else OTHER_IDS != 0
    if extra == "padding_mask":
        visible = visible & more
    inputs = {"query": to_numpy(query), "value": to_numpy(value)}
    assert_close(
        outputs, expected(layer, inputs, allowed=visible[:, None, None])[0]
    )
    assert value._keras_mask is carried
    if masked_query:
        np.testing.assert_array_equal(to_numpy(outputs._keras_mask), IDS != 0)
    else:
        assert getattr(outputs, "_keras_mask", None) is None


def test_a_key_that_differs_from_the_value_brings_its_own_mask():
    query = embedded(IDS, MODEL_DIM, 1)
    value = embedded(OTHER_IDS, VALUE_WIDTH, 2)
    key_ids = OTHER_IDS[:, ::-1] + (np.arange(KEY_LENGTH) < 3)
    key = embedded(key_ids, KEY_WIDTH, 3)
    inputs = {"query": query, "value": value, "key": key}
    layer = built(inputs)
    inputs = {name: to_numpy(x) for name, x in inputs.items()}
    visible = (OTHER_IDS != 0) & (key_ids != 0)
    outputs, _ = expected(layer, inputs, allowed=visible[:, None, None])
    assert_close(layer(query, value, key), outputs)


def test_a_functional_model_carries_the_mask_to_the_keys():
    tokens = keras.Input((None,), dtype="int32")
    others = keras.Input((None,), dtype="int32")
    embedding = keras.layers.Embedding(6, MODEL_DIM, mask_zero=True)
    layer, cross = MultiHeadAttention(NUM_HEADS), MultiHeadAttention(NUM_HEADS)
    hidden = layer(embedding(tokens))
    model = keras.Model(
        [tokens, others], [hidden, cross(hidden, embedding(others))]
    )
    randomize_weights(model)
    table = to_numpy(embedding.embeddings)
    first, _ = expected(
        layer, {"query": table[IDS]}, allowed=(IDS != 0)[:, None, None]
    )
    second, _ = expected(
        cross,
        {"query": first, "value": table[OTHER_IDS]},
        allowed=(OTHER_IDS != 0)[:, None, None],
    )
    found = model([IDS.astype("int32"), OTHER_IDS.astype("int32")])
    assert_close(found[0], first)
    assert_close(found[1], second)
