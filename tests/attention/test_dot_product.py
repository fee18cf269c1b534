import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import dot_product_attention
from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from tests.attention.checks import (
    assert_slopes,
    compiled,
    fast_gradients,
)
from tests.numerics import assert_close, normal, to_numpy
from tests.reference.attention import attention
from tests.sizes import (
    BATCH,
    KEY_DIM,
    KEY_LENGTH,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    QUERY_LENGTH,
    VALUE_DIM,
)

BACKEND = keras.backend.backend()
SCORES = (BATCH, NUM_HEADS, QUERY_LENGTH, KEY_LENGTH)
SLOTS_Q = np.arange(QUERY_LENGTH)[:, None]
SLOTS_K = np.arange(KEY_LENGTH)
CAUSAL = SLOTS_K <= SLOTS_Q
PADDING = np.arange(KEY_LENGTH) < np.array([[4], [7], [0]])
PAIRS = np.random.default_rng(1).random((BATCH, *SCORES[2:])) < 0.6
PAIRS[0, 2] = False
PAIRS_OF_HEADS = np.random.default_rng(2).random(SCORES) < 0.6
QUERY_IDS = np.array([[0, 0, 1, 1, 2]] * BATCH, "int32")
KEY_IDS = np.array([[0, 1, 1, 1, 2, 2, 3]] * BATCH, "int32")
KEY_SLOTS = np.array([[4, 5, -1, 3, 2, -1, 6]] * BATCH, "int32")
BIAS = normal(NUM_HEADS, *SCORES[2:], seed=5)
SINKS = normal(NUM_HEADS, seed=6)

# Name to the arguments of the function and those of the reference.
CASES = {
    "nothing": ({}, {}),
    "causal mask": ({"mask": Causal()}, {"allowed": CAUSAL}),
    "causal mask and padding": (
        {"mask": Causal(), "padding_mask": PADDING},
        {"allowed": CAUSAL & PADDING[:, None, None]},
    ),
    "one mask a head": (
        {"mask": PerHead([Causal(), Full(), Strided(2), SlidingWindow(2)])},
        {
            "allowed": np.stack(
                [
                    CAUSAL,
                    CAUSAL | True,
                    (SLOTS_Q - SLOTS_K) % 2 == 0,
                    abs(SLOTS_Q - SLOTS_K) < 2,
                ]
            )
        },
    ),
    "documents": (
        {
            "mask": Documents(),
            "segment_ids": QUERY_IDS,
            "key_segment_ids": KEY_IDS,
        },
        {"allowed": (QUERY_IDS[:, :, None] == KEY_IDS[:, None])[:, None]},
    ),
    "a prefix for each row": (
        {"mask": Causal() | Prefix(), "prefix_length": np.array([0, 3, 5])},
        {
            "allowed": CAUSAL
            | (np.array([0, 3, 5])[:, None, None, None] > SLOTS_K)
        },
    ),
    "slots out of order, some empty": (
        {
            "mask": Causal(),
            "query_slots": np.arange(2, 2 + QUERY_LENGTH),
            "key_slots": KEY_SLOTS,
        },
        {
            "allowed": (
                (KEY_SLOTS[:, None] <= SLOTS_Q + 2) & (KEY_SLOTS[:, None] >= 0)
            )[:, None]
        },
    ),
    "attention mask of three axes": (
        {"attention_mask": PAIRS, "mask": Causal()},
        {"allowed": PAIRS[:, None] & CAUSAL},
    ),
    "attention mask of two axes": (
        {"attention_mask": PAIRS[0].tolist(), "mask": Causal()},
        {"allowed": PAIRS[0] & CAUSAL},
    ),
    "attention mask of four axes": (
        {"attention_mask": PAIRS_OF_HEADS},
        {"allowed": PAIRS_OF_HEADS},
    ),
    "bias": ({"bias": BIAS[None]}, {"bias": BIAS}),
    "bias of three axes, padding": (
        {"bias": BIAS, "padding_mask": PADDING},
        {"bias": BIAS, "allowed": PADDING[:, None, None]},
    ),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "soft cap": ({"soft_cap": 0.5}, {"soft_cap": 0.5}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "everything": (
        {
            "mask": Causal(),
            "padding_mask": PADDING,
            "bias": BIAS[None],
            "scale": 0.7,
            "soft_cap": 0.5,
            "sinks": SINKS,
        },
        {
            "allowed": CAUSAL & PADDING[:, None, None],
            "bias": BIAS,
            "scale": 0.7,
            "soft_cap": 0.5,
            "sinks": SINKS,
        },
    ),
}
# Why a backend has no kernel for any call without a GPU or TPU.
REFUSAL = {
    "torch": None,
    "jax": "cudnn: it needs a CUDA GPU; splash_attention: it needs a TPU",
    "tensorflow": "TensorFlow has no fused",
}[BACKEND]


def arrays(groups=NUM_KEY_VALUE_HEADS, value_dim=VALUE_DIM):
    return {
        "query": normal(BATCH, QUERY_LENGTH, NUM_HEADS, KEY_DIM, seed=1),
        "key": normal(BATCH, KEY_LENGTH, groups, KEY_DIM, seed=2),
        "value": normal(BATCH, KEY_LENGTH, groups, value_dim, seed=3),
    }


@pytest.mark.parametrize("implementation", ["auto", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_match_the_formula(case, implementation):
    arguments, expected = CASES[case]
    outputs, _ = attention(**arrays(), **expected)
    assert_close(
        dot_product_attention(
            **tensors(arrays()), **arguments, implementation=implementation
        ),
        outputs,
    )


@pytest.mark.parametrize("case", CASES)
def test_scores_match_the_formula_and_are_0_where_masked(case):
    arguments, expected = CASES[case]
    outputs, weights = attention(**arrays(), **expected)
    actual, scores = dot_product_attention(
        **tensors(arrays()), **arguments, return_attention_scores=True
    )
    assert_close(actual, outputs)
    assert_close(scores, weights)
    masked = ~np.broadcast_to(expected.get("allowed", True), SCORES)
    assert (to_numpy(scores)[masked] == 0).all()


@pytest.mark.parametrize("groups", [1, NUM_HEADS])
def test_query_heads_read_the_key_head_of_their_group(groups):
    outputs, weights = attention(**arrays(groups), allowed=CAUSAL)
    call = {**tensors(arrays(groups)), "mask": Causal()}
    assert_close(dot_product_attention(**call), outputs)
    actual, scores = dot_product_attention(**call, return_attention_scores=True)
    assert_close(actual, outputs)
    assert_close(scores, weights)


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        (case, implementation)
        for case in (
            "causal mask",
            "causal mask and padding",
            "soft cap",
            "bias of three axes, padding",
            "everything",
        )
        for implementation in ("auto", "dense", "blockwise")
        # It evaluates biases tile by tile and takes no arrays.
        if implementation != "blockwise" or "bias" not in CASES[case][0]
    ],
)
def test_gradients_match_the_formula(case, implementation):
    arguments, expected = CASES[case]
    inputs = arrays()
    for name in ("bias", "sinks"):
        if name in arguments:
            inputs[name] = arguments[name]
    rest = {k: v for k, v in arguments.items() if k not in inputs}
    given = {k: v for k, v in expected.items() if k not in inputs}
    cotangent = normal(BATCH, QUERY_LENGTH, NUM_HEADS, VALUE_DIM, seed=9)

    def loss(*values):
        outputs = dot_product_attention(
            **dict(zip(inputs, values, strict=True)),
            **rest,
            implementation=implementation,
        )
        return ops.sum(ops.multiply(outputs, cotangent))

    found = fast_gradients(loss, *inputs.values())
    assert_slopes(
        dict(zip(inputs, found, strict=True)),
        lambda moved: (attention(**moved, **given)[0] * cotangent).sum(),
        inputs,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["nothing", "causal mask and padding", "bias"])
def test_half_precision_only_rounds_what_goes_in_and_out(case, dtype):
    arguments, expected = CASES[case]
    rounded = tensors(arrays(), dtype)
    outputs, _ = attention(
        **{k: as_float(value) for k, value in rounded.items()}, **expected
    )
    actual = dot_product_attention(**rounded, **arguments)
    assert keras.backend.standardize_dtype(actual.dtype) == dtype
    assert_close(as_float(actual), outputs, dtype, scale=0.3)


# Rows whose queries see nothing, by each means.
HIDING = {
    "padding": {"padding_mask": PADDING},
    "mask": {"mask": ~Full()},
    "attention mask": {"attention_mask": PAIRS & (SLOTS_Q != 1)},
    "empty slots": {"key_slots": np.full((BATCH, KEY_LENGTH), -1, "int32")},
}
HIDDEN = {
    "padding": (2,),
    "mask": ...,
    "attention mask": (slice(None), 1),
    "empty slots": ...,
}
EXTRAS = {
    "nothing": {},
    "bias": {"bias": BIAS[None]},
    "cap and sinks": {"bias": BIAS, "soft_cap": 0.5, "sinks": SINKS},
    "dropout": {"dropout": 0.4, "seed": 1},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("extra", ["nothing", "cap and sinks", "dropout"])
def test_a_query_that_sees_no_key_gets_0_and_gradient_0(extra, dtype):
    check_blind_rows(HIDING, EXTRAS[extra], dtype, "auto")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("extra", ["nothing", "bias"])
def test_the_fused_path_keeps_blind_queries_at_0_or_refuses(extra, dtype):
    if BACKEND == "torch" and (extra == "nothing" or dtype == "float32"):
        check_blind_rows(HIDING, EXTRAS[extra], dtype, "fused")
        return
    message = REFUSAL or "round score biases"
    for hiding in HIDING.values():
        with pytest.raises(ValueError, match=message):
            dot_product_attention(
                **tensors(arrays(), dtype),
                **hiding,
                **EXTRAS[extra],
                implementation="fused",
            )


def check_blind_rows(hiding, extra, dtype, implementation):
    inputs = list(tensors(arrays(), dtype).values())

    def call(values, arguments):
        return dot_product_attention(
            *values, **arguments, **extra, implementation=implementation
        )

    def loss(*values):
        # Each way of hiding has a copy of the inputs to itself.
        copies = zip(*[iter(values)] * 3, strict=True)
        calls = zip(copies, hiding.values(), strict=True)
        outputs = [call(*arguments) for arguments in calls]
        return sum(ops.sum(ops.cast(x, "float32")) for x in outputs)

    found = fast_gradients(loss, *(ops.copy(x) for _ in hiding for x in inputs))
    for index, (name, arguments) in enumerate(hiding.items()):
        outputs = as_float(call(inputs, arguments))
        assert np.isfinite(outputs).all(), name
        assert (outputs[HIDDEN[name]] == 0).all(), name
        query, key, value = found[3 * index : 3 * index + 3]
        assert all(np.isfinite(x).all() for x in (query, key, value)), name
        assert (query[HIDDEN[name]] == 0).all(), name
        if name != "attention mask":
            assert (key[HIDDEN[name]] == 0).all(), name
            assert (value[HIDDEN[name]] == 0).all(), name
    assert (value == 0).all()
    assert (found[2][1] != 0).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_masked_key_weighs_0_however_large_its_score(dtype):
    query = np.full((1, 2, 1, 2), 100.0)
    key = np.array([[1.0, 1.0], [-100, -100], [100, 100]])[None, :, None]
    _, scores = dot_product_attention(
        *(ops.convert_to_tensor(x, dtype) for x in (query, key, key)),
        mask=SlidingWindow((1, 0)) & ~Prefix(1),
        return_attention_scores=True,
        scale=1.0,
    )
    # Scores reach 2e4, and the only visible one is the lowest.
    np.testing.assert_array_equal(
        as_float(scores)[0, 0], [[0, 0, 0], [0, 1, 0]]
    )


def test_scores_as_low_as_float32_goes_are_above_masked_ones():
    query = np.full((1, 2, 1, 1), -1e19, "float32")
    key = np.array([1e19, 1.1e19], "float32").reshape(1, 2, 1, 1)
    value = np.array([[3.0, 5.0]], "float32").reshape(1, 2, 1, 1)
    outputs = dot_product_attention(
        **tensors({"query": query, "key": key, "value": value}),
        mask=Causal(),
        scale=1.0,
        implementation="dense",
    )
    assert_close(outputs, np.array([3.0, 3.0]).reshape(1, 2, 1, 1))


@pytest.mark.parametrize("low", [-np.inf, float(np.finfo("float32").min)])
def test_a_bias_of_the_lowest_numbers_hides_keys(low):
    # Row 1 sees key 0 alone, row 2 nothing but what the bias hides.
    bias = np.zeros((5, 7), "float32")
    bias[1, 1:] = low
    bias[2] = low
    call = arrays()
    outputs, weights = dot_product_attention(
        **tensors(call), mask=Causal(), bias=bias, return_attention_scores=True
    )
    weights = to_numpy(weights)
    assert np.array_equal(weights[:, :, 1, 1:], np.zeros((3, 4, 6)))
    assert np.array_equal(weights[:, :, :, 5:], np.zeros((3, 4, 5, 2)))
    # All hidden alike is hidden from nothing, unless without end.
    expected = np.zeros(7) if low == -np.inf else CAUSAL[2] / 3
    assert_close(weights[:, :, 2], np.broadcast_to(expected, (3, 4, 7)))
    allowed = CAUSAL & (bias == 0)
    allowed[2] = low != -np.inf and CAUSAL[2]
    expected, _ = attention(**call, allowed=allowed)
    rows = [0, 1, 3, 4]
    assert_close(outputs[:, 0], expected[:, 0])
    assert_close(to_numpy(outputs)[:, rows], expected[:, rows])
    if low == -np.inf:
        assert np.array_equal(to_numpy(outputs)[:, 2], np.zeros((3, 4, 8)))


def test_a_single_key_gets_all_weight_and_no_gradient_of_its_score():
    query, key, value = (x[:, :1] for x in arrays().values())
    outputs, weights = attention(query, key, value)
    call = [ops.convert_to_tensor(x) for x in (query, key, value)]
    found, scores = dot_product_attention(*call, return_attention_scores=True)
    assert_close(found, outputs)
    assert_close(scores, weights)
    query_gradient, *_ = fast_gradients(
        lambda *args: ops.sum(
            dot_product_attention(*args, implementation="dense") ** 2
        ),
        *call,
    )
    assert (query_gradient == 0).all()


def test_dropout_acts_on_weights_keeps_their_mean_and_follows_its_seed():
    def outputs(seed, dropout=0.5):
        return to_numpy(
            dot_product_attention(**tensors(inputs), dropout=dropout, seed=seed)
        )

    inputs = arrays()
    inputs["query"] = np.zeros((BATCH, QUERY_LENGTH, NUM_HEADS, KEY_DIM))
    inputs = {name: x.astype("float32") for name, x in inputs.items()}
    inputs["value"] = np.ones_like(inputs["value"])
    np.testing.assert_array_equal(outputs(1), outputs(1))
    assert (outputs(1) != outputs(2)).any()
    # Each kept key gives 2 / KEY_LENGTH, the same to all value features.
    kept = outputs(1)[..., 0] * KEY_LENGTH / 2
    np.testing.assert_allclose(kept, kept.round(), atol=1e-5)
    assert abs(kept.mean() / KEY_LENGTH - 0.5) < 0.1
    assert_close(outputs(1, 0.0), np.ones_like(outputs(1)))


@pytest.mark.parametrize(("rate", "dropped"), [(1e-6, 1), (0.9999999, 65535)])
def test_dropout_scales_by_the_rate_that_16_bits_can_hold(rate, dropped):
    query = np.zeros((1, 300, 2, 4), "float32")
    value = np.ones((1, 300, 2, 1), "float32")
    outputs = dot_product_attention(query, query, value, dropout=rate, seed=1)
    kept = to_numpy(outputs) * 300 * (2**16 - dropped) / 2**16
    np.testing.assert_allclose(kept, kept.round(), atol=1e-3)
    assert kept.any()


def test_scores_are_those_before_dropout():
    _, expected = attention(**arrays())
    _, scores = dot_product_attention(
        **tensors(arrays()), dropout=0.5, seed=1, return_attention_scores=True
    )
    assert_close(scores, expected)


@pytest.mark.parametrize(
    "case", ["one mask a head", "slots out of order, some empty", "everything"]
)
def test_compiled_call_with_traced_data_equals_the_formula(case):
    arguments, expected = CASES[case]
    data = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in arguments.items() if k not in data}
    inputs = {**arrays(), **data}

    def call(*values):
        return dot_product_attention(
            **dict(zip(inputs, values, strict=True)), **rest
        )

    values = [ops.convert_to_tensor(value) for value in inputs.values()]
    outputs, _ = attention(**arrays(), **expected)
    assert_close(compiled(call)(*values), outputs)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"return_attention_scores": True}, "scores were asked for"),
        ({"dropout": 0.1, "seed": 0}, "dropout on the weights"),
        ({"soft_cap": 1.0}, "it has no `soft_cap`"),
        ({"sinks": SINKS}, "it has no `sinks`"),
    ],
)
def test_a_kernel_that_cannot_do_the_call_is_refused(arguments, reason):
    if BACKEND == "tensorflow":
        reason = REFUSAL
    with pytest.raises(ValueError, match=f"cannot be honoured: .*{reason}"):
        dot_product_attention(
            **tensors(arrays()), **arguments, implementation="fused"
        )


def test_causal_and_full_attention_take_the_kernel_where_there_is_one():
    inputs = arrays(value_dim=KEY_DIM)
    inputs["key"] = inputs["key"][:, :QUERY_LENGTH]
    inputs["value"] = inputs["value"][:, :QUERY_LENGTH]
    call = tensors(inputs)
    for mask, allowed in (
        (Causal(), CAUSAL[:, :QUERY_LENGTH]),
        (Full() & Causal(), CAUSAL[:, :QUERY_LENGTH]),
        (None, None),
    ):
        expected, _ = attention(**inputs, allowed=allowed)
        if REFUSAL is not None:
            with pytest.raises(ValueError, match=REFUSAL):
                dot_product_attention(**call, mask=mask, implementation="fused")
        else:
            outputs = dot_product_attention(
                **call, mask=mask, implementation="fused"
            )
            assert_close(outputs, expected)


def test_a_causal_kernel_is_not_taken_for_keys_of_another_length():
    # Kernels may align the last query with the last key; slots do not.
    outputs, _ = attention(**arrays(), allowed=CAUSAL)
    assert_close(
        dot_product_attention(**tensors(arrays()), mask=Causal()), outputs
    )


def tensors(values, dtype="float32"):
    return {k: ops.convert_to_tensor(v, dtype) for k, v in values.items()}


def as_float(tensor):
    return to_numpy(ops.cast(tensor, "float32"))


@pytest.mark.parametrize("implementation", ["auto", "dense"])
@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_a_single_row_or_query_keeps_its_mask(mask, implementation):
    # Nothing tells their shapes from those of a mask that is not there.
    arrays_ = {name: array[:1] for name, array in arrays().items()}
    allowed = np.broadcast_to(True, (QUERY_LENGTH, KEY_LENGTH))
    if mask == Causal():
        allowed = CAUSAL
    padding = np.arange(KEY_LENGTH)[None] >= 1
    for queries in (QUERY_LENGTH, 1):
        arrays_["query"] = arrays_["query"][:, :queries]
        outputs, _ = attention(**arrays_, allowed=allowed[:queries] & padding)
        actual = dot_product_attention(
            **tensors(arrays_),
            mask=mask,
            padding_mask=padding,
            implementation=implementation,
        )
        assert_close(actual, outputs)
