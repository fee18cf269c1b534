import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.positions import Learned
from tests.layer_contract import check_layer
from tests.numerics import gradients, normal, to_numpy
from tests.positions.compiling import compiled
from tests.sizes import BATCH, MODEL_DIM, QUERY_LENGTH

MAX_LENGTH = 6
INPUTS = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
POSITIONS = np.array([[0, 1, 2, 3, 4], [5, 4, 3, 0, 0], [1, 0, 1, 0, 1]])


def learned(**kwargs):
    layer = Learned(MAX_LENGTH, **kwargs)
    layer.build(INPUTS.shape)
    return layer, to_numpy(layer.embeddings)


def test_keeps_the_layer_contract():
    check_layer(
        Learned,
        {"max_length": MAX_LENGTH, "initializer": "glorot_uniform"},
        {"inputs": INPUTS, "positions": POSITIONS.astype("int32")},
        output_shape=INPUTS.shape,
        num_weights=1,
    )


def test_gives_the_row_of_each_position():
    layer, table = learned()
    rows = to_numpy(layer(INPUTS, positions=POSITIONS))
    np.testing.assert_array_equal(rows, table[POSITIONS])
    rows = to_numpy(layer(INPUTS, positions=POSITIONS[1]))
    np.testing.assert_array_equal(rows, table[POSITIONS[1]])
    rows = to_numpy(layer(INPUTS))
    np.testing.assert_array_equal(rows, table[:QUERY_LENGTH])


def test_initializer_sets_the_table():
    _, table = learned(initializer=keras.initializers.Constant(0.5))
    assert (table == 0.5).all()
    layer = Learned(400)
    layer.build((None, None, 100))
    assert abs(to_numpy(layer.embeddings).std() - 0.02) < 1e-3


def test_unused_rows_get_no_gradient():
    layer, table = learned()

    def total(table):
        rows, _ = layer.stateless_call(
            [table], [], INPUTS, positions=POSITIONS[2]
        )
        return ops.sum(rows)

    (gradient,) = gradients(total, table.astype("float32"))
    counts = np.bincount(POSITIONS[2], minlength=MAX_LENGTH)
    np.testing.assert_allclose(gradient, counts[:, None] * np.ones(MODEL_DIM))


def test_packed_rows_may_be_longer_than_the_table():
    layer = Learned(3)
    rows = layer(INPUTS, positions=[0, 1, 2, 0, 1])
    table = to_numpy(layer.embeddings)
    np.testing.assert_array_equal(to_numpy(rows), table[[0, 1, 2, 0, 1]])


def test_compiled_positions_outside_get_zeros_not_the_last_row():
    layer, table = learned()
    function = compiled(lambda positions: layer(INPUTS, positions=positions))
    positions = ops.convert_to_tensor(np.array([0, 5, 6, -1, 10**6], "int32"))
    if keras.backend.backend() == "torch":
        # Nothing is traced there: the values are seen and refused.
        with pytest.raises(ValueError, match=r"`positions` must be in 0"):
            function(positions)
        return
    rows = to_numpy(function(positions))
    np.testing.assert_array_equal(rows[:2], table[[0, 5]])
    assert (rows[2:] == 0).all()


def test_default_policy_leaves_half_precision_inputs():
    layer, _ = learned()
    rows = layer(ops.cast(INPUTS, "bfloat16"))
    assert keras.backend.standardize_dtype(rows.dtype) == "bfloat16"


def test_rejects_a_length_beyond_the_table():
    with pytest.raises(ValueError, match=r"`length` must be at most.*length=5"):
        Learned(4)(INPUTS)


def test_rejects_a_length_beyond_the_table_when_a_model_is_made():
    with pytest.raises(ValueError, match=r"`length` must be at most.*length=5"):
        Learned(4)(keras.Input((QUERY_LENGTH, MODEL_DIM)))


@pytest.mark.parametrize("position", [MAX_LENGTH, -1])
def test_rejects_a_position_outside_the_table(position):
    layer, _ = learned()
    with pytest.raises(ValueError, match=r"`positions` must be in 0 ... 5"):
        layer(INPUTS, positions=[0, 1, 2, 3, position])


def test_rejects_an_empty_table():
    with pytest.raises(ValueError, match=r"`max_length` must be a positive"):
        Learned(0)
