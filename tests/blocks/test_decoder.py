import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.blocks import PositionalEmbedding, TransformerDecoder
from keras_transformer.blocks.residual import PLACEMENTS
from keras_transformer.feed_forward import MixtureOfExperts
from keras_transformer.masks import Causal, Documents, Full, SlidingWindow
from keras_transformer.positions import Learned, RelativePositionBias
from tests.attention.checks import compiled
from tests.blocks.option_tables import BLOCK_OPTIONS
from tests.layer_contract import check_layer
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.option_walk import (
    assert_complete,
    cases,
    check_option,
    layer_again,
)
from tests.reference.blocks import decoder_block, weights_of
from tests.sizes import (
    BATCH,
    INTERMEDIATE_DIM,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
    VOCABULARY_SIZE,
)

ENCODER_DIM = 10
SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
ENCODER_SHAPE = (BATCH, KEY_LENGTH, ENCODER_DIM)
INPUTS = normal(*SHAPE)
ENCODED = normal(*ENCODER_SHAPE, seed=1)
BASE = {"intermediate_dim": INTERMEDIATE_DIM, "num_heads": NUM_HEADS}
PADDING = np.arange(QUERY_LENGTH) < np.array([[5], [3], [1]])
ENCODER_PADDING = np.arange(KEY_LENGTH) < np.array([[7], [4], [2]])
IDS = np.array([[3, 1, 4, 0, 0], [0, 2, 6, 5, 3], [3, 0, 8, 0, 1]], "int32")
ENCODER_IDS = np.array(
    [[3, 1, 4, 0, 0, 0, 0], [0, 2, 6, 0, 5, 3, 1], [2, 7, 1, 8, 2, 8, 1]],
    "int32",
)


def built(encoder_shape=ENCODER_SHAPE, **options):
    layer = TransformerDecoder(**{**BASE, **options})
    layer.build(SHAPE, encoder_shape)
    randomize_weights(layer)
    return layer


@pytest.mark.parametrize("has_encoder", [True, False])
def test_keeps_the_layer_contract(has_encoder):
    inputs = {"decoder_sequence": INPUTS, "padding_mask": PADDING}
    if has_encoder:
        inputs["encoder_sequence"] = ENCODED
        inputs["encoder_padding_mask"] = ENCODER_PADDING
    check_layer(
        TransformerDecoder,
        {
            **BASE,
            "num_key_value_heads": 2,
            "position": "t5",
            "mask": Causal() & SlidingWindow(3),
            "cross_mask": SlidingWindow(4),
            "normalization": "rms_norm",
            "feed_forward": "gated",
            "dropout": 0.1,
            "stochastic_depth": 0.1,
            "seed": 3,
        },
        inputs,
        output_shape=SHAPE,
        # Table, attention 8 and norm, again across, feed-forward 6 and norm.
        num_weights=1 + 9 + 9 * has_encoder + 7,
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "normalization": "rms_norm",
            "feed_forward": "gated",
            "layer_scale": 0.5,
        },
    ],
)
def test_follows_the_formula_of_each_placement(placement, options):
    layer = built(norm_placement=placement, **options)
    outputs = layer(
        INPUTS,
        ENCODED,
        padding_mask=PADDING,
        encoder_padding_mask=ENCODER_PADDING,
    )
    expected = decoder_block(
        weights_of(layer),
        placement,
        INPUTS,
        ENCODED,
        num_heads=NUM_HEADS,
        allowed=PADDING[:, None, None, :],
        encoder_allowed=ENCODER_PADDING[:, None, None, :],
    )
    assert_close(outputs, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_near_the_formula(dtype):
    layer = built(dtype=f"mixed_{dtype}")
    outputs = layer(INPUTS, ENCODED, encoder_padding_mask=ENCODER_PADDING)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = decoder_block(
        weights_of(layer),
        "pre",
        INPUTS,
        ENCODED,
        num_heads=NUM_HEADS,
        encoder_allowed=ENCODER_PADDING[:, None, None, :],
    )
    assert_close(ops.cast(outputs, "float32"), expected, dtype, scale=2)


def test_compiled_equals_eager():
    layer = built(position="rope")
    call = compiled(lambda x, y, mask: layer(x, y, encoder_padding_mask=mask))
    outputs = call(
        *map(ops.convert_to_tensor, (INPUTS, ENCODED, ENCODER_PADDING))
    )
    expected = layer(INPUTS, ENCODED, encoder_padding_mask=ENCODER_PADDING)
    assert_close(outputs, to_numpy(expected))


OPTIONS = {
    **BLOCK_OPTIONS,
    "mask": (Causal() & SlidingWindow(2), "outputs"),
    "cross_mask": (SlidingWindow(2), "outputs"),
    "attention": (
        lambda: MultiHeadAttention(
            NUM_HEADS, mask=Causal(), soft_cap=0.5, name="self_attention"
        ),
        "outputs",
    ),
}


def test_the_table_of_options_is_complete():
    assert_complete(TransformerDecoder.__init__, OPTIONS)


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    inputs = (INPUTS, ENCODED)
    check_option(
        TransformerDecoder,
        BASE,
        OPTIONS[name],
        name,
        inputs,
        layer_again(inputs),
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_future_does_not_change_the_past(placement):
    blocks = [built(norm_placement=placement) for _ in range(2)]

    def states(inputs):
        for block in blocks:
            inputs = block(inputs, ENCODED)
        return to_numpy(inputs)

    for first in (1, QUERY_LENGTH - 1):
        changed = INPUTS.copy()
        changed[:, first:] += 1e3 * normal(*SHAPE, seed=8)[:, first:]
        np.testing.assert_array_equal(
            states(changed)[:, :first], states(INPUTS)[:, :first]
        )
        assert not np.allclose(states(changed), states(INPUTS))


@pytest.mark.parametrize("is_implicit", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_pad_token_changes_nothing_else_at_any_depth(placement, is_implicit):
    embedding, encoder_embedding = (
        PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, mask_zero=is_implicit)
        for _ in range(2)
    )
    # Not causal, so that a pad is a neighbour of each token.
    blocks = [
        TransformerDecoder(**BASE, norm_placement=placement, mask=Full())
        for _ in range(3)
    ]
    explicit = {
        "padding_mask": IDS != 0,
        "encoder_padding_mask": ENCODER_IDS != 0,
    }
    explicit = {} if is_implicit else explicit

    def states():
        stream, seen = embedding(IDS), []
        encoded = encoder_embedding(ENCODER_IDS)
        for block in blocks:
            stream = block(stream, encoded, **explicit)
            seen.append(to_numpy(stream)[IDS != 0])
        return np.stack(seen)

    states()
    layers = (embedding, encoder_embedding, *blocks)
    for index, layer in enumerate(layers):
        randomize_weights(layer, seed=index)
    before = states()
    for layer in layers[:2]:
        table = to_numpy(layer._embedding.embeddings).astype("float32")
        table[0] += 1e3 * normal(MODEL_DIM, seed=9)
        layer._embedding.embeddings.assign(table)
        np.testing.assert_array_equal(states(), before)


def test_carries_the_mask_of_the_decoder_sequence_on():
    embedding = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, mask_zero=True)
    layer = TransformerDecoder(**BASE)
    outputs = layer(embedding(IDS), embedding(ENCODER_IDS))
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), IDS != 0)


def test_the_encoder_masks_narrow_the_cross_attention():
    layer = built()
    narrow = np.broadcast_to(
        ENCODER_PADDING[:, None, :], (BATCH, QUERY_LENGTH, KEY_LENGTH)
    )
    assert_close(
        layer(INPUTS, ENCODED, encoder_attention_mask=narrow),
        to_numpy(layer(INPUTS, ENCODED, encoder_padding_mask=ENCODER_PADDING)),
    )


def test_packed_pairs_of_documents_are_each_alone():
    layer = built(mask=Causal() & Documents(), cross_mask=Documents())
    packed = layer(
        INPUTS,
        ENCODED,
        segment_ids=np.array([[0, 0, 1, 1, 1]] * BATCH, "int32"),
        encoder_segment_ids=np.array([[0, 0, 0, 1, 1, 1, 1]] * BATCH, "int32"),
    )
    alone = built()
    first = alone(INPUTS[:, :2], ENCODED[:, :3])
    second = alone(INPUTS[:, 2:], ENCODED[:, 3:])
    expected = np.concatenate([to_numpy(first), to_numpy(second)], axis=1)
    assert_close(packed, expected)


def test_attention_mask_and_positions_act():
    layer = built(None, position="rope", mask=Full())
    lower = np.tril(np.ones((QUERY_LENGTH, QUERY_LENGTH), bool))
    lower = np.broadcast_to(lower, (BATCH, QUERY_LENGTH, QUERY_LENGTH))
    causal = built(None, position="rope")
    positions = np.array([0, 2, 4, 5, 9], "int32")
    outputs = layer(INPUTS, attention_mask=lower, positions=positions)
    assert_close(outputs, to_numpy(causal(INPUTS, positions=positions)))
    assert not np.allclose(to_numpy(outputs), to_numpy(causal(INPUTS)))


def test_cached_equals_uncached():
    layer = built(None, position="rope", mask=Causal() & SlidingWindow(3))
    cache, outputs = layer.init_cache(BATCH, QUERY_LENGTH), []
    for step in range(QUERY_LENGTH):
        output, cache = layer.call_with_cache(INPUTS[:, step : step + 1], cache)
        outputs.append(to_numpy(output))
    assert_close(np.concatenate(outputs, axis=1), to_numpy(layer(INPUTS)))


def test_a_mixture_counts_real_tokens_only():
    layer = built(
        feed_forward=MixtureOfExperts(4, INTERMEDIATE_DIM, load_balancing=1.0)
    )
    other = np.where(PADDING[..., None], INPUTS, normal(*SHAPE, seed=5))

    def loss(inputs):
        layer(inputs, ENCODED, padding_mask=PADDING, training=True)
        return float(to_numpy(sum(layer.losses)))

    assert loss(INPUTS) == pytest.approx(loss(other), rel=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer.build(SHAPE, ENCODER_SHAPE),
        lambda layer: layer(INPUTS, ENCODED, padding_mask=PADDING),
        lambda layer: layer(
            keras.Input((None, MODEL_DIM)),
            encoder_sequence=keras.Input((None, ENCODER_DIM)),
        ),
    ],
)
def test_weights_do_not_depend_on_the_first_call(call):
    layer = TransformerDecoder(**BASE, name="block")
    call(layer)
    shapes = {weight.path: tuple(weight.shape) for weight in layer.weights}
    assert len(shapes) == 8 + 8 + 4 + 3 * 2
    across = "block/cross_attention"
    assert shapes[f"{across}/query/kernel"] == (MODEL_DIM, MODEL_DIM)
    assert shapes[f"{across}/key/kernel"] == (ENCODER_DIM, MODEL_DIM)
    assert shapes["block/cross_attention_branch/norm/gamma"] == (MODEL_DIM,)


def test_equal_seeds_do_not_drop_equal_units_in_two_parts():
    layer = built(dropout=0.5, seed=3)
    ones = np.ones(SHAPE, "float32")
    drops = [
        to_numpy(branch._dropout(ones, training=True))
        for branch in (
            layer._attention_branch,
            layer._cross_branch,
            layer._feed_forward_branch,
        )
    ]
    assert (drops[0] != drops[1]).any()
    assert (drops[1] != drops[2]).any()
    assert layer._self_attention.seed != layer._cross_attention.seed


def model_with_a_shared_bias():
    bias = RelativePositionBias(bidirectional=False)
    inputs = keras.Input((None, MODEL_DIM))
    stream = inputs
    for _ in range(2):
        stream = TransformerDecoder(**BASE, position=bias)(stream)
    model = keras.Model(inputs, stream)
    randomize_weights(model)
    return model


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
def test_a_shared_bias_survives(copy, tmp_path):
    model = model_with_a_shared_bias()
    first, second = (COPIES[copy](model, tmp_path) for _ in range(2))
    for again in (first, second):
        assert len(again.weights) == len(model.weights)
        assert again.layers[1].position is again.layers[2].position
        assert again.layers[1].position is not model.layers[1].position
    # Two copies are two models, however they were made.
    assert first.layers[1].position is not second.layers[1].position
    if copy != "saved":
        first.set_weights(model.get_weights())
    assert_close(first(INPUTS), to_numpy(model(INPUTS)))
    # One training step moves the table for both blocks, and in no copy else.
    before = to_numpy(first.layers[2].position.embeddings)
    others = [
        to_numpy(m.layers[1].position.embeddings) for m in (model, second)
    ]
    first.compile(keras.optimizers.SGD(0.1), "mse")
    first.fit(INPUTS, normal(*SHAPE, seed=4), verbose=0)
    after = to_numpy(first.layers[1].position.embeddings)
    assert not np.allclose(after, before)
    np.testing.assert_array_equal(
        after, to_numpy(first.layers[2].position.embeddings)
    )
    for other, table in zip((model, second), others, strict=True):
        np.testing.assert_array_equal(
            to_numpy(other.layers[1].position.embeddings), table
        )


@pytest.mark.parametrize("is_symbolic", [True, False])
@pytest.mark.parametrize("has_encoder", [True, False])
def test_the_other_use_of_a_built_block_raises(has_encoder, is_symbolic):
    layer = built(ENCODER_SHAPE if has_encoder else None)
    sequences = [INPUTS] if has_encoder else [INPUTS, ENCODED]
    if is_symbolic:
        sequences = [keras.KerasTensor(array.shape) for array in sequences]
    was, now = ("with", "without")[:: 1 if has_encoder else -1]
    with pytest.raises(
        ValueError,
        match=f"built {was} `encoder_sequence`.*a call {now} it.*second block",
    ):
        layer(*sequences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"intermediate_dim": 0}, "`intermediate_dim` must be a positive int"),
        ({"mask": True}, "`mask` must be a Mask or None.*mask=True"),
        ({"cross_mask": "full"}, "`cross_mask` must be a Mask or None"),
        ({"position": Learned(9)}, "acts on queries.*`PositionalEmbedding`"),
        (
            {"attention": MultiHeadAttention(4), "mask": Full()},
            r"`mask` must be left at Causal\(\) with `attention`",
        ),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        TransformerDecoder(**{**BASE, **arguments})


def test_a_given_attention_leaves_options_to_the_cross_attention():
    def given(encoder_shape):
        attention = MultiHeadAttention(NUM_HEADS, mask=Causal())
        return built(encoder_shape, attention=attention, key_dim=3)

    layer = given(ENCODER_SHAPE)
    assert layer._cross_attention._head_shapes["key"] == (NUM_HEADS, 3)
    with pytest.raises(
        ValueError, match=r"`key_dim` must be left at None.*Set it in the lay"
    ):
        given(None)


def test_a_cache_needs_a_built_block():
    with pytest.raises(ValueError, match="must be built before `init_cache`"):
        TransformerDecoder(**BASE).init_cache(2, 5)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"segment_ids": np.zeros((3, 5), "int32")}, "Add `Documents"),
        ({"prefix_length": np.ones(3, "int32")}, "Add `Prefix"),
        ({"positions": np.arange(5, dtype="int32")}, "no position scheme"),
        ({"encoder_padding_mask": np.ones((3, 7), bool)}, "encoder_sequence"),
    ],
)
def test_refuses_data_that_nothing_reads(data, text):
    layer = TransformerDecoder(INTERMEDIATE_DIM, NUM_HEADS)
    with pytest.raises(ValueError, match=text):
        layer(normal(3, 5, MODEL_DIM), **data)
