"""Multi-head layers under test, and what the formula says of them."""

from keras_transformer.attention import MultiHeadAttention
from tests.numerics import normal, randomize_weights, to_numpy
from tests.reference.attention import multi_head
from tests.sizes import (
    BATCH,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
)

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
VALUE_WIDTH, KEY_WIDTH, OUTPUT_DIM = 10, 14, 11
INPUTS = {"query": normal(*SHAPE, seed=1)}
CROSS = {
    **INPUTS,
    "value": normal(BATCH, KEY_LENGTH, VALUE_WIDTH, seed=2),
    "key": normal(BATCH, KEY_LENGTH, KEY_WIDTH, seed=3),
}


def built(inputs=INPUTS, **arguments):
    """A layer with random weights, built for the inputs."""
    layer = MultiHeadAttention(NUM_HEADS, **arguments)
    layer.build(*(array.shape for array in inputs.values()))
    randomize_weights(layer)
    return layer


def named_weights(layer):
    return {
        weight.path.split("/", 1)[1]: to_numpy(weight)
        for weight in layer.trainable_weights
    }


def expected(layer, inputs=INPUTS, **options):
    inputs = {"value": inputs["query"], **inputs}
    return multi_head(
        named_weights(layer), **inputs, num_heads=NUM_HEADS, **options
    )
