import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    PerHead,
    Prefix,
    SlidingWindow,
)
from keras_transformer.positions import (
    ALiBi,
    Learned,
    RelativePositionBias,
    RoPE,
)
from tests.attention.checks import (
    assert_slopes,
    compiled,
    fast_gradients,
)
from tests.attention.layers import (
    CROSS,
    INPUTS,
    KEY_WIDTH,
    OUTPUT_DIM,
    SHAPE,
    VALUE_WIDTH,
    built,
    expected,
    named_weights,
)
from tests.layer_contract import check_layer
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.reference.attention import multi_head, rotated
from tests.sizes import (
    BATCH,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
    VALUE_DIM,
)

BACKEND = keras.backend.backend()
SLOTS = np.arange(QUERY_LENGTH)
ALLOWED = np.tri(QUERY_LENGTH, dtype=bool)
# The slopes of ALiBi for four heads.
DISTANCE = (
    -abs(SLOTS - SLOTS[:, None])
    * (np.array([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None])
)
MORE = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 0, 1, 1]], bool)


def rotate(heads):
    return rotated(heads, np.arange(heads.shape[1]))


# Name to constructor arguments and what they mean for the reference.
OPTIONS = {
    "defaults": ({}, {}),
    "one key head": ({"num_key_value_heads": 1}, {"groups": 1}),
    "two key heads": ({"num_key_value_heads": 2}, {"groups": 2}),
    "widths": (
        {"key_dim": 10, "value_dim": VALUE_DIM, "output_dim": OUTPUT_DIM},
        {},
    ),
    "no biases": ({"use_bias": False}, {}),
    "mask": ({"mask": Causal()}, {"allowed": ALLOWED}),
    "rope": ({"position": "rope"}, {"rotate": rotate}),
    "alibi": ({"position": "alibi"}, {"bias": DISTANCE}),
    "scale": ({"scale": 0.9}, {"scale": 0.9}),
    "soft cap": ({"soft_cap": 0.5}, {"soft_cap": 0.5}),
    "rms norm": ({"query_key_norm": "rms_norm"}, {"norm": "rms_norm"}),
    "layer norm": ({"query_key_norm": "layer_norm"}, {"norm": "layer_norm"}),
    "sinks": ({"use_sinks": True}, {}),
    "gate": ({"use_gate": True}, {}),
    "everything": (
        {
            "key_dim": 10,
            "value_dim": VALUE_DIM,
            "output_dim": OUTPUT_DIM,
            "num_key_value_heads": 2,
            "mask": Causal(),
            "position": "rope",
            "scale": 0.9,
            "soft_cap": 0.5,
            "query_key_norm": "rms_norm",
            "use_sinks": True,
            "use_gate": True,
        },
        {
            "groups": 2,
            "allowed": ALLOWED,
            "rotate": rotate,
            "scale": 0.9,
            "soft_cap": 0.5,
            "norm": "rms_norm",
        },
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_self_attention_matches_the_formula(option):
    arguments, options = OPTIONS[option]
    layer = built(**arguments)
    outputs, scores = expected(layer, **options)
    assert_close(layer(**INPUTS), outputs)
    found, found_scores = layer(**INPUTS, return_attention_scores=True)
    assert_close(found, outputs)
    assert_close(found_scores, scores)


@pytest.mark.parametrize(
    "option", ["defaults", "widths", "two key heads", "gate"]
)
def test_cross_attention_matches_the_formula(option):
    arguments, options = OPTIONS[option]
    layer = built(CROSS, **arguments)
    outputs, scores = expected(layer, CROSS, **options)
    assert_close(layer(*tensors(CROSS)), outputs)
    found, found_scores = layer(**CROSS, return_attention_scores=True)
    assert_close(found, outputs)
    assert_close(found_scores, scores)


@pytest.mark.parametrize(
    ("option", "inputs"),
    [("defaults", INPUTS), ("everything", INPUTS), ("widths", CROSS)],
    ids=["self", "self with everything", "cross"],
)
def test_gradients_of_inputs_and_weights_match_the_formula(option, inputs):
    arguments, options = OPTIONS[option]
    layer = built(inputs, **arguments)
    weights = named_weights(layer)
    arrays = {**inputs, **weights}
    width = layer.output_dim or MODEL_DIM
    cotangent = normal(BATCH, QUERY_LENGTH, width, seed=9)
    fixed = [variable.value for variable in layer.non_trainable_variables]

    def loss(*values):
        values = list(values)
        outputs, _ = layer.stateless_call(
            values[len(inputs) :], fixed, *values[: len(inputs)]
        )
        return ops.sum(ops.multiply(outputs, cotangent))

    def reference(moved):
        moved_inputs = {name: moved[name] for name in inputs}
        outputs, _ = multi_head(
            {name: moved[name] for name in weights},
            **{"value": moved["query"], **moved_inputs},
            num_heads=NUM_HEADS,
            **options,
        )
        return (outputs * cotangent).sum()

    found = fast_gradients(
        loss, *(array.astype("float32") for array in arrays.values())
    )
    found = dict(zip(arrays, found, strict=True))
    if "key/bias" in found and options.get("norm") is None:
        # It adds the same to all scores of a query: no gradient but rounding,
        # unless rotation turns it.
        bias_gradient = found.pop("key/bias")
        if "rotate" not in options:
            assert abs(bias_gradient).max() < 1e-4
    assert_slopes(found, reference, arrays)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", ["defaults", "everything"])
def test_mixed_policies_stay_close_to_the_formula(option, dtype):
    arguments, options = OPTIONS[option]
    layer = built(**arguments, dtype=f"mixed_{dtype}")
    outputs, _ = expected(layer, **options)
    actual = compiled(layer)(*tensors(INPUTS))
    assert keras.backend.standardize_dtype(actual.dtype) == dtype
    assert_close(ops.cast(actual, "float32"), outputs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_blind_query_gets_the_output_bias_alone(dtype):
    layer = built(mask=SlidingWindow(1), use_gate=True, dtype=dtype)
    padding = np.ones((BATCH, QUERY_LENGTH), bool)
    padding[1, 2] = False
    outputs = ops.cast(layer(**INPUTS, padding_mask=padding), "float32")
    bias = named_weights(layer)["output/bias"].astype("float16")
    np.testing.assert_allclose(to_numpy(outputs)[1, 2], bias, rtol=1e-3)


# Every constructor argument with a value that is not its default.
CHANGED = {
    "num_heads": 3,
    "key_dim": 10,
    "num_key_value_heads": 2,
    "value_dim": VALUE_DIM,
    "output_dim": OUTPUT_DIM,
    "mask": Causal() & SlidingWindow(2),
    "position": "rope",
    "dropout": 0.5,
    "use_bias": False,
    "scale": 0.9,
    "soft_cap": 0.1,
    "query_key_norm": keras.layers.RMSNormalization(epsilon=0.1),
    "use_sinks": True,
    "use_gate": True,
    "kernel_initializer": keras.initializers.RandomNormal(0.0, 0.2, seed=4),
    "bias_initializer": "ones",
    "implementation": "dense",
    "seed": 5,
}


def test_the_walk_below_covers_every_argument():
    names = inspect.signature(MultiHeadAttention.__init__).parameters
    assert set(CHANGED) == set(names) - {"self", "kwargs"}


@pytest.mark.parametrize("name", CHANGED)
def test_no_option_is_inert(name):
    changes = {name: CHANGED[name]}
    base = {"num_heads": NUM_HEADS, "kernel_initializer": fixed_normal()}
    training = name in ("dropout", "seed")
    if name == "dropout":
        base["seed"] = 1
    if name == "seed":
        base["dropout"] = 0.5
    if name == "use_bias":
        base["bias_initializer"] = "ones"
    layer = MultiHeadAttention(**{**base, **changes})
    config = json.loads(json.dumps(layer.get_config()))
    rebuilt = MultiHeadAttention.from_config(config)
    assert json.loads(json.dumps(rebuilt.get_config())) == config
    if name == "implementation":
        # Another kernel computes the same: it can only refuse.
        with pytest.raises(ValueError, match="cannot be honoured"):
            MultiHeadAttention(4, implementation="fused")(
                **INPUTS, return_attention_scores=True
            )
        return
    default = MultiHeadAttention(**base)
    plain, other, again = (
        to_numpy(x(**INPUTS, training=training))
        for x in (default, layer, rebuilt)
    )
    np.testing.assert_allclose(other, again, rtol=1e-6)
    assert plain.shape != other.shape or not np.allclose(
        plain, other, rtol=1e-3
    )


def fixed_normal():
    return keras.initializers.RandomNormal(0.0, 0.3, seed=2)


def test_keeps_the_layer_contract():
    check_layer(
        MultiHeadAttention,
        {
            "num_heads": NUM_HEADS,
            "num_key_value_heads": 2,
            "value_dim": VALUE_DIM,
            "mask": Causal() & (SlidingWindow((2, 0)) | Prefix(1)),
            "position": RelativePositionBias(8, 16, bidirectional=False),
            "query_key_norm": "rms_norm",
            "use_sinks": True,
            "use_gate": True,
            "dropout": 0.1,
        },
        INPUTS,
        output_shape=SHAPE,
        num_weights=10 + 2 + 1 + 1,
    )


def test_keeps_the_layer_contract_in_cross_attention():
    check_layer(
        MultiHeadAttention,
        {"num_heads": NUM_HEADS, "output_dim": OUTPUT_DIM},
        CROSS,
        output_shape=(*SHAPE[:2], OUTPUT_DIM),
        num_weights=8,
    )


def test_weights_are_named_by_part_however_the_layer_was_called():
    names = [
        f"{part}/{kind}"
        for part in ("query", "key", "value", "output")
        for kind in ("kernel", "bias")
    ]
    by_itself = MultiHeadAttention(NUM_HEADS)
    by_itself(**INPUTS)
    twice = MultiHeadAttention(NUM_HEADS)
    twice(INPUTS["query"], INPUTS["query"])
    cross = MultiHeadAttention(NUM_HEADS)
    cross(**CROSS)
    for layer in (by_itself, twice, cross):
        assert list(named_weights(layer)) == names


@pytest.mark.parametrize("length", [None, KEY_LENGTH])
def test_symbolic_scores_have_the_shape_of_eager_ones(length):
    layer = built(CROSS)
    outputs, scores = layer(
        keras.Input((QUERY_LENGTH, MODEL_DIM)),
        keras.Input((length, VALUE_WIDTH)),
        keras.Input((length, KEY_WIDTH)),
        return_attention_scores=True,
    )
    assert outputs.shape == (None, QUERY_LENGTH, MODEL_DIM)
    assert scores.shape == (None, NUM_HEADS, QUERY_LENGTH, length)
    _, eager = layer(**CROSS, return_attention_scores=True)
    assert eager.shape == (BATCH, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH)


def test_a_model_of_unknown_length_takes_every_length():
    inputs = keras.Input((None, MODEL_DIM))
    layer = built(mask=Causal(), position="rope")
    model = keras.Model(inputs, layer(inputs))
    for length in (2, QUERY_LENGTH):
        piece = INPUTS["query"][:, :length]
        outputs, _ = expected(
            layer,
            {"query": piece},
            allowed=ALLOWED[:length, :length],
            rotate=rotate,
        )
        assert_close(model(piece), outputs)
        assert_close(model.predict(piece, verbose=0), outputs)


@pytest.mark.parametrize("option", ["defaults", "alibi", "everything"])
def test_a_compiled_call_equals_the_formula(option):
    arguments, options = OPTIONS[option]
    layer = built(**arguments)
    outputs, _ = expected(layer, **options)
    assert_close(compiled(layer)(*tensors(INPUTS)), outputs)


def test_a_compiled_call_takes_all_its_data_as_tensors():
    layer = built(mask=(Causal() | Prefix()) & Documents(), position="t5")

    def call(query, padding_mask, segment_ids, prefix_length, positions):
        return layer(
            query,
            padding_mask=padding_mask,
            segment_ids=segment_ids,
            prefix_length=prefix_length,
            positions=positions,
        )

    segments = np.array([[0, 0, 1, 1, 1]] * BATCH, "int32")
    prefix = np.array([0, 2, 4], "int32")
    positions = np.array([[0, 1, 0, 1, 2]] * BATCH, "int32")
    values = (INPUTS["query"], MORE, segments, prefix, positions)
    table = to_numpy(layer.position.embeddings)
    # Distances below 8 have buckets of their own, the future ones from 16.
    offset = positions[:, None] - positions[:, :, None]
    buckets = np.where(offset > 0, 16 + offset, -offset)
    allowed = (ALLOWED | (prefix[:, None, None] > SLOTS)) & MORE[:, None]
    allowed &= segments[:, None] == segments[:, :, None]
    outputs, _ = expected(
        layer,
        allowed=allowed[:, None],
        bias=table[buckets].transpose(0, 3, 1, 2),
    )
    arguments = [ops.convert_to_tensor(value) for value in values]
    assert_close(compiled(call)(*arguments), outputs)
    assert_close(call(*values), outputs)


def test_use_causal_mask_ands_causal():
    layer = built(mask=SlidingWindow((9, 2)))
    outputs, _ = expected(layer, allowed=ALLOWED)
    assert_close(layer(**INPUTS, use_causal_mask=True), outputs)


def test_positions_reach_queries_and_keys():
    layer = built(CROSS, position="rope")
    positions, key_positions = SLOTS + 4, np.arange(KEY_LENGTH) * 2
    outputs, _ = expected(
        layer,
        CROSS,
        rotate=lambda heads: rotated(
            heads,
            positions if heads.shape[1] == QUERY_LENGTH else key_positions,
        ),
    )
    found = layer(
        **CROSS,
        positions=positions.astype("int32"),
        key_positions=key_positions.astype("int32"),
    )
    assert_close(found, outputs)


def test_a_given_norm_may_have_another_policy():
    layer = built(
        query_key_norm=keras.layers.RMSNormalization(epsilon=1e-6),
        dtype="mixed_bfloat16",
    )
    outputs, _ = expected(layer, norm="rms_norm")
    actual = compiled(layer)(*tensors(INPUTS))
    assert keras.backend.standardize_dtype(actual.dtype) == "bfloat16"
    assert_close(ops.cast(actual, "float32"), outputs, "bfloat16")


def test_dropout_acts_in_training_only():
    layer = built(dropout=0.5, seed=3)
    outputs, _ = expected(layer)
    assert_close(layer(**INPUTS), outputs)
    assert_close(layer(**INPUTS, training=False), outputs)
    first = to_numpy(layer(**INPUTS, training=True))
    second = to_numpy(layer(**INPUTS, training=True))
    assert not np.allclose(first, outputs)
    assert not np.allclose(first, second)


def test_dropout_leaves_the_kernel_to_inference():
    layer = built(dropout=0.5, implementation="fused")
    if BACKEND == "torch":
        assert_close(layer(**INPUTS), expected(layer)[0])
        with pytest.raises(ValueError, match="dropout on the weights is left"):
            layer(**INPUTS, training=True)
    else:
        reason = "it needs a CUDA GPU|TensorFlow has no fused"
        with pytest.raises(ValueError, match=reason):
            layer(**INPUTS)


def test_a_saved_model_gives_the_same_outputs(tmp_path):
    inputs = keras.Input((None, MODEL_DIM))
    layer = MultiHeadAttention(
        NUM_HEADS,
        mask=PerHead([Causal(), Full(), SlidingWindow((1, 2)), Prefix(2)]),
        position=RelativePositionBias(8, 16),
        query_key_norm=keras.layers.LayerNormalization(epsilon=0.1),
        use_sinks=True,
    )
    model = keras.Model(inputs, layer(inputs))
    randomize_weights(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded(INPUTS["query"]), to_numpy(model(INPUTS["query"])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "`num_heads` must be a positive integer"),
        ({"key_dim": 1.5}, "`key_dim` must be a positive integer or None"),
        ({"value_dim": -1}, "`value_dim` must be a positive integer or None"),
        ({"output_dim": 0}, "`output_dim` must be a positive integer or None"),
        ({"num_key_value_heads": 3}, "must be a divisor of num_heads=4"),
        ({"dropout": 1.0}, r"`dropout` must be a rate in \[0, 1\)"),
        ({"scale": 0}, "`scale` must be a finite number above 0"),
        ({"soft_cap": -1.0}, "`soft_cap` must be a finite number above 0"),
        ({"use_bias": 1}, "`use_bias` must be True or False"),
        ({"use_sinks": None}, "`use_sinks` must be True or False"),
        ({"use_gate": "yes"}, "`use_gate` must be True or False"),
        ({"implementation": "flash"}, "`implementation` must be one of"),
        ({"mask": np.ones(2)}, "`mask` must be a Mask or None.*Explicit"),
        (
            {"mask": PerHead([Causal(), Full()])},
            "2 masks, one a head.*num_heads=4",
        ),
        ({"position": "rotary"}, "`position` must be None, a position scheme"),
        ({"position": Learned(9)}, "give it to `PositionalEmbedding`"),
        ({"query_key_norm": "batch"}, '"layer_norm" or a layer'),
    ],
)
def test_bad_arguments_are_rejected_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"num_heads": NUM_HEADS, **arguments})


def test_a_width_that_heads_do_not_divide_is_rejected():
    with pytest.raises(ValueError, match=r"divisor of the model width 24.*key"):
        MultiHeadAttention(5).build(SHAPE)


@pytest.mark.parametrize(
    "shape", [(None, QUERY_LENGTH, None), (None, MODEL_DIM)]
)
def test_inputs_of_another_rank_or_unknown_width_are_rejected(shape):
    with pytest.raises(ValueError, match="`query` must have shape"):
        MultiHeadAttention(NUM_HEADS)(keras.Input(shape[1:]))


def test_data_that_the_mask_lacks_is_named():
    layer = built(mask=Documents())
    with pytest.raises(ValueError, match="`segment_ids` must be given"):
        layer(**INPUTS)


def test_a_scheme_bound_to_other_heads_is_rejected():
    with pytest.raises(ValueError, match="Give each layer its own ALiBi"):
        MultiHeadAttention(NUM_HEADS, position=ALiBi(num_heads=3)).build(SHAPE)


def test_an_odd_head_dimension_cannot_be_rotated():
    with pytest.raises(ValueError, match="even"):
        MultiHeadAttention(NUM_HEADS, 5, position=RoPE())(**INPUTS)


def tensors(inputs):
    return [ops.convert_to_tensor(array) for array in inputs.values()]
