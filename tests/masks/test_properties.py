"""Promises about every mask, tried on random trees."""

import json

import keras
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_transformer.masks
from keras_transformer.masks import Causal, Full, MaskData
from tests.masks.trees import BATCH, NUM_HEADS, Case, headless_trees, trees
from tests.numerics import to_numpy

# A busy machine is slow to draw examples, which proves nothing.
many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
few = settings(many, max_examples=25)
seeds = st.integers(0, 1000)


def whole(allowed, case):
    shape = (BATCH, NUM_HEADS, case.q.shape[1], case.k.shape[1])
    return np.broadcast_to(allowed, shape)


def meaning_of(mask, case):
    return whole(mask.evaluate(case.q, case.k, case.data), case)


@many
@given(trees, seeds)
def test_a_mask_means_what_its_rules_say_pair_by_pair(tree, seed):
    (mask, meaning), case = tree, Case(seed)
    np.testing.assert_array_equal(
        meaning_of(mask, case), case.expected(meaning)
    )


@few
@given(trees, seeds)
def test_tensors_give_what_numpy_gives(tree, seed):
    mask, case = tree[0], Case(seed)
    tensors = {
        name: keras.ops.convert_to_tensor(array)
        for name, array in case.arrays.items()
    }
    q, k = (keras.ops.convert_to_tensor(slots) for slots in (case.q, case.k))
    expected = mask.evaluate(case.q, case.k, case.data)
    assert isinstance(expected, np.ndarray)
    for slots, data in (
        ((q, k), tensors),
        ((q, case.k), case.arrays),
        ((case.q, case.k), tensors),
    ):
        actual = to_numpy(mask.evaluate(*slots, MaskData(**data)))
        np.testing.assert_array_equal(actual, expected)


@few
@given(trees, seeds)
def test_dense_spreads_the_meaning_over_queries_and_keys(tree, seed):
    mask, case = tree[0], Case(seed)
    dense = to_numpy(
        mask.dense(query_slots=case.q, key_slots=case.k, **case.arrays)
    )
    assert dense.shape[-2:] == (case.q.shape[1], case.k.shape[1])
    np.testing.assert_array_equal(whole(dense, case), meaning_of(mask, case))


@many
@given(trees, trees, seeds)
def test_the_algebra_is_boolean(left, right, seed):
    (a, _), (b, _), case = left, right, Case(seed)
    # Keys that do not exist stay hidden under `~` too.
    exists = whole(((case.k >= 0) & case.padding)[:, None, None, :], case)
    of_a, of_b = meaning_of(a, case), meaning_of(b, case)
    for mask, expected in (
        (a & b, of_a & of_b),
        (b & a, of_a & of_b),
        (a | b, of_a | of_b),
        (b | a, of_a | of_b),
        (~(a & b), (~of_a | ~of_b) & exists),
        (~a | ~b, (~of_a | ~of_b) & exists),
        (~(a | b), ~of_a & ~of_b & exists),
        (~a & ~b, ~of_a & ~of_b & exists),
    ):
        np.testing.assert_array_equal(meaning_of(mask, case), expected)
    assert ~~a == a


@many
@given(trees)
def test_a_mask_prints_as_the_expression_that_makes_it(tree):
    copy = eval(repr(tree[0]), vars(keras_transformer.masks).copy())
    assert copy == tree[0]
    assert hash(copy) == hash(tree[0])
    assert repr(copy) == repr(tree[0])


@many
@given(trees)
def test_a_mask_survives_json(tree):
    config = json.loads(
        json.dumps(keras.saving.serialize_keras_object(tree[0]))
    )
    copy = keras.saving.deserialize_keras_object(config)
    assert copy == tree[0]
    assert repr(copy) == repr(tree[0])


@many
@given(trees, seeds)
def test_lookback_and_lookahead_bound_what_is_allowed(tree, seed):
    mask, case = tree[0], Case(seed)
    batch, _, query, key = np.nonzero(meaning_of(mask, case))
    distance = case.q[batch, query] - case.k[batch, key]
    if mask.lookback is not None:
        assert (distance <= mask.lookback).all()
    if mask.lookahead is not None:
        assert (-distance <= mask.lookahead).all()


@many
@given(trees, seeds)
def test_what_kernels_are_told_about_a_mask_is_true(tree, seed):
    mask, case = tree[0], Case(seed)
    for told, rule in ((mask.is_full, Full()), (mask.is_causal_only, Causal())):
        if told:
            np.testing.assert_array_equal(
                meaning_of(mask, case), meaning_of(rule, case)
            )


lengths = st.integers(1, 17)
blocks = st.sampled_from([1, 2, 3, 4, 8, 16])


@many
@given(trees, seeds, lengths, lengths, blocks, blocks, st.booleans())
def test_the_plan_keeps_what_is_allowed_and_masks_what_is_not(
    tree, seed, queries, keys, block, key_block, with_data
):
    mask, case = tree[0], Case(seed, queries, keys, plain=True)
    data = case.arrays if with_data else {}
    plan = mask.plan(queries, keys, block, key_block_size=key_block, **data)
    assert_sound(plan, meaning_of(mask, case), is_bound=not with_data)


@many
@given(trees, seeds, st.integers(0, NUM_HEADS - 1), st.integers(0, 5))
def test_the_plan_of_a_head_and_of_later_queries_is_sound(
    tree, seed, head, start
):
    mask, case = tree[0], Case(seed, 9, 14, plain=True)
    case.q = case.q + start
    plan = mask.plan(
        9, 14, 4, key_block_size=3, query_start=start, head=head, **case.arrays
    )
    assert_sound(plan, meaning_of(mask, case)[:, head])


@many
@given(headless_trees, seeds, lengths, st.integers(1, 4))
def test_blocks_of_one_pair_tell_the_whole_mask(tree, seed, length, keys):
    mask, case = tree[0], Case(seed, length, length, plain=True)
    if mask.data_names:
        return  # one plan for rows that differ
    plan = mask.plan(length, length, 1)
    expected = whole(mask.evaluate(np.arange(length), np.arange(length)), case)
    offsets, key_blocks, is_full = plan.tiles()
    actual = np.zeros((length, length), bool)
    actual[np.repeat(np.arange(length), np.diff(offsets)), key_blocks] = True
    np.testing.assert_array_equal(actual, expected[0, 0])
    assert is_full.all()


def assert_sound(plan, allowed, is_bound=False):
    """No allowed pair outside kept blocks, no hole in full ones."""
    allowed = allowed.reshape(-1, *allowed.shape[-2:])
    offsets, key_blocks, is_full = plan.tiles()
    kept = np.zeros(allowed.shape[1:], bool)
    for row in range(plan.num_query_blocks):
        blocks = range(offsets[row], offsets[row + 1])
        assert list(key_blocks[blocks.start : blocks.stop]) == [
            block
            for start, end, _ in plan.row(row)
            for block in range(start, end)
        ]
        for place in blocks:
            q = slice(row * plan.block_size, (row + 1) * plan.block_size)
            k = key_blocks[place] * plan.key_block_size
            tile = (q, slice(k, k + plan.key_block_size))
            assert not kept[tile].any(), "a block comes twice"
            kept[tile] = True
            # Without the data, padding may still hide keys of full blocks.
            if is_full[place] and not is_bound:
                assert allowed[(slice(None), *tile)].all()
    assert not (allowed & ~kept).any()
