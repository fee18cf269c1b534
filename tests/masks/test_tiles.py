"""The tiles of a batch: none that is needed is missing, none comes twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_transformer.masks import Causal, Documents, MaskData, Prefix
from keras_transformer.masks.tiles import tile_table
from tests.masks.trees import Case, trees
from tests.sizes import BATCH

seeds = st.integers(0, 2**16)


def table_of(mask, arrays, sizes, **options):
    data = MaskData(**arrays)
    return tile_table(mask, 19, 26, *sizes, data, **options)


def tensors(arrays):
    return {name: ops.convert_to_tensor(x) for name, x in arrays.items()}


def assert_covers(table, allowed, sizes):
    """No allowed pair outside the tiles, no forbidden one in full tiles."""
    size, key_size = sizes
    columns, full, kept = (
        ops.convert_to_numpy(part)
        for part in (table.columns, table.num_full, table.num_kept)
    )
    for row, rows in enumerate(allowed):
        covered = np.zeros(rows.shape[1:], bool)
        shared = row % len(columns)
        for block, start in enumerate(table.starts):
            queries = slice(block * size, (block + 1) * size)
            for index in range(kept[shared, block]):
                key = columns[shared, start + index] * key_size
                keys = slice(key, key + key_size)
                assert not covered[queries, keys].any(), "a tile comes twice"
                covered[queries, keys] = True
                if index < full[shared, block]:
                    assert rows[:, queries, keys].all()
                    assert keys.stop <= covered.shape[1]
        assert not (rows & ~covered).any()


@settings(max_examples=60, deadline=None)
@given(
    trees,
    seeds,
    st.sampled_from([(4, 8), (8, 4), (5, 5)]),
    st.booleans(),
    st.booleans(),
)
def test_tiles_hold_what_the_rules_allow(
    tree, seed, sizes, same_for_rows, as_tensors
):
    mask, meaning = tree
    case = Case(seed, 19, 26, plain=True)
    arrays = tensors(case.arrays) if as_tensors else case.arrays
    table = table_of(mask, arrays, sizes, same_for_rows=same_for_rows)
    assert_covers(table, case.expected(meaning), sizes)
    assert len(table.columns) == 1 or not same_for_rows


@settings(max_examples=15, deadline=None)
@given(trees, seeds)
def test_tensors_give_the_tiles_that_numpy_gives(tree, seed):
    mask, _ = tree
    case = Case(seed, 19, 26, plain=True)
    expected = table_of(mask, case.arrays, (4, 8))
    actual = table_of(mask, tensors(case.arrays), (4, 8))
    for name in ("num_full", "num_kept"):
        np.testing.assert_array_equal(
            ops.convert_to_numpy(getattr(actual, name)), getattr(expected, name)
        )


def test_each_row_of_a_batch_has_tiles_of_its_own():
    ids = np.stack([np.arange(16) // size for size in (4, 8, 16)])
    data = MaskData(segment_ids=ids)
    table = tile_table(Causal() & Documents(), 16, 16, 4, 4, data)
    assert table.num_kept.sum(axis=1).tolist() == [4, 6, 10]
    assert table.num_full.sum(axis=1).tolist() == [0, 2, 6]
    together = tile_table(
        Causal() & Documents(), 16, 16, 4, 4, data, same_for_rows=True
    )
    assert together.num_kept.sum() == 10
    assert together.num_full.sum() == 0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_and_prefix_cut_tiles(as_tensor):
    arrays = {
        "padding_mask": np.arange(16) < np.array([[16], [8], [0]]),
        "prefix_length": np.array([16, 4, 2], "int32"),
    }
    assert len(arrays["padding_mask"]) == BATCH
    if as_tensor:
        arrays = tensors(arrays)
    table = tile_table(Prefix(), 16, 16, 4, 4, MaskData(**arrays))
    kept, full = (
        ops.convert_to_numpy(part).sum(axis=1).tolist()
        for part in (table.num_kept, table.num_full)
    )
    assert kept == [16, 4, 0]
    assert full == [16, 4, 0]


def test_missing_documents_are_named():
    with pytest.raises(ValueError, match="`segment_ids` must be given"):
        tile_table(Documents(), 8, 8, 4, 4, MaskData())
