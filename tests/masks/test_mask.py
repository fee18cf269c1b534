import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.masks import (
    And,
    BlockSparse,
    Causal,
    Documents,
    Explicit,
    Full,
    Global,
    Mask,
    MaskData,
    Padding,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from tests.numerics import to_numpy
from tests.sizes import BATCH, KEY_LENGTH, NUM_HEADS, QUERY_LENGTH

TREE = Causal() & (
    PerHead([SlidingWindow(2), ~Strided(2), Full(), Prefix()]) | Documents()
)
TREE &= ~BlockSparse([[0, 1], [1, 0]], 3) | Explicit(np.eye(6))


def compiled(function):
    """The function under the backend's compiler, where it has one here."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(function)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return function


def tensors():
    random = np.random.default_rng(0)
    return [
        ops.convert_to_tensor(array)
        for array in (
            random.integers(0, 9, (BATCH, QUERY_LENGTH)).astype("int32"),
            random.integers(-1, 9, (BATCH, KEY_LENGTH)).astype("int32"),
            random.random((BATCH, KEY_LENGTH)) < 0.7,
            random.integers(0, 2, (BATCH, QUERY_LENGTH)).astype("int32"),
            random.integers(0, 2, (BATCH, KEY_LENGTH)).astype("int32"),
            random.integers(0, 5, (BATCH,)).astype("int32"),
        )
    ]


def evaluate(query_slots, key_slots, *data):
    return TREE.evaluate(query_slots, key_slots, MaskData(*data))


@keras.saving.register_keras_serializable("masks_test")
class Reader(keras.layers.Layer):
    """A layer that evaluates a mask on what it is called with."""

    def __init__(self, mask, **kwargs):
        super().__init__(**kwargs)
        self.mask = mask

    def call(self, inputs):
        query_slots, key_slots, *data = inputs
        return self.mask.evaluate(query_slots, key_slots, MaskData(*data))

    def get_config(self):
        mask = keras.saving.serialize_keras_object(self.mask)
        return {**super().get_config(), "mask": mask}

    @classmethod
    def from_config(cls, config):
        mask = keras.saving.deserialize_keras_object(config.pop("mask"))
        return cls(mask, **config)


def test_compiles_to_the_same_mask():
    expected = to_numpy(evaluate(*tensors()))
    assert expected.shape == (BATCH, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH)
    assert expected.any()
    actual = compiled(evaluate)(*tensors())
    np.testing.assert_array_equal(to_numpy(actual), expected)


def test_works_in_a_saved_model_with_unknown_batch_and_lengths(tmp_path):
    dtypes = ["int32", "int32", "bool", "int32", "int32"]
    inputs = [keras.Input((None,), dtype=dtype) for dtype in dtypes]
    inputs.append(keras.Input((), dtype="int32"))
    model = keras.Model(inputs, Reader(TREE)(inputs))
    assert model.output_shape == (None, NUM_HEADS, None, None)
    model.save(tmp_path / "model.keras")
    copied = keras.saving.load_model(tmp_path / "model.keras")
    assert copied.layers[-1].mask == TREE
    expected = to_numpy(evaluate(*tensors()))
    np.testing.assert_array_equal(to_numpy(model(tensors())), expected)
    np.testing.assert_array_equal(to_numpy(copied(tensors())), expected)


def test_static_slots_make_a_constant():
    slots = np.arange(4)
    for mask in (Causal(), PerHead([Full(), Causal()]), ~Strided(2)):
        assert isinstance(mask.evaluate(slots, slots), np.ndarray)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (Full(), (1, 1)),
        (Causal(), (QUERY_LENGTH, KEY_LENGTH)),
        (Prefix(2), (1, KEY_LENGTH)),
        (Padding(), (BATCH, 1, 1, KEY_LENGTH)),
        (PerHead([Full(), Causal()]), (2, QUERY_LENGTH, KEY_LENGTH)),
    ],
)
def test_evaluates_to_the_smallest_shape_that_broadcasts(mask, shape):
    data = MaskData()
    if mask.data_names:
        data = MaskData(padding_mask=np.ones((BATCH, KEY_LENGTH)))
    q, k = np.arange(QUERY_LENGTH), np.arange(KEY_LENGTH)
    assert mask.evaluate(q, k, data).shape == shape


def test_dense_has_all_queries_and_keys_and_the_smallest_rank():
    assert Full().dense(5).shape == (5, 5)
    assert Prefix(2).dense(5, 7).shape == (5, 7)
    assert PerHead([Full(), Causal()]).dense(5, 7).shape == (2, 5, 7)
    assert Prefix().dense(5, 7, prefix_length=[1, 2]).shape == (2, 1, 5, 7)
    assert Prefix().dense(5, 7, prefix_length=2).shape == (5, 7)
    assert Full().dense(0).shape == (0, 0)
    assert to_numpy(Full().dense(2)).dtype == bool


def test_a_decode_step_reads_slots_and_not_shapes():
    # A ring cache of four that has wrapped round once, one row a step behind.
    keys = np.array([[4, 5, 2, 3], [4, 1, 2, 3], [0, -1, -1, -1]])
    step = Causal().dense(query_slots=[[5], [4], [0]], key_slots=keys)
    expected = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    np.testing.assert_array_equal(to_numpy(step)[:, 0, 0], expected)
    near = SlidingWindow(2).dense(query_slots=[[5], [4], [0]], key_slots=keys)
    expected = [[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0]]
    np.testing.assert_array_equal(to_numpy(near)[:, 0, 0], expected)


def test_empty_slots_and_padding_are_hidden_under_every_operator():
    padding = [[True, False, True]]
    for mask in (~Causal() | Causal(), ~~Full(), Full(), ~Explicit([[0]])):
        dense = mask.dense(
            query_slots=[3], key_slots=[0, 1, -1], padding_mask=padding
        )
        np.testing.assert_array_equal(to_numpy(dense).ravel(), [1, 0, 0])


def test_queries_that_do_not_exist_do_no_harm():
    slots = np.array([-1, -7, 0])
    for static in (True, False):
        queries = slots if static else ops.convert_to_tensor(slots)
        ids = np.zeros((1, 3), "int32")
        data = MaskData(np.ones((1, 2)), ids, ids[:, :2], 1)
        TREE.evaluate(queries, np.array([0, 2]), data)


def test_names_the_data_it_reads():
    assert Causal().data_names == frozenset()
    assert Prefix(3).data_names == frozenset()
    assert TREE.data_names == {"prefix_length", "segment_ids"}
    assert (Causal() & Padding()).data_names == {"padding_mask"}


def test_tells_what_kernels_may_rely_on():
    assert Full().is_full
    assert (Full() & PerHead([Full(), Full()])).is_full
    assert (Full() | Causal()).is_full
    assert Causal().is_causal_only
    assert (Full() & Causal()).is_causal_only
    assert (Causal() | Causal()).is_causal_only
    assert PerHead([Causal(), Causal()]).is_causal_only
    for mask in (Padding(), ~Full(), Causal() & SlidingWindow(2), Global(1)):
        assert not mask.is_full
        assert not mask.is_causal_only
    assert not Causal().is_full
    assert not Full().is_causal_only
    assert not (Full() & Full()).is_causal_only


def test_equal_masks_hash_alike_and_different_ones_differ():
    assert SlidingWindow(3) == SlidingWindow(3)
    assert SlidingWindow(3) != SlidingWindow(4)
    assert Prefix(3) != Global(3)
    assert Causal() != "Causal()"
    assert len({Prefix(), Prefix(None), Prefix(0), Global(0)}) == 3
    assert Explicit([[1, 0]]) == Explicit(np.array([[True, False]]))
    assert Explicit([[1, 0]]) != Explicit([[1], [0]])
    assert (Causal() & Full()) != (Full() & Causal())


def test_is_copied_and_pickled_whole():
    for made in (
        copy.deepcopy(TREE),
        copy.copy(TREE),
        pickle.loads(pickle.dumps(TREE)),
    ):
        assert made == TREE
        assert hash(made) == hash(TREE)


def test_a_new_rule_needs_only_its_meaning():
    class Even(Mask):
        def __init__(self):
            self._set()

        def allowed(self, query_slots, key_slots, data):
            return key_slots % 2 == 0

    mask = Causal() & Even()
    assert repr(mask) == "Causal() & Even()"
    assert mask.show(3) == "#..\n#..\n#.#"
    assert mask.plan(4, 4, 2).row(0) == [(0, 1, False)]
    assert mask.lookback is None


def test_a_rule_derives_from_no_other_rule():
    class Wide(SlidingWindow):
        """Another name for the same rule is no harm."""

    assert isinstance(Wide(3), Mask)
    with pytest.raises(TypeError, match="Odd must derive from Mask"):

        class Odd(SlidingWindow):
            def allowed(self, query_slots, key_slots, data):
                return key_slots % 2 == 1


def test_is_immutable():
    with pytest.raises(AttributeError, match="`length` cannot be set"):
        Prefix(3).length = 4
    with pytest.raises(AttributeError, match="immutable"):
        del Prefix(3).length


def test_has_no_truth_value():
    with pytest.raises(TypeError, match=r"`&`, `\|` and `~` instead of `and`"):
        Causal() and Padding()


@pytest.mark.parametrize("other", [True, None, np.ones((2, 2), bool), "full"])
def test_joins_with_masks_only(other):
    with pytest.raises(TypeError, match="operand"):
        Causal() & other
    with pytest.raises(TypeError, match="operand"):
        other | Causal()


def test_rejects_slots_of_another_rank():
    with pytest.raises(ValueError, match=r"`query_slots` must be of shape"):
        Causal().evaluate(np.zeros((1, 2, 3), "int32"), np.arange(3))
    with pytest.raises(ValueError, match=r"`key_slots` .* shape \(\)"):
        Causal().evaluate(np.arange(3), 3)


def test_rejects_lengths_that_are_none():
    with pytest.raises(ValueError, match="Exactly one of `query_length` and"):
        Causal().dense()
    with pytest.raises(
        ValueError, match="Exactly one of `key_length` and `key_slots`"
    ):
        Causal().dense(3, 3, key_slots=[1])
    with pytest.raises(ValueError, match=r"`query_length` .*=-1"):
        Causal().dense(-1)
    with pytest.raises(ValueError, match=r"`key_length` .*=2.5"):
        Causal().dense(1, 2.5)


def test_the_base_class_means_nothing():
    with pytest.raises(NotImplementedError):
        Mask().allowed(None, None, None)


def test_and_is_made_of_masks():
    assert And([Causal(), Full()]) == Causal() & Full()
