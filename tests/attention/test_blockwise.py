import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_transformer import (
    ALiBi,
    Causal,
    Documents,
    Explicit,
    Full,
    MultiHeadAttention,
    Padding,
    PerHead,
    Prefix,
    RelativePositionBias,
    RoPE,
    SlidingWindow,
    Strided,
    dot_product_attention,
)
from keras_transformer._internal.backends import backend
from tests.masks.trees import Case, trees
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.reference.attention import attention

# Lengths that fill no block, and more heads than groups.
BATCH, QUERY_LENGTH, KEY_LENGTH = 3, 21, 37
NUM_HEADS, NUM_GROUPS, KEY_DIM, VALUE_DIM = 4, 2, 6, 8
seeds = st.integers(0, 2**16)
SLOTS_Q = np.arange(QUERY_LENGTH)
SLOTS_K = np.arange(KEY_LENGTH)

IDS = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, QUERY_LENGTH)))
KEY_IDS = np.sort(np.random.default_rng(1).integers(0, 4, (BATCH, KEY_LENGTH)))
DATA = {
    "padding_mask": np.array([[KEY_LENGTH], [KEY_LENGTH // 2], [0]]) > SLOTS_K,
    "segment_ids": IDS.astype("int32"),
    "key_segment_ids": KEY_IDS.astype("int32"),
    "prefix_length": np.array([3, 20, 50], "int32"),
}
TABLE = np.random.default_rng(2).random((QUERY_LENGTH, KEY_LENGTH)) < 0.1


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    # So that short sequences have many of them.
    monkeypatch.setattr(backend, "TILE_SIZES", {(8, 16): 1.0})


def inputs(groups=NUM_GROUPS):
    return {
        "query": normal(BATCH, QUERY_LENGTH, NUM_HEADS, KEY_DIM, seed=1),
        "key": normal(BATCH, KEY_LENGTH, groups, KEY_DIM, seed=2),
        "value": normal(BATCH, KEY_LENGTH, groups, VALUE_DIM, seed=3),
    }


def data_of(mask, padding=False):
    names = set(mask.data_names)
    if "segment_ids" in names:
        names.add("key_segment_ids")
    if padding:
        names.add("padding_mask")
    return {name: DATA[name] for name in names}


def scheme(kind):
    if kind is None:
        return None
    layer = ALiBi() if kind == "alibi" else RelativePositionBias(8, 20)
    layer.bind(NUM_HEADS)
    randomize_weights(layer)
    return layer


def gradients_of(call, arrays, upstream):
    """The outputs and the gradients of `call`, compiled as in training."""
    name = keras.backend.backend()
    tensors = [ops.convert_to_tensor(array) for array in arrays]
    upstream = ops.convert_to_tensor(upstream)
    if name == "jax":
        import jax

        @jax.jit
        def run(*tensors):
            outputs, pull_back = jax.vjp(call, *tensors)
            return outputs, pull_back(upstream)

        outputs, found = run(*tensors)
    elif name == "tensorflow":
        import tensorflow as tf

        @tf.function(jit_compile=True, autograph=False)
        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                outputs = call(*tensors)
            return outputs, tape.gradient(
                outputs, tensors, output_gradients=upstream
            )

        outputs, found = run(*tensors)
    else:
        import torch

        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = call(*leaves)
        found = torch.autograd.grad(outputs, leaves, upstream)
    return to_numpy(outputs), [to_numpy(gradient) for gradient in found]


def both(mask, data, *, bias=None, sinks=None, groups=NUM_GROUPS, **options):
    """Outputs and gradients, blockwise and dense."""
    arrays = {**inputs(groups)}
    layer = scheme(bias)
    variables = [] if layer is None else layer.variables
    for index, variable in enumerate(variables):
        arrays[f"bias_{index}"] = to_numpy(variable).astype("float32")
    if sinks is not None:
        arrays["sinks"] = sinks
    upstream = normal(BATCH, QUERY_LENGTH, NUM_HEADS, VALUE_DIM, seed=9)

    def call_with(implementation):
        def call(*tensors):
            named = dict(zip(arrays, tensors, strict=True))
            weights = [
                named.pop(f"bias_{index}") for index in range(len(variables))
            ]
            mapping = list(zip(variables, weights, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return dot_product_attention(
                    **named,
                    mask=mask,
                    **data,
                    bias=layer,
                    **options,
                    implementation=implementation,
                )

        return gradients_of(call, arrays.values(), upstream)

    return call_with("blockwise"), call_with("dense")


CASES = {
    "nothing": (Full(), {}),
    "causal": (Causal(), {}),
    "padding": (Causal(), {"padding": True}),
    "documents": (Causal() & Documents(), {}),
    "prefix": (Causal() | Prefix(), {"padding": True}),
    "not documents": (~Documents() & SlidingWindow(20), {}),
    "window and soft cap": (SlidingWindow(9), {"soft_cap": 0.7}),
    "table": (Explicit(TABLE), {}),
    "nobody": (~Full(), {}),
    "nobody, sinks": (~Full(), {"sinks": normal(NUM_HEADS, seed=4)}),
    "one mask a head": (
        PerHead([Causal(), SlidingWindow(5), Strided(7), Full()]),
        {"padding": True},
    ),
    "alibi": (Causal(), {"bias": "alibi"}),
    "t5 bias": (Causal() | Prefix(5), {"bias": "t5"}),
    "dropout": (Causal(), {"dropout": 0.3, "seed": 7}),
    "scale": (Padding(), {"padding": True, "scale": 0.9}),
    "one group": (Causal(), {"groups": 1}),
    "a group a head": (Causal(), {"groups": NUM_HEADS}),
    "everything": (
        PerHead([Causal(), SlidingWindow(5), Prefix(), Full()]) & Documents(),
        {
            "padding": True,
            "bias": "t5",
            "soft_cap": 0.9,
            "sinks": normal(NUM_HEADS, seed=4),
            "dropout": 0.2,
            "seed": 3,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_dense_executor(case):
    mask, options = CASES[case]
    options = dict(options)
    data = data_of(mask, options.pop("padding", False))
    (found, slopes), (expected, expected_slopes) = both(mask, data, **options)
    assert_close(found, expected)
    assert len(slopes) == len(expected_slopes)
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        assert_close(slope, expected_slope)


@pytest.mark.parametrize(
    "case", ["causal", "padding", "documents", "prefix", "table", "nobody"]
)
def test_outputs_match_the_formula(case):
    mask, options = CASES[case]
    data = data_of(mask, options.get("padding", False))
    expected, _ = attention(
        **inputs(), allowed=allowed_by(mask, data), soft_cap=0.6
    )
    outputs = dot_product_attention(
        **inputs(),
        mask=mask,
        **data,
        soft_cap=0.6,
        implementation="blockwise",
    )
    assert_close(outputs, expected)


@settings(max_examples=5, deadline=None)
@given(tree=trees, seed=seeds)
def test_any_mask_gives_what_its_rules_say(tree, seed):
    mask, meaning = tree
    case = Case(seed, QUERY_LENGTH, KEY_LENGTH, plain=True)
    arrays = inputs()
    expected, _ = attention(**arrays, allowed=case.expected(meaning))
    data = case.arrays_for(mask)
    outputs = dot_product_attention(
        **arrays, mask=mask, **data, implementation="blockwise"
    )
    assert_close(outputs, expected)


def allowed_by(mask, data):
    dense = mask.dense(QUERY_LENGTH, KEY_LENGTH, **data)
    return ops.convert_to_numpy(dense)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_only_rounds_what_goes_in_and_out(dtype):
    rounded = {
        name: ops.convert_to_tensor(array, dtype)
        for name, array in inputs().items()
    }
    exact = {
        name: to_numpy(ops.cast(tensor, "float32"))
        for name, tensor in rounded.items()
    }
    outputs = dot_product_attention(
        **rounded, mask=Causal(), implementation="blockwise"
    )
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected, _ = attention(**exact, allowed=allowed_by(Causal(), {}))
    outputs = to_numpy(ops.cast(outputs, "float32"))
    assert_close(outputs, expected, dtype, scale=0.3)


def test_scores_that_overflow_are_masked_like_others():
    arrays = inputs()
    arrays["key"][:, QUERY_LENGTH:] = 1e30
    arrays["query"] = 1e30 * np.sign(arrays["query"])
    arrays["key"][:, :QUERY_LENGTH] = 0.0
    outputs = dot_product_attention(
        **arrays, mask=Causal(), implementation="blockwise"
    )
    allowed = allowed_by(Causal(), {})
    arrays["key"][:] = 0.0
    assert_close(outputs, attention(**arrays, allowed=allowed)[0])


def test_huge_scores_stay_finite():
    arrays = inputs()
    arrays["query"] = arrays["query"] * 1e4
    outputs = dot_product_attention(
        **arrays, mask=Causal(), implementation="blockwise"
    )
    expected, _ = attention(**arrays, allowed=allowed_by(Causal(), {}))
    assert_close(outputs, expected)


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_short_sequences_are_a_tile_of_their_own(length):
    arrays = {name: array[:, :length] for name, array in inputs().items()}
    outputs = dot_product_attention(
        **arrays, mask=Causal(), implementation="blockwise"
    )
    allowed = np.tri(length, dtype=bool)
    assert_close(outputs, attention(**arrays, allowed=allowed)[0])


def test_a_scheme_that_is_not_built_gets_its_weights():
    layer = RelativePositionBias(8, 20, initializer="random_normal")
    call = {**inputs(), "mask": Causal(), "bias": layer}
    blockwise = dot_product_attention(**call, implementation="blockwise")
    assert len(layer.weights) == 1
    dense = dot_product_attention(**call, implementation="dense")
    assert_close(blockwise, to_numpy(dense))


def test_positions_move_a_bias_and_not_the_mask():
    call = {**inputs(), "mask": Causal(), "bias": scheme("t5")}
    positions = np.random.default_rng(5).permutation(QUERY_LENGTH)
    key_positions = np.tile(SLOTS_K // 2, (BATCH, 1))
    moved = {"positions": positions, "key_positions": key_positions}
    dense = dot_product_attention(**call, **moved, implementation="dense")
    blockwise = dot_product_attention(
        **call, **moved, implementation="blockwise"
    )
    assert_close(blockwise, to_numpy(dense))
    unmoved = dot_product_attention(**call, implementation="blockwise")
    assert not np.allclose(to_numpy(unmoved), to_numpy(dense), atol=1e-3)


def test_dropout_is_a_function_of_its_seed():
    call = {
        **inputs(),
        "mask": Causal(),
        "dropout": 0.5,
        "implementation": "blockwise",
    }
    first, again, other = (
        to_numpy(dot_product_attention(**call, seed=seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_dropout_drops_its_rate_and_differs_by_row_head_and_seed():
    length, rate = 64, 0.3
    query = np.zeros((2, length, 2, 2), "float32")
    value = np.tile(
        np.eye(length, dtype="float32")[None, :, None], (2, 1, 2, 1)
    )
    kept = np.stack(
        [
            to_numpy(
                dot_product_attention(
                    query,
                    query,
                    value,
                    dropout=rate,
                    seed=seed,
                    implementation="blockwise",
                )
            )
            for seed in (3, 4)
        ]
    )
    # Each weight is 1 / length, so that the outputs are the weights.
    kept *= length * (1 - rate)
    assert set(np.unique(kept.round(4))) == {0.0, 1.0}
    spread = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs((kept < 0.5).mean() - rate) < 4 * spread
    # (seed, row, head): any two agree as often as chance has it.
    patterns = kept.transpose(0, 1, 3, 2, 4).reshape(8, -1) > 0.5
    chance = rate**2 + (1 - rate) ** 2
    spread = (chance * (1 - chance) / patterns.shape[1]) ** 0.5
    for index, pattern in enumerate(patterns):
        for other in patterns[:index]:
            assert abs((pattern == other).mean() - chance) < 5 * spread


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"return_attention_scores": True}, "scores were asked for"),
        ({"query_slots": SLOTS_Q.astype("int32")}, "slots are given"),
        (
            {
                "attention_mask": np.ones(
                    (BATCH, QUERY_LENGTH, KEY_LENGTH), bool
                )
            },
            "`attention_mask` is an array",
        ),
        (
            {"bias": np.zeros((QUERY_LENGTH, KEY_LENGTH), "float32")},
            "`bias` is",
        ),
    ],
)
def test_what_blocks_cannot_do_is_refused(arguments, reason):
    with pytest.raises(ValueError, match=f"cannot be honoured: .*{reason}"):
        dot_product_attention(
            **inputs(), **arguments, implementation="blockwise"
        )


@pytest.mark.parametrize(
    ("mask", "data", "message"),
    [
        (Causal(), {"segment_ids": DATA["segment_ids"]}, "Add `Documents"),
        (Causal(), {"prefix_length": 3}, "Add `Prefix"),
        (Causal(), {"positions": SLOTS_Q}, "`positions` is read by"),
        (Causal(), {"bias": RoPE()}, "`bias` must be an array, or a"),
        (Causal(), {"sinks": np.ones(1, "float32")}, "`sinks.shape` must be"),
        (Causal(), {"soft_cap": 0.0}, "`soft_cap` must be"),
        (Causal(), {"dropout": 1.0}, "`dropout` must be"),
        (Documents(), {}, "`segment_ids` must be given"),
        (Prefix(), {}, "`prefix_length` must be given"),
        (Full(), {"padding_mask": np.ones((BATCH, 5), bool)}, "one entry for"),
        (
            Documents(),
            {"segment_ids": np.ones((BATCH, QUERY_LENGTH), "int32")},
            "Pass `key_segment_ids`",
        ),
    ],
)
def test_data_that_does_not_fit_is_rejected(mask, data, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(
            **inputs(), mask=mask, **data, implementation="blockwise"
        )


def test_a_layer_trains_blockwise_as_it_does_densely():
    x = normal(2, 40, 16, seed=1)
    y = normal(2, 40, 16, seed=2)
    losses = {}
    for implementation in ("blockwise", "dense"):
        keras.utils.set_random_seed(0)
        layer = MultiHeadAttention(
            4,
            num_key_value_heads=2,
            mask=Causal(),
            position="t5",
            dropout=0.2,
            implementation=implementation,
            seed=5,
        )
        tokens = keras.Input((None, 16))
        model = keras.Model(tokens, layer(tokens))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        history = model.fit(x, y, epochs=3, verbose=0, shuffle=False)
        losses[implementation] = history.history["loss"]
        weights = [to_numpy(weight) for weight in layer.trainable_weights]
        losses[implementation] += [np.abs(weight).sum() for weight in weights]
    np.testing.assert_allclose(
        losses["blockwise"], losses["dense"], rtol=2e-5, atol=1e-6
    )
