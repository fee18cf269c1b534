import dataclasses
import math
import random
import sys
import threading

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer._internal.kernels import Kernel
from keras_transformer.attention import (
    MultiHeadAttention,
    dot_product,
    dot_product_attention,
    explain,
)
from keras_transformer.blocks import TransformerEncoder
from keras_transformer.feed_forward import MixtureOfExperts
from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    PerHead,
    Prefix,
    SlidingWindow,
)
from keras_transformer.models import decoder_only, encoder_decoder
from tests.numerics import normal, to_numpy
from tests.sizes import MODEL_DIM, NUM_HEADS, VOCABULARY_SIZE

BACKEND = keras.backend.backend()
MODULE = sys.modules["keras_transformer.attention.explain"]
RECORDING = sys.modules["keras_transformer.attention.recording"]
WIDTH = 8
KERNELS = [kernel.name for kernel in backend.KERNELS]

MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(32),
    "documents": Causal() & Documents(),
    "prefix": Causal() | Prefix(),
    "heads": PerHead([Causal(), SlidingWindow(8)]),
}

# Constructor arguments, call arguments of shape (2, length), and the rest.
OPTIONS = {
    "plain": ({}, (), {}),
    "padding": ({}, ("padding_mask",), {}),
    "scores": ({}, (), {"return_attention_scores": True}),
    "causal too": ({}, (), {"use_causal_mask": True}),
    "dropout": ({"dropout": 0.5}, (), {"training": True}),
    "no dropout": ({"dropout": 0.5}, (), {"training": False}),
    "soft cap": ({"soft_cap": 5.0}, (), {}),
    "sinks": ({"use_sinks": True}, (), {}),
    "alibi": ({"position": "alibi"}, ("padding_mask",), {}),
    "half": ({"dtype": "float16", "position": "t5"}, (), {}),
    "dense": ({"implementation": "dense"}, ("padding_mask",), {}),
    "blockwise": ({"implementation": "blockwise"}, ("padding_mask",), {}),
}


def silent(layer, shapes, **options):
    return explain(layer, shapes, print_fn=lambda text: None, **options)


def attention(shape=(2, 8, WIDTH), num_heads=2, **arguments):
    layer = MultiHeadAttention(num_heads, **arguments)
    layer.build(shape)
    return layer


@pytest.fixture
def ran(monkeypatch):
    """What ran: names of executors, flags, and the booleans they were given."""
    seen = []

    def note(name, query, value, flags=None, allowed=None):
        seen.append((name, flags or {}, allowed))
        shape = (*query.shape[:3], value.shape[3])
        return ops.zeros(shape, query.dtype)

    def blockwise(query, key, value, **_):
        return note("blockwise", query, value)

    def dense(query, key, value, *, allowed, **_):
        shape = (*query.shape[:2], query.shape[2], key.shape[1])
        weights = ops.zeros([shape[i] for i in (0, 2, 1, 3)])
        return note("dense", query, value, allowed=allowed), weights

    def kernel(name, skips):
        def run(query, key, value, lowering, *, allowed, **_):
            allowed = None if skips else allowed
            return note(name, query, value, lowering.flags, allowed)

        return run

    monkeypatch.setattr(dot_product, "blockwise_attention", blockwise)
    monkeypatch.setattr(dot_product, "dense_attention", dense)
    kernels = tuple(
        dataclasses.replace(each, run=kernel(each.name, each.skips))
        for each in backend.KERNELS
    )
    monkeypatch.setattr(backend, "KERNELS", kernels)
    return seen


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [8, 512, 1100])
def test_what_it_says_is_what_runs(ran, mask, option, length):
    arguments, names, rest = OPTIONS[option]
    layer = attention((2, length, WIDTH), mask=MASKS[mask], **arguments)
    call = {"query": normal(2, length, WIDTH)}
    if mask == "documents":
        names = (*names, "segment_ids")
    data = {
        "padding_mask": np.arange(length) < np.array([[length], [3]]),
        "segment_ids": np.arange(length) // np.array([[5], [7]]),
    }
    call |= {name: data[name].astype("bool") if name == "padding_mask"
             else data[name].astype("int32") for name in names}  # fmt: skip
    if mask == "prefix":
        call["prefix_length"] = np.array([3, 5], "int32")
    shapes = {name: array.shape for name, array in call.items()}
    (row,) = silent(layer, shapes, **rest)
    assert not ran
    query = call.pop("query")
    layer(query, **call, **rest)
    ((name, flags, allowed),) = ran
    assert (row.kernel or row.executor) == name
    assert row.flags == flags
    if allowed is None and row.residual == "SlidingWindow(32)":
        # Every pair turned out to be allowed.
        assert length < 32
    elif allowed is None:
        assert row.residual_bytes == 0
    else:
        assert row.residual_bytes == math.prod(allowed.shape)
        assert row.residual_bytes == math.prod(row.residual_shape)
    others = {*(KERNELS or ["fused"]), "blockwise", "dense"} - {name}
    assert set(row.refusals) == others
    assert all(row.refusals.values())


def test_what_it_says_of_blocks_and_cross_attention_is_what_runs(ran):
    model = encoder_decoder(VOCABULARY_SIZE, 2, WIDTH, 2, 16, position="t5")
    lengths = {"encoder_token_ids": 40, "decoder_token_ids": 600}
    rows = silent(model, {name: (2, n) for name, n in lengths.items()})
    model({name: np.ones((2, n), "int32") for name, n in lengths.items()})
    said = [(row.kernel or row.executor, row.flags) for row in rows]
    assert said == [(name, flags) for name, flags, _ in ran]
    assert [row.layer for row in rows] == [
        "encoder_0/self_attention",
        "encoder_1/self_attention",
        "decoder_0/self_attention",
        "decoder_0/cross_attention",
        "decoder_1/self_attention",
        "decoder_1/cross_attention",
    ]


def test_a_long_model_is_explained_without_computing_attention():
    model = decoder_only(VOCABULARY_SIZE, 3, WIDTH, 2, 16)
    rows = silent(model, (1, 1 << 20), training=True)
    assert len(rows) == 3
    assert rows[0].residual_bytes == 0


@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(100)])
def test_the_tiles_are_those_that_hold_an_allowed_pair(mask):
    layer = attention((2, 700, WIDTH), mask=mask, implementation="blockwise")
    (row,) = silent(layer, (2, 700, WIDTH))
    rows, columns = row.block_sizes
    allowed = to_numpy(mask.dense(700, 700))
    tiles = [
        allowed[i : i + rows, j : j + columns].any()
        for i in range(0, 700, rows)
        for j in range(0, 700, columns)
    ]
    assert row.density == pytest.approx(np.mean(tiles))
    assert not row.density_is_bound
    shapes = {"query": (2, 700, WIDTH), "padding_mask": (2, 700)}
    (row,) = silent(layer, shapes)
    assert row.density_is_bound
    assert "at most" in str(silent(layer, shapes))


def test_prints_a_table_in_which_equal_blocks_share_a_row(capsys):
    model = decoder_only(VOCABULARY_SIZE, 12, WIDTH, 2, 16)
    rows = explain(model, (3, 10))
    text = capsys.readouterr().out
    assert text == f"{rows}\n" == f"{rows!r}\n"
    assert "decoder_0/self_attention ... decoder_11/self_attention (12)" in text
    assert text.count("self_attention") == 2
    for name, reason in rows[0].refusals.items():
        assert text.count(f"  not {name}: {reason}\n") == 1
    assert len(rows) == 12


def test_blocks_that_differ_have_rows_of_their_own():
    masks = [Causal(), SlidingWindow((9, 0)), Causal(), Causal()]
    model = decoder_only(VOCABULARY_SIZE, 4, WIDTH, 2, 16, mask=masks)
    lines = str(silent(model, (3, 10))).split("\n")
    labels = [line for line in lines if line.startswith("decoder")]
    assert [label.split("  ")[0] for label in labels] == [
        "decoder_0/self_attention",
        "decoder_1/self_attention",
        "decoder_2/self_attention ... decoder_3/self_attention (2)",
    ]


def test_a_shared_layer_has_a_row_for_each_call():
    inputs = keras.Input((6, WIDTH))
    layer = MultiHeadAttention(2, name="shared")
    model = keras.Model(inputs, layer(layer(inputs)))
    rows = silent(model, (2, 6, WIDTH))
    assert [row.layer for row in rows] == ["shared", "shared"]
    assert "shared (2 calls)" in str(rows)


class Direct(keras.layers.Layer):
    """Calls the door itself."""

    def call(self, inputs):
        heads = inputs[:, :, None]
        return dot_product_attention(heads, heads, heads)[:, :, 0]


def test_a_call_of_the_door_outside_of_our_layers_appears():
    layer = Direct()
    layer.built = True
    (row,) = silent(layer, (2, 6, WIDTH))
    assert row.layer is None
    assert "(no layer)" in str(silent(layer, (2, 6, WIDTH)))


def test_a_kernel_that_asks_the_mask_itself_needs_no_booleans(monkeypatch):
    kernel = Kernel(
        "toy", frozenset(["is_causal"]), lambda *_: None, None, skips=True
    )
    monkeypatch.setattr(backend, "KERNELS", (kernel,))
    layer = attention((2, 600, WIDTH), mask=MASKS["window"])
    shapes = {"query": (2, 600, WIDTH), "padding_mask": (2, 600)}
    rows = silent(layer, shapes)
    assert (rows[0].executor, rows[0].kernel) == ("fused", "toy")
    assert rows[0].flags == {"is_causal": True}
    assert rows[0].residual == "SlidingWindow(32), padding_mask"
    assert rows[0].residual_shape is None
    assert rows[0].residual_bytes == 0
    assert set(rows[0].refusals) == {"blockwise", "dense"}


def test_kernels_are_asked_for_the_device_of_the_real_call(monkeypatch):
    def device_of(tensor):
        return "tpu" if backend.is_concrete(tensor) else "cpu"

    kernel = Kernel(
        "toy", frozenset(), lambda call, _: f"not on {call.device}", None
    )
    monkeypatch.setattr(backend, "KERNELS", (kernel,))
    monkeypatch.setattr(backend, "device_of", device_of)
    (row,) = silent(attention(), (2, 8, WIDTH))
    assert row.refusals["toy"] == "not on tpu"


@pytest.mark.parametrize("name", ["dense", "blockwise"])
def test_what_was_asked_for_says_so(name):
    layer = attention(implementation=name)
    rows = silent(layer, (2, 8, WIDTH))
    assert (rows[0].implementation, rows[0].executor) == (name, name)
    assert f"{name} (asked for)" in str(rows)
    other = {"dense": "blockwise", "blockwise": "dense"}[name]
    assert rows[0].refusals[other] == f"{name} was asked for"


def test_a_refused_request_raises_with_the_path_of_the_layer():
    block = TransformerEncoder(
        16,
        2,
        attention=MultiHeadAttention(2, implementation="blockwise"),
        name="block",
    )
    block.build((2, 8, WIDTH))
    shapes = {"inputs": (2, 8, WIDTH), "attention_mask": (2, 8, 8)}
    path = block._self_attention.path
    message = f"^Layer '{path}': implementation=\"blockwise\" cannot"
    with pytest.raises(ValueError, match=message):
        silent(block, shapes)


def test_missing_data_raises_with_the_path_of_the_layer():
    layer = attention(mask=Documents(), name="packed")
    with pytest.raises(ValueError, match=r"^Layer 'packed': `segment_ids`"):
        silent(layer, (2, 8, WIDTH))


def test_a_failed_call_leaves_nothing_recording():
    layer = attention(mask=Documents())
    other = attention()
    inputs = normal(2, 8, WIDTH)
    outputs = to_numpy(other(inputs))
    for _ in range(2):
        with pytest.raises(ValueError, match="segment_ids"):
            silent(layer, (2, 8, WIDTH))
        assert RECORDING._active.get() is None
        np.testing.assert_array_equal(to_numpy(other(inputs)), outputs)


def test_other_threads_compute_meanwhile():
    layer, inputs = attention(), normal(2, 8, WIDTH)
    expected, found = to_numpy(layer(inputs)), []

    class Meanwhile(keras.layers.Layer):
        def call(self, x):
            thread = threading.Thread(
                target=lambda: found.append(to_numpy(layer(inputs)))
            )
            thread.start()
            thread.join()
            return layer(x)

    outer = Meanwhile()
    outer.built = True
    assert len(silent(outer, (2, 8, WIDTH))) == 1
    np.testing.assert_array_equal(found[0], expected)


def test_one_inside_of_another_keeps_them_apart():
    layer, inner = attention(name="outer"), attention(name="inner")
    found = []

    class Nested(keras.layers.Layer):
        def call(self, x):
            found.append(silent(inner, (2, 5, WIDTH)))
            return layer(x)

    nested = Nested()
    nested.built = True
    rows = silent(nested, (2, 8, WIDTH))
    assert [row.layer for row in rows] == ["outer"]
    assert [row.layer for row in found[0]] == ["inner"]


def test_code_that_is_compiled_meanwhile_computes_later():
    layer, inputs = attention(), normal(2, 8, WIDTH)
    function = backend.compiled(lambda x: layer(x))

    class Compiled(keras.layers.Layer):
        def call(self, x):
            return function(x)

    outer = Compiled()
    outer.built = True
    assert len(silent(outer, (2, 8, WIDTH))) == 1
    outputs = to_numpy(function(ops.convert_to_tensor(inputs)))
    np.testing.assert_allclose(outputs, to_numpy(layer(inputs)), atol=1e-5)


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras cannot trace such a layer there"
)
@pytest.mark.parametrize("mode", ["full", None])
def test_sees_attention_that_is_recomputed_in_training(mode):
    with keras.RematScope(mode=mode):
        layer = MultiHeadAttention(2)
    layer.build((2, 8, WIDTH))
    (row,) = silent(layer, (2, 8, WIDTH))
    assert row.layer == layer.path


def test_leaves_the_model_as_it_was():
    model = decoder_only(
        VOCABULARY_SIZE,
        2,
        WIDTH,
        2,
        2,
        dropout=0.5,
        feed_forward=MixtureOfExperts(4, 2),
        seed=3,
    )
    state = random.getstate()
    variables = [(v.path, to_numpy(v)) for v in model.variables]
    num_losses = len(model.losses)
    silent(model, (2, 8), training=True)
    assert random.getstate() == state
    assert len(model.losses) == num_losses
    assert [v.path for v in model.variables] == [p for p, _ in variables]
    for variable, (path, value) in zip(model.variables, variables, strict=True):
        np.testing.assert_array_equal(to_numpy(variable), value, path)


def test_takes_the_inputs_of_a_model_in_each_form():
    def functional(structure):
        tensors = {
            "first": keras.Input((None, WIDTH), name="first"),
            "keep": keras.Input((None,), dtype="bool", name="keep"),
        }
        outputs = MultiHeadAttention(2)(
            tensors["first"], padding_mask=tensors["keep"]
        )
        return keras.Model(structure(tensors), outputs)

    shapes = {"first": (2, 6, WIDTH), "keep": (2, 6)}
    for structure in (dict, lambda tensors: list(tensors.values())):
        model = functional(structure)
        for form in (shapes, list(shapes.values())):
            (row,) = silent(model, form)
            assert row.residual == "padding_mask"
            assert row.residual_shape == (2, 1, 1, 6)
    model = keras.Sequential([keras.Input((6, WIDTH)), MultiHeadAttention(2)])
    assert len(silent(model, (2, 6, WIDTH))) == 1


def test_takes_the_padding_that_keras_carries():
    ids = keras.Input((None,), dtype="int32")
    vectors = keras.layers.Embedding(9, WIDTH, mask_zero=True)(ids)
    model = keras.Model(ids, MultiHeadAttention(2)(vectors))
    (row,) = silent(model, (2, 6))
    assert row.residual == "padding_mask"


def test_takes_a_dtype_with_a_shape():
    class Lookup(keras.layers.Layer):
        def build(self, shape):
            self.table = keras.layers.Embedding(9, WIDTH)
            self.table.build(shape)
            self.attention = attention()

        def call(self, inputs):
            return self.attention(self.table(inputs))

    layer = Lookup()
    layer.build((2, 6))
    assert len(silent(layer, keras.KerasTensor((2, 6), "int32"))) == 1


@pytest.mark.skipif(BACKEND != "torch", reason="others trace all operations")
def test_an_operation_that_needs_values_gets_zeros():
    class OnHost(keras.layers.Layer):
        def build(self, shape):
            self.attention = attention()

        def call(self, inputs):
            host = inputs.detach().cpu().numpy()
            return self.attention(ops.convert_to_tensor(host + 1))

    layer = OnHost()
    layer.build((2, 8, WIDTH))
    assert len(silent(layer, (2, 8, WIDTH))) == 1


def test_what_it_cannot_explain_is_an_error():
    layer = attention()
    cases = {
        "must be built before `explain`": (MultiHeadAttention(2), (2, 8, 8)),
        "`layer_or_model` must be a layer": (Causal(), (2, 8)),
        "must contain attention of this library": (
            keras.layers.Activation("relu"),
            (2, 8),
        ),
        "whose names are call arguments": (layer, {"padding_mask": (2, 8)}),
        "'query', 'value'": (layer, {"query": (2, 8, 8), "mass": (2, 8)}),
        "positive integers for 'query'": (layer, {"query": (None, 8, 8)}),
        "batch included": (layer, (2, 0, 8)),
    }
    for message, (given, shapes) in cases.items():
        with pytest.raises(ValueError, match=message):
            silent(given, shapes)
    with pytest.raises(ValueError, match="`training` must be True or False"):
        silent(layer, (2, 8, 8), training=None)
    model = decoder_only(VOCABULARY_SIZE, 1, MODEL_DIM, NUM_HEADS, 16)
    for shapes in ({"tokens": (2, 8)}, [(2, 8), (2, 8)], "2, 8", (2, None)):
        with pytest.raises(ValueError, match="`shapes` must be"):
            silent(model, shapes)


@pytest.mark.parametrize(("heads", "expected"), [(None, 1), (1, 1), (4, 4)])
def test_an_attention_mask_counts_with_its_own_shape(heads, expected):
    # Without an axis of heads, one array serves them all.
    layer = MultiHeadAttention(4)
    layer.build((2, 8, 16))
    axes = () if heads is None else (heads,)
    shapes = {"query": (2, 8, 16), "attention_mask": (2, *axes, 8, 8)}
    (row,) = explain(layer, shapes, print_fn=lambda text: None)
    assert row.residual_shape == (2, expected, 8, 8)
    assert row.residual_bytes == 2 * expected * 8 * 8
