import numpy as np
import pytest
from keras import ops

from keras_transformer.feed_forward import routing
from tests.numerics import assert_close, normal, to_numpy

NUM_TOKENS, NUM_EXPERTS, TOP_K = 14, 5, 2


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("normalize_top_k", [True, False])
def test_route_takes_the_most_probable_experts(normalize_top_k):
    logits = normal(NUM_TOKENS, NUM_EXPERTS)
    weights, expert_ids, probabilities = routing.route(
        ops.convert_to_tensor(logits), TOP_K, normalize_top_k
    )
    expected_ids = np.argsort(-logits, axis=-1)[:, :TOP_K]
    expected = np.take_along_axis(
        softmax(logits.astype("float64")), expected_ids, axis=-1
    )
    if normalize_top_k:
        expected = expected / expected.sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(to_numpy(expert_ids), expected_ids)
    assert_close(weights, expected)
    assert_close(probabilities, softmax(logits.astype("float64")))


def test_route_gives_ties_to_the_lower_index():
    logits = np.zeros((NUM_TOKENS, NUM_EXPERTS), "float32")
    _, expert_ids, _ = routing.route(ops.convert_to_tensor(logits), 2, True)
    assert (to_numpy(expert_ids) == [0, 1]).all()


def test_load_balancing_loss_matches_the_formula():
    probabilities = softmax(normal(NUM_TOKENS, NUM_EXPERTS))
    expert_ids = np.argsort(-probabilities, axis=-1)[:, :TOP_K].astype("int32")
    real = np.arange(NUM_TOKENS) % 3 != 0
    expected = 0.0
    for expert in range(NUM_EXPERTS):
        share = np.mean((expert_ids[real] == expert).any(axis=-1))
        expected += share * probabilities[real, expert].mean()
    loss = routing.load_balancing_loss(
        ops.convert_to_tensor(probabilities),
        ops.convert_to_tensor(expert_ids),
        ops.convert_to_tensor(real),
    )
    assert_close(loss, NUM_EXPERTS * expected)
    unmasked = routing.load_balancing_loss(
        ops.convert_to_tensor(probabilities[real]),
        ops.convert_to_tensor(expert_ids[real]),
    )
    assert_close(unmasked, NUM_EXPERTS * expected)


def test_load_balancing_loss_is_top_k_when_experts_are_used_evenly():
    probabilities = np.full((NUM_EXPERTS, NUM_EXPERTS), 1 / NUM_EXPERTS)
    first = np.arange(NUM_EXPERTS, dtype="int32")
    expert_ids = np.stack([first, (first + 1) % NUM_EXPERTS], axis=-1)
    loss = routing.load_balancing_loss(
        ops.convert_to_tensor(probabilities.astype("float32")),
        ops.convert_to_tensor(expert_ids),
    )
    assert_close(loss, np.float64(2))


def test_load_balancing_loss_of_padding_alone_is_zero():
    probabilities = np.full((NUM_TOKENS, NUM_EXPERTS), np.nan, "float32")
    expert_ids = np.zeros((NUM_TOKENS, TOP_K), "int32")
    loss = routing.load_balancing_loss(
        ops.convert_to_tensor(probabilities),
        ops.convert_to_tensor(expert_ids),
        ops.zeros((NUM_TOKENS,), "bool"),
    )
    assert to_numpy(loss) == 0


def distributions():
    generator = np.random.default_rng(0)
    for num_tokens in (1, 3, NUM_TOKENS, 50):
        random = np.argsort(generator.random((num_tokens, NUM_EXPERTS)))
        yield random[:, :TOP_K]
        # All tokens choose the same experts: what a capacity would drop.
        yield np.tile([4, 0], (num_tokens, 1))


@pytest.mark.parametrize("expert_ids", list(distributions()))
def test_groups_hold_every_choice_once_with_its_expert(expert_ids):
    tokens, experts, rows = (
        to_numpy(value)
        for value in routing.group_by_expert(
            ops.convert_to_tensor(expert_ids.astype("int32")), NUM_EXPERTS
        )
    )
    num_tokens = len(expert_ids)
    expected_tokens = np.arange(num_tokens)[:, None] + 1
    assert (tokens.reshape(-1)[rows] == expected_tokens).all()
    assert (experts[rows // tokens.shape[1]] == expert_ids).all()
    assert len(np.unique(rows)) == rows.size
    assert (tokens > 0).sum() == rows.size
    assert len(experts) < 3 * NUM_EXPERTS
    assert tokens.size <= max(1.5 * rows.size, rows.size)
