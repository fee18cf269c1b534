import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.blocks import PositionalEmbedding, TransformerEncoder
from keras_transformer.blocks.residual import PLACEMENTS
from keras_transformer.feed_forward import FeedForward, MixtureOfExperts
from keras_transformer.masks import Causal, Documents, Full, Prefix
from keras_transformer.positions import Learned, RoPE
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
from tests.reference.blocks import encoder_block, weights_of
from tests.sizes import (
    BATCH,
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
    VOCABULARY_SIZE,
)

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
INPUTS = normal(*SHAPE)
BASE = {"intermediate_dim": INTERMEDIATE_DIM, "num_heads": NUM_HEADS}
PADDING = np.arange(QUERY_LENGTH) < np.array([[5], [3], [1]])
# Token 0 is padding: at the end, at the start and inside.
IDS = np.array([[3, 1, 4, 0, 0], [0, 2, 6, 5, 3], [3, 0, 8, 0, 1]], "int32")


def built(**options):
    layer = TransformerEncoder(**{**BASE, **options})
    layer.build(SHAPE)
    randomize_weights(layer)
    return layer


def test_keeps_the_layer_contract():
    check_layer(
        TransformerEncoder,
        {
            **BASE,
            "num_key_value_heads": 2,
            "key_dim": 6,
            "position": "t5",
            "mask": Full() & ~Causal(),
            "normalization": "rms_norm",
            "norm_placement": "sandwich",
            "feed_forward": "gated",
            "layer_scale": 0.1,
            "dropout": 0.1,
            "stochastic_depth": 0.1,
            "seed": 3,
        },
        {"inputs": INPUTS, "padding_mask": PADDING},
        output_shape=SHAPE,
        # Table, attention 8, feed-forward 6, two branches with two norms and
        # a scale each.
        num_weights=1 + 8 + 6 + 2 * 3,
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
    expected = encoder_block(
        weights_of(layer),
        placement,
        INPUTS,
        num_heads=NUM_HEADS,
        allowed=PADDING[:, None, None, :],
    )
    assert_close(layer(INPUTS, padding_mask=PADDING), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_half_precision_is_near_the_formula(placement, dtype):
    layer = built(norm_placement=placement, dtype=f"mixed_{dtype}")
    outputs = layer(INPUTS, padding_mask=PADDING)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = encoder_block(
        weights_of(layer),
        placement,
        INPUTS,
        num_heads=NUM_HEADS,
        allowed=PADDING[:, None, None, :],
    )
    assert_close(ops.cast(outputs, "float32"), expected, dtype, scale=2)


def test_compiled_equals_eager():
    layer = built(position="rope")
    call = compiled(lambda x, mask: layer(x, padding_mask=mask))
    outputs = call(
        ops.convert_to_tensor(INPUTS), ops.convert_to_tensor(PADDING)
    )
    assert_close(outputs, to_numpy(layer(INPUTS, padding_mask=PADDING)))


def test_a_functional_model_equals_the_layer():
    layer = built(mask=Documents(), position="alibi")
    inputs = {
        "inputs": keras.Input((None, MODEL_DIM), name="inputs"),
        "segment_ids": keras.Input((None,), dtype="int32", name="segment_ids"),
    }
    model = keras.Model(inputs, layer(**inputs))
    assert model.output_shape == (None, None, MODEL_DIM)
    data = {"inputs": INPUTS, "segment_ids": IDS}
    assert_close(model(data), to_numpy(layer(**data)))


OPTIONS = {
    **BLOCK_OPTIONS,
    "mask": (Causal(), "outputs"),
    "attention": (
        lambda: MultiHeadAttention(
            NUM_HEADS, soft_cap=0.5, name="self_attention"
        ),
        "outputs",
    ),
}


def test_the_table_of_options_is_complete():
    assert_complete(TransformerEncoder.__init__, OPTIONS)


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    check_option(
        TransformerEncoder,
        BASE,
        OPTIONS[name],
        name,
        (INPUTS,),
        layer_again((INPUTS,)),
    )


def pad_changed(embedding):
    """Moves the embedding of the pad token, 0, by a lot."""
    table = to_numpy(embedding._embedding.embeddings).astype("float32")
    table[0] += 1e3 * normal(MODEL_DIM, seed=9)
    embedding._embedding.embeddings.assign(table)


@pytest.mark.parametrize("is_implicit", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_pad_token_changes_nothing_else_at_any_depth(placement, is_implicit):
    embedding = PositionalEmbedding(
        VOCABULARY_SIZE, MODEL_DIM, mask_zero=is_implicit
    )
    blocks = [
        TransformerEncoder(**BASE, norm_placement=placement) for _ in range(3)
    ]
    explicit = {} if is_implicit else {"padding_mask": IDS != 0}

    def states():
        stream, seen = embedding(IDS), []
        for block in blocks:
            stream = block(stream, **explicit)
            seen.append(to_numpy(stream)[IDS != 0])
        return np.stack(seen)

    states()
    for index, layer in enumerate((embedding, *blocks)):
        randomize_weights(layer, seed=index)
    before = states()
    pad_changed(embedding)
    np.testing.assert_array_equal(states(), before)


def test_explicit_and_implicit_padding_are_and_ed():
    layer = built()
    embedded = PositionalEmbedding(VOCABULARY_SIZE, MODEL_DIM, mask_zero=True)(
        IDS
    )
    both = layer(embedded, padding_mask=PADDING)
    plain = ops.convert_to_tensor(to_numpy(embedded).astype("float32"))
    expected = layer(plain, padding_mask=PADDING & (IDS != 0))
    assert_close(both, to_numpy(expected))
    # The caller's tensor keeps its mask, and the output carries it on.
    for tensor in (embedded, both):
        np.testing.assert_array_equal(to_numpy(tensor._keras_mask), IDS != 0)


def test_attention_mask_narrows_the_mask():
    layer, causal = built(), built(mask=Causal())
    lower = np.tril(np.ones((QUERY_LENGTH, QUERY_LENGTH), bool))
    lower = np.broadcast_to(lower, (BATCH, QUERY_LENGTH, QUERY_LENGTH))
    assert_close(layer(INPUTS, attention_mask=lower), to_numpy(causal(INPUTS)))


def test_documents_are_each_alone():
    layer = built(mask=Documents(), position=RoPE())
    segments = np.array([[0, 0, 1, 1, 1]] * BATCH, "int32")
    packed = layer(INPUTS, segment_ids=segments)
    alone = [
        to_numpy(layer(part, segment_ids=np.zeros(part.shape[:2], "int32")))
        for part in (INPUTS[:, :2], INPUTS[:, 2:])
    ]
    assert_close(packed, np.concatenate(alone, axis=1))


def test_a_prefix_is_seen_by_all():
    layer = built(mask=Causal() | Prefix())
    length = np.array([5, 0, 0], "int32")
    outputs = to_numpy(layer(INPUTS, prefix_length=length))
    full, causal = built(mask=Full()), built(mask=Causal())
    assert_close(outputs[0], to_numpy(full(INPUTS))[0])
    assert_close(outputs[1:], to_numpy(causal(INPUTS))[1:])


def test_only_distances_between_rotary_positions_count():
    layer = built(position="rope")
    shifted = layer(INPUTS, positions=np.arange(7, 12, dtype="int32"))
    assert_close(shifted, to_numpy(layer(INPUTS)))
    stretched = layer(INPUTS, positions=np.arange(0, 50, 10, dtype="int32"))
    assert not np.allclose(to_numpy(stretched), to_numpy(shifted), atol=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer.build(SHAPE),
        lambda layer: layer(INPUTS, padding_mask=PADDING),
        lambda layer: layer(keras.Input((None, MODEL_DIM)), training=True),
    ],
)
def test_weights_do_not_depend_on_the_first_call(call):
    layer = TransformerEncoder(**BASE, position="t5", name="block")
    call(layer)
    paths = [weight.path for weight in layer.weights]
    assert paths[1:5] == [
        "block/self_attention/query/kernel",
        "block/self_attention/query/bias",
        "block/self_attention/key/kernel",
        "block/self_attention/key/bias",
    ]
    assert len(paths) == len(set(paths)) == 1 + 8 + 4 + 4


def test_equal_seeds_do_not_drop_equal_units_in_two_parts():
    layer = built(dropout=0.5, seed=3)
    ones = np.ones(SHAPE, "float32")
    first, second = (
        to_numpy(branch._dropout(ones, training=True))
        for branch in (layer._attention_branch, layer._feed_forward_branch)
    )
    assert (first != second).any()
    again = built(dropout=0.5, seed=3)._attention_branch
    np.testing.assert_array_equal(
        first, to_numpy(again._dropout(ones, training=True))
    )


def test_attention_dropout_is_dropout_unless_given():
    def rate(**options):
        return built(**options)._self_attention.dropout

    assert rate(dropout=0.2) == 0.2
    assert rate(dropout=0.2, attention_dropout=0.0) == 0.0


def test_a_mixture_counts_real_tokens_only():
    layer = built(
        feed_forward=MixtureOfExperts(4, INTERMEDIATE_DIM, load_balancing=1.0)
    )
    other = np.where(PADDING[..., None], INPUTS, normal(*SHAPE, seed=5))

    def loss(inputs):
        layer(inputs, padding_mask=PADDING, training=True)
        return float(to_numpy(sum(layer.losses)))

    assert loss(INPUTS) == pytest.approx(loss(other), rel=1e-6)
    layer(INPUTS, training=True)
    everything = float(to_numpy(sum(layer.losses)))
    assert everything != pytest.approx(loss(INPUTS), rel=1e-4)


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


def test_takes_any_layer_as_feed_forward():
    layer = built(feed_forward=Doubled(), norm_placement="parallel")
    dense = built(norm_placement="parallel")
    dense.set_weights(
        [
            next(
                (a for a in layer.weights if a.path.endswith(tail)),
                np.zeros(b.shape),
            )
            for b in dense.weights
            for tail in ["/" + b.path.split("/", 1)[1]]
        ]
    )
    normed = to_numpy(layer._norm(INPUTS))
    assert_close(layer(INPUTS), to_numpy(dense(INPUTS)) + 2 * normed)


def test_one_feed_forward_given_to_two_blocks_is_shared_in_copies():
    shared = FeedForward(INTERMEDIATE_DIM)
    inputs = keras.Input((None, MODEL_DIM))
    stream = inputs
    for _ in range(2):
        stream = TransformerEncoder(**BASE, feed_forward=shared)(stream)
    model = keras.Model(inputs, stream)
    for copy in (
        keras.models.clone_model(model),
        keras.Model.from_config(model.get_config()),
    ):
        assert len(copy.weights) == len(model.weights)
        first, second = copy.layers[1:]
        assert first.feed_forward is second.feed_forward
        assert first.feed_forward is not shared


def test_a_projection_can_be_adapted_by_lora(tmp_path):
    inputs = keras.Input((None, MODEL_DIM))
    block = TransformerEncoder(**BASE)
    model = keras.Model(inputs, block(inputs))
    block.trainable = False
    block.trainable = True
    block._self_attention._query.enable_lora(2)
    kernel = to_numpy(block._self_attention._query._kernel)
    before = to_numpy(model(INPUTS))
    model.compile("sgd", "mse")
    model.fit(INPUTS, normal(*SHAPE, seed=4), epochs=2, verbose=0)
    np.testing.assert_array_equal(
        to_numpy(block._self_attention._query._kernel), kernel
    )
    assert not np.allclose(to_numpy(model(INPUTS)), before)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert_close(again(INPUTS), to_numpy(model(INPUTS)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"intermediate_dim": 0}, "`intermediate_dim` must be a positive int"),
        ({"num_heads": "4"}, "`num_heads` must be a positive integer"),
        ({"norm_placement": "last"}, r"`norm_placement` must be one of.*post"),
        ({"layer_norm_epsilon": 0}, "`layer_norm_epsilon` must be a finite"),
        (
            {"layer_scale": -1.0},
            "`layer_scale` must be a finite number above 0 or",
        ),
        ({"use_bias": None}, "`use_bias` must be True or False"),
        ({"attention_bias": 1}, "`attention_bias` must be True or False"),
        ({"dropout": 1.0}, "`dropout` must be a rate"),
        ({"attention_dropout": -0.1}, "`attention_dropout` must be a rate"),
        ({"stochastic_depth": 1.5}, "`stochastic_depth` must be a rate"),
        ({"mask": "causal"}, "`mask` must be a Mask or None.*Explicit"),
        ({"attention": "full"}, "`attention` must be a layer or None"),
        ({"position": "polar"}, "`position` must be.*'polar'"),
        ({"position": Learned(9)}, "acts on queries.*`PositionalEmbedding`"),
        (
            {"feed_forward": FeedForward(10), "activation": "gelu"},
            "`activation` must be left at None with `feed_forward`.*in the la",
        ),
        (
            {"feed_forward": FeedForward(11)},
            "`intermediate_dim` must be left at 11 with `feed_forward`",
        ),
        (
            {
                "normalization": keras.layers.LayerNormalization(),
                "layer_norm_epsilon": 0.1,
            },
            "`layer_norm_epsilon` must be left at 1e-05 with `normalization`",
        ),
        (
            {"attention": MultiHeadAttention(4), "mask": Causal()},
            r"`mask` must be left at Full\(\) with `attention`",
        ),
        (
            {"attention": MultiHeadAttention(4), "position": "rope"},
            "`position` must be left at None with `attention`",
        ),
        (
            {"attention": MultiHeadAttention(2)},
            "`num_heads` must be left at 2 with `attention`",
        ),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoder(**{**BASE, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "`num_heads` must be a divisor.*24.*`key_dim`"),
        ({"num_key_value_heads": 3}, "must be a divisor of num_heads=4"),
        ({"feed_forward": "sparse"}, r"`feed_forward` must be one of.*gated"),
        ({"normalization": "batch"}, "`normalization` must be.*a layer"),
        (
            {"attention": MultiHeadAttention(4), "key_dim": 3},
            "`key_dim` must be left at None with `attention`",
        ),
    ],
)
def test_rejects_what_does_not_fit_when_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        built(**arguments)


def test_a_mask_without_its_data_raises():
    with pytest.raises(ValueError, match="segment_ids"):
        built(mask=Documents())(INPUTS)
