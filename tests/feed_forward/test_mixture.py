import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.feed_forward import GatedFeedForward, MixtureOfExperts
from tests.layer_contract import check_layer
from tests.numerics import (
    assert_close,
    gradients,
    normal,
    randomize_weights,
    to_numpy,
)
from tests.sizes import BATCH, INTERMEDIATE_DIM, MODEL_DIM, QUERY_LENGTH

SHAPE = (BATCH, QUERY_LENGTH, MODEL_DIM)
NUM_EXPERTS = 4


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(layer, inputs):
    """One token and one expert at a time."""
    router, *kernels = (w.astype("float64") for w in layer.get_weights())
    tokens = inputs.reshape(-1, inputs.shape[-1]).astype("float64")
    outputs = np.zeros_like(tokens)
    for index, token in enumerate(tokens):
        probabilities = softmax(token @ router)
        chosen = np.argsort(-probabilities)[: layer.top_k]
        total = probabilities[chosen].sum() if layer.normalize_top_k else 1
        for expert in chosen:
            if layer.gated:
                gate, up, down = (kernel[expert] for kernel in kernels)
                hidden = silu(token @ gate) * (token @ up)
            else:
                up, down = (kernel[expert] for kernel in kernels)
                hidden = silu(token @ up)
            outputs[index] += probabilities[expert] / total * (hidden @ down)
    return outputs.reshape(inputs.shape)


def make_layer(**options):
    layer = MixtureOfExperts(NUM_EXPERTS, INTERMEDIATE_DIM, **options)
    layer.build(SHAPE)
    randomize_weights(layer)
    return layer


def test_keeps_the_layer_contract():
    check_layer(
        MixtureOfExperts,
        {
            "num_experts": NUM_EXPERTS,
            "intermediate_dim": INTERMEDIATE_DIM,
            "top_k": 3,
            "activation": "gelu",
            "load_balancing": 0.5,
            "dropout": 0.1,
            "kernel_initializer": "he_normal",
            "seed": 3,
        },
        {"inputs": normal(*SHAPE)},
        output_shape=SHAPE,
        num_weights=4,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3, "gated": False},
        {"top_k": 1, "normalize_top_k": False},
        {"top_k": NUM_EXPERTS, "normalize_top_k": False},
    ],
)
def test_matches_the_formula(options):
    layer = make_layer(**options)
    inputs = normal(*SHAPE)
    assert_close(layer(inputs), reference(layer, inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_the_formula_in_half_precision(dtype):
    layer = make_layer(dtype=f"mixed_{dtype}")
    # Inputs that the dtype holds exactly, so that the routing is the same.
    inputs = to_numpy(ops.cast(ops.cast(normal(*SHAPE), dtype), "float32"))
    outputs = layer(inputs.astype("float32"))
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    expected = reference(layer, inputs)
    assert_close(ops.cast(outputs, "float32"), expected, dtype)


def test_activation_acts():
    layer = make_layer(activation="linear", gated=False, top_k=NUM_EXPERTS)
    inputs = normal(*SHAPE)
    router, up, down = (w.astype("float64") for w in layer.get_weights())
    weights = softmax(inputs.astype("float64") @ router)
    expected = np.einsum("btd,edf,efm,bte->btm", inputs, up, down, weights)
    assert_close(layer(inputs), expected)


def test_drops_no_token_when_all_choose_the_same_experts():
    layer = make_layer()
    inputs = np.tile(normal(MODEL_DIM), (BATCH, QUERY_LENGTH, 1))
    assert_close(layer(inputs), reference(layer, inputs))


def test_equal_experts_are_one_gated_feed_forward_network():
    layer = make_layer(top_k=3)
    router, *kernels = layer.get_weights()
    one_of_each = [np.tile(kernel[:1], (4, 1, 1)) for kernel in kernels]
    layer.set_weights([router, *one_of_each])
    network = GatedFeedForward(INTERMEDIATE_DIM, use_bias=False)
    network.build(SHAPE)
    network.set_weights([kernel[0] for kernel in kernels])
    inputs = normal(*SHAPE)
    assert_close(layer(inputs), to_numpy(network(inputs)))


def test_a_row_does_not_depend_on_its_batch_mates():
    layer = make_layer()
    inputs = normal(*SHAPE)
    alone = to_numpy(layer(inputs[:1]))
    assert_close(layer(inputs)[:1], alone)


def test_zeros_give_zeros():
    layer = make_layer()
    assert (to_numpy(layer(np.zeros(SHAPE, "float32"))) == 0).all()


def test_gradients_match_finite_differences():
    layer = make_layer()
    inputs = normal(*SHAPE)
    direction = normal(*SHAPE, seed=1).astype("float64")
    (gradient,) = gradients(lambda x: ops.sum(layer(x) ** 2), inputs)
    step = 1e-5
    expected = [
        (reference(layer, inputs + sign * step * direction) ** 2).sum()
        for sign in (1, -1)
    ]
    expected = (expected[0] - expected[1]) / (2 * step)
    np.testing.assert_allclose((gradient * direction).sum(), expected, 1e-4)


def test_adds_the_load_balancing_loss_in_training_only():
    layer = make_layer(load_balancing=0.5)
    inputs = normal(*SHAPE)
    layer(inputs)
    assert layer.losses == []
    layer(inputs, training=True)
    (loss,) = layer.losses
    probabilities = softmax(inputs.astype("float64") @ layer.get_weights()[0])
    chosen = np.argsort(-probabilities, axis=-1)[..., :2]
    expected = sum(
        np.mean((chosen == expert).any(axis=-1))
        * probabilities[..., expert].mean()
        for expert in range(NUM_EXPERTS)
    )
    assert_close(loss, 0.5 * NUM_EXPERTS * expected)


def test_adds_no_loss_without_a_coefficient():
    layer = make_layer(load_balancing=0)
    layer(normal(*SHAPE), training=True)
    assert layer.losses == []


def test_leaves_padding_out_of_the_loss():
    inputs = normal(*SHAPE)
    padding_mask = np.arange(QUERY_LENGTH) < np.array([[5], [3], [1]])

    def loss(*arguments, **options):
        layer = make_layer()
        layer(*arguments, training=True, **options)
        return to_numpy(layer.losses[0])

    masked = loss(inputs, padding_mask=padding_mask)
    changed = np.where(padding_mask[..., None], inputs, 7).astype("float32")
    assert_close(loss(changed, padding_mask=padding_mask), masked)
    assert_close(loss(inputs[padding_mask][None]), masked)
    assert abs(loss(inputs) - masked) > 1e-5


def test_leaves_out_what_the_implicit_mask_and_the_given_one_hide():
    token_ids = np.array([[3, 1, 4, 0, 0], [2, 0, 0, 0, 0], [1, 2, 3, 4, 2]])
    embedding = keras.layers.Embedding(5, MODEL_DIM, mask_zero=True)
    embedding.build()
    randomize_weights(embedding, scale=1.0)
    embedded = embedding(token_ids)
    given = np.arange(QUERY_LENGTH) != np.array([[0], [9], [3]])

    def loss(inputs, **options):
        layer = make_layer(load_balancing=1.0)
        outputs = layer(inputs, training=True, **options)
        return to_numpy(layer.losses[0]), outputs

    plain = to_numpy(embedded).astype("float32")
    implicit, outputs = loss(embedded)
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), token_ids != 0)
    assert_close(implicit, loss(plain, padding_mask=token_ids != 0)[0])
    both, outputs = loss(embedded, padding_mask=given)
    np.testing.assert_array_equal(to_numpy(outputs._keras_mask), token_ids != 0)
    expected, _ = loss(plain, padding_mask=(token_ids != 0) & given)
    assert_close(both, expected)
    assert abs(both - implicit) > 1e-2


def test_experts_start_different_and_with_the_spread_of_a_matrix():
    seeded = keras.initializers.GlorotUniform(seed=1)
    for initializer in ("glorot_uniform", seeded):
        layer = MixtureOfExperts(
            NUM_EXPERTS, 50, kernel_initializer=initializer
        )
        layer.build((None, 40))
        up = to_numpy(layer._up)
        limit = np.sqrt(6 / (40 + 50))
        assert 0.95 * limit < np.abs(up).max() <= limit
        assert not np.allclose(up[0], up[1])


def test_takes_any_callable_as_initializer():
    layer = MixtureOfExperts(
        NUM_EXPERTS,
        INTERMEDIATE_DIM,
        kernel_initializer=lambda shape, dtype=None: ops.ones(shape, dtype),
    )
    layer.build(SHAPE)
    assert all((weight == 1).all() for weight in layer.get_weights())


def test_dropout_acts_in_training_only_and_repeats_with_its_seed():
    inputs = normal(*SHAPE)

    def outputs(seed):
        layer = make_layer(dropout=0.5, seed=seed)
        return to_numpy(layer(inputs, training=True)), to_numpy(layer(inputs))

    dropped, inference = outputs(1)
    np.testing.assert_array_equal(dropped, outputs(1)[0])
    assert not np.allclose(dropped, outputs(2)[0])
    assert_close(inference, reference(make_layer(), inputs))


def test_trains_in_a_functional_model_of_unknown_batch_and_length():
    inputs = keras.Input((None, MODEL_DIM))
    outputs = MixtureOfExperts(NUM_EXPERTS, INTERMEDIATE_DIM)(inputs)
    model = keras.Model(inputs, outputs)
    jit = keras.backend.backend() != "torch"
    model.compile("adam", "mse", jit_compile=jit)
    features = normal(*SHAPE)
    before = model.get_weights()
    model.fit(features, features, batch_size=BATCH, epochs=2, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.abs(new - old).max() > 0
    assert_close(
        model.predict(features, verbose=0),
        reference(model.layers[-1], features),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0}, r"`num_experts` must be a positive integer.*=0"),
        ({"num_experts": 1}, r"`num_experts` must be at least 2.*=1.*Gated"),
        ({"intermediate_dim": 0}, "`intermediate_dim` must be a positive.*=0"),
        ({"top_k": 0}, "`top_k` must be a positive integer.*=0"),
        ({"top_k": 5}, "`top_k` must be at most num_experts=4.*=5"),
        ({"top_k": 1}, "`normalize_top_k` must be False when top_k=1.*True"),
        ({"gated": "no"}, "`gated` must be True or False.*'no'"),
        ({"normalize_top_k": 1}, "`normalize_top_k` must be True or False.*=1"),
        ({"load_balancing": -1}, "`load_balancing` must be a finite.*=-1"),
        ({"dropout": 1.0}, r"`dropout` must be a rate in \[0, 1\).*=1.0"),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    arguments = {
        "num_experts": NUM_EXPERTS,
        "intermediate_dim": INTERMEDIATE_DIM,
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(**arguments)


def test_rejects_a_padding_mask_that_does_not_fit():
    layer = make_layer()
    mask = np.ones((BATCH, QUERY_LENGTH + 1), "bool")
    with pytest.raises(ValueError, match=r"`padding_mask.shape` must be of sh"):
        layer(normal(*SHAPE), padding_mask=mask)


def test_rejects_an_unknown_width():
    with pytest.raises(
        ValueError, match=r"last axis is known.*Give `keras.Inp"
    ):
        MixtureOfExperts(2, 3)(keras.Input((QUERY_LENGTH, None)))
