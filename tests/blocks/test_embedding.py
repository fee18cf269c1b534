import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._internal.decoding_scope import DecodingScope
from keras_transformer.blocks import PositionalEmbedding
from keras_transformer.positions import Learned, RoPE, Sinusoidal
from tests.layer_contract import check_layer
from tests.numerics import assert_close, randomize_weights, to_numpy
from tests.option_walk import (
    assert_complete,
    cases,
    check_option,
    layer_again,
)
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH, VOCABULARY_SIZE

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0], [3, 28, 0, 0, 0]], "int32")
SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
BASE = {"vocabulary_size": VOCABULARY_SIZE, "model_dim": MODEL_DIM}


def sinusoid(positions):
    positions = np.asarray(positions, "float64")[..., None]
    feature = np.arange(MODEL_DIM)
    angles = positions / 10000 ** (2 * (feature // 2) / MODEL_DIM)
    return np.where(feature % 2, np.cos(angles), np.sin(angles))


def built(**options):
    layer = PositionalEmbedding(**BASE, **options)
    layer.build((None, None))
    randomize_weights(layer)
    return layer, to_numpy(layer._embedding.embeddings)


@pytest.mark.parametrize(
    ("options", "num_weights"),
    [
        ({"scale": True, "dropout": 0.1, "seed": 3}, 1),
        ({"position": "learned", "max_length": 9, "mask_zero": True}, 2),
        ({"position": None, "embeddings_initializer": "normal"}, 1),
    ],
)
def test_keeps_the_layer_contract(options, num_weights):
    check_layer(
        PositionalEmbedding,
        {**BASE, **options},
        {"inputs": IDS},
        output_shape=SHAPE,
        num_weights=num_weights,
    )


def test_adds_sinusoids_to_scaled_rows_of_the_table():
    layer, table = built(scale=True)
    expected = table[IDS] * np.sqrt(MODEL_DIM) + sinusoid(
        np.arange(QUERY_LENGTH)
    )
    assert_close(layer(IDS), expected)


def test_equals_one_hot_times_the_table():
    layer, table = built(position=None)
    assert_close(layer(IDS), np.eye(VOCABULARY_SIZE)[IDS] @ table)


def test_adds_learned_positions():
    layer, table = built(position="learned", max_length=9)
    rows = to_numpy(layer.position.embeddings)
    assert rows.shape == (9, MODEL_DIM)
    assert_close(layer(IDS), table[IDS] + rows[:QUERY_LENGTH])


def test_takes_positions_that_are_not_slots():
    layer, table = built()
    positions = np.array([[0, 1, 0, 1, 2]] * BATCH, "int32")
    assert_close(
        layer(IDS, positions=positions), table[IDS] + sinusoid(positions)
    )
    assert_close(
        layer(IDS, positions=positions[0]), table[IDS] + sinusoid(positions)
    )


def test_reads_the_slots_of_a_decoding_step():
    layer, table = built()
    slots = ops.convert_to_tensor(np.array([[4], [7], [-1]], "int32"))
    with DecodingScope(slots, {}):
        outputs = layer(IDS[:, :1])
    expected = table[IDS[:, :1]] + sinusoid([[4], [7], [0]])
    # A token in slot -1 does not exist; its output only has to be finite.
    assert_close(outputs[:2], expected[:2])
    assert np.isfinite(to_numpy(outputs)).all()


def max_length_raises(plain, changed, inputs):
    plain(*inputs)
    with pytest.raises(ValueError, match="max_length=4"):
        changed(*inputs)


def mask_appears(plain, changed, inputs):
    assert getattr(plain(*inputs), "_keras_mask", None) is None
    mask = changed(*inputs)._keras_mask
    np.testing.assert_array_equal(to_numpy(mask), IDS != 0)


OPTIONS = {
    "vocabulary_size": (31, "weights"),
    "model_dim": (12, "weights"),
    "max_length": (4, max_length_raises),
    "position": (None, "outputs"),
    "scale": (True, "outputs"),
    "mask_zero": (True, mask_appears),
    "dropout": (0.5, "training"),
    "embeddings_initializer": ("ones", "initial"),
    "seed": (5, "training", {"dropout": 0.5, "seed": 4}),
}


def test_the_table_of_options_is_complete():
    assert_complete(PositionalEmbedding.__init__, OPTIONS)


@cases({name: 0 for name in OPTIONS if name != "max_length"})
def test_each_option_acts_and_survives(name):
    check_option(
        PositionalEmbedding,
        BASE,
        OPTIONS[name],
        name,
        (IDS,),
        layer_again((IDS,)),
    )


@pytest.mark.parametrize(
    "options",
    [{"max_length": 4}, {"position": Learned(4)}],
)
def test_a_call_longer_than_max_length_raises_also_symbolically(options):
    layer = PositionalEmbedding(**BASE, **options)
    message = r"at most max_length=4 tokens a row.*5.*larger `max_length`"
    with pytest.raises(ValueError, match=message):
        layer(IDS)
    with pytest.raises(ValueError, match=message):
        layer(keras.Input((5,), dtype="int32"))
    assert layer(keras.Input((None,), dtype="int32")).shape[1] is None
    assert layer(IDS[:, :4]).shape[1] == 4
    copy = PositionalEmbedding.from_config(layer.get_config())
    with pytest.raises(ValueError, match=message):
        copy(IDS)


def test_learned_positions_beyond_the_table_raise():
    layer = PositionalEmbedding(**BASE, position="learned", max_length=9)
    with pytest.raises(ValueError, match=r"`positions` must be in 0 \.\.\. 8"):
        layer(IDS, positions=np.arange(5, 10, dtype="int32"))


def test_gives_its_table_as_a_tensor():
    layer, table = built(mask_zero=True)
    given = layer(IDS, table=True)
    assert_close(given, table)
    symbolic = layer(keras.Input((None,), dtype="int32"), table=True)
    assert symbolic.shape == (VOCABULARY_SIZE, MODEL_DIM)


def test_a_quantised_table_is_near_the_exact_one():
    layer, table = built(position=None)
    layer._embedding.quantize("int8")
    assert_close(layer(IDS), table[IDS], scale=1000)
    looked_up = to_numpy(layer(IDS, table=True))[IDS]
    assert_close(looked_up, to_numpy(layer(IDS)))


def test_two_embedders_with_one_initializer_start_apart():
    initializer = keras.initializers.RandomNormal(seed=1)
    first, second = (
        PositionalEmbedding(
            **BASE, embeddings_initializer=initializer, name=name
        )
        for name in ("one", "two")
    )
    assert not np.allclose(to_numpy(first(IDS)), to_numpy(second(IDS)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positions_are_exact_before_they_are_rounded(dtype):
    layer = PositionalEmbedding(
        **BASE, embeddings_initializer="zeros", dtype=f"mixed_{dtype}"
    )
    positions = np.array([0, 1, 999, 9999, 100000], "int32")
    outputs = layer(IDS, positions=positions)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = np.broadcast_to(sinusoid(positions), SHAPE)
    assert_close(ops.cast(outputs, "float32"), expected, dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 0}, "`vocabulary_size` must be a positive int"),
        ({"model_dim": 2.5}, "`model_dim` must be a positive integer"),
        ({"max_length": 0}, "`max_length` must be a positive integer or None"),
        ({"position": "rope"}, "must act on embeddings.*give it to the blo"),
        ({"position": RoPE()}, "must act on embeddings.*RoPE"),
        ({"position": "learned"}, "`max_length` must be given.*Learned"),
        ({"position": "polar"}, "`position` must be.*'polar'"),
        ({"scale": 1}, "`scale` must be True or False"),
        ({"mask_zero": None}, "`mask_zero` must be True or False"),
        ({"dropout": 1.0}, r"`dropout` must be a rate in \[0, 1\)"),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        PositionalEmbedding(**{**BASE, **arguments})


def test_rejects_inputs_without_a_batch():
    layer = PositionalEmbedding(**BASE)
    message = r"`inputs` must have shape \(batch, length\).*\(5,\)"
    with pytest.raises(ValueError, match=message):
        layer(IDS[0])


def test_an_odd_width_has_no_sinusoids():
    layer = PositionalEmbedding(VOCABULARY_SIZE, 7, position=Sinusoidal())
    with pytest.raises(ValueError, match="`dim` must be even"):
        layer(IDS)
