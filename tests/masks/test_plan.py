import time
import tracemalloc

import numpy as np
import pytest
from keras import ops

from keras_transformer.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    Prefix,
    SlidingWindow,
    Strided,
)

MILLION = 1_000_000


def test_causal_keeps_the_lower_triangle_and_masks_its_diagonal():
    plan = Causal().plan(10, 10, 4)
    assert plan.row(0) == [(0, 1, False)]
    assert plan.row(1) == [(0, 1, True), (1, 2, False)]
    assert plan.row(2) == [(0, 2, True), (2, 3, False)]
    assert (plan.num_query_blocks, plan.num_key_blocks) == (3, 3)
    assert (plan.num_kept, plan.num_full) == (6, 3)
    assert plan.density == pytest.approx(6 / 9)
    np.testing.assert_array_equal(plan.kept_per_row(), [1, 2, 3])
    offsets, key_blocks, is_full = plan.tiles()
    np.testing.assert_array_equal(offsets, [0, 1, 3, 6])
    np.testing.assert_array_equal(key_blocks, [0, 0, 1, 0, 1, 2])
    np.testing.assert_array_equal(is_full, [0, 1, 0, 1, 1, 0])
    assert "10 x 10 in blocks of 4 x 4: 6 kept, 3 full" in repr(plan)


def test_blocks_need_not_be_square_nor_lengths_equal():
    plan = SlidingWindow(2).plan(4, 12, 2, key_block_size=3)
    assert plan.row(0) == [(0, 1, False)]
    assert plan.row(1) == [(0, 2, False)]
    assert plan.num_key_blocks == 4


def test_later_queries_start_at_their_slot():
    plan = Causal().plan(4, 8, 2, query_start=4)
    assert plan.row(0) == [(0, 2, True), (2, 3, False)]
    assert plan.row(1) == [(0, 3, True), (3, 4, False)]


def test_rows_without_work_are_empty():
    plan = BlockSparse([[1, 0], [0, 0], [0, 1]], 4).plan(12, 8, 4)
    assert plan.row(1) == []
    assert plan.row(2) == [(1, 2, True)]
    assert (~Full()).plan(9, 9, 2).num_kept == 0


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_plan_is_an_empty_plan(shape):
    plan = Causal().plan(*shape, 2)
    assert (plan.num_kept, plan.density) == (0, 0.0)
    assert len(plan.row_offsets) == plan.num_query_blocks + 1


def test_padding_is_left_out():
    padding_mask = np.arange(8)[None] < 5
    plan = Full().plan(4, 8, 2, padding_mask=padding_mask)
    assert plan.row(0) == [(0, 2, True), (2, 3, False)]


def test_data_that_is_not_on_the_host_may_be_anything():
    ids = np.zeros((1, 8), "int32")
    assert Documents().plan(8, 8, 4, segment_ids=ids).num_full == 4
    unknown = Documents().plan(8, 8, 4, segment_ids=ops.convert_to_tensor(ids))
    assert (unknown.num_kept, unknown.num_full) == (4, 0)
    assert Documents().plan(8, 8, 4).num_full == 0
    assert (Causal() & Documents()).plan(8, 8, 4).num_kept == 3
    assert Prefix().plan(8, 8, 4).num_full == 0
    assert Prefix().plan(8, 8, 4, prefix_length=4).num_full == 2
    assert (Full() | ~Prefix()).plan(8, 8, 4).num_full == 4


def test_many_undecided_tiles_are_cut_into_parts(monkeypatch):
    whole = Strided(3).plan(64, 64, 2)
    few_at_once = "keras_transformer.masks.plan._TILES_AT_ONCE"
    for limit in (1, 7, 100):
        monkeypatch.setattr(few_at_once, limit)
        plan = Strided(3).plan(64, 64, 2)
        np.testing.assert_array_equal(plan.row_offsets, whole.row_offsets)
        np.testing.assert_array_equal(plan.ends, whole.ends)
        np.testing.assert_array_equal(plan.is_full, whole.is_full)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (Causal(), 7813 * 7814 // 2),
        # Four blocks back and its own, less those before the first.
        (Causal() & SlidingWindow(512), 7813 * 5 - 10),
    ],
)
def test_a_million_by_a_million_takes_no_time_and_no_memory(mask, kept):
    start = time.perf_counter()
    plan = mask.plan(MILLION, MILLION, 128)
    assert time.perf_counter() - start < 5  # takes about 0.02
    assert plan.num_kept == kept
    tracemalloc.start()
    mask.plan(MILLION, MILLION, 128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6  # one byte a tile would be 61e6


def test_a_million_slots_of_packed_documents_are_planned_too():
    ids = np.arange(MILLION)[None] // 1000
    plan = (Causal() & Documents()).plan(
        MILLION, block_size=100, segment_ids=ids
    )
    assert plan.num_kept == 1000 * 55
    assert plan.num_full == 1000 * 45


def test_rejects_sizes_that_are_none():
    with pytest.raises(ValueError, match=r"`block_size` .*=0"):
        Causal().plan(4, 4, 0)
    with pytest.raises(ValueError, match=r"`key_block_size` .*=-1"):
        Causal().plan(4, 4, 2, key_block_size=-1)
    with pytest.raises(ValueError, match=r"`query_length` .*=None"):
        Causal().plan(None)
    with pytest.raises(ValueError, match=r"`key_length` .*=1.5"):
        Causal().plan(4, 1.5)
    with pytest.raises(ValueError, match=r"`query_start` .*=-1"):
        Causal().plan(4, query_start=-1)
