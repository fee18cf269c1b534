import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_transformer.training import pack_documents
from keras_transformer.training.packing import first_fit

PAD = 9


def test_packs_documents_as_drawn_by_hand():
    packed = pack_documents([[1, 2, 3], [4, 5, 6, 7], [8]], 5, pad_id=PAD)
    np.testing.assert_array_equal(
        packed.token_ids, [[1, 2, 3, 8, PAD], [4, 5, 6, 7, PAD]]
    )
    np.testing.assert_array_equal(
        packed.segment_ids, [[1, 1, 1, 2, 0], [1, 1, 1, 1, 0]]
    )
    np.testing.assert_array_equal(
        packed.positions, [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0]]
    )
    np.testing.assert_array_equal(
        packed.targets, [[2, 3, PAD, PAD, PAD], [5, 6, 7, PAD, PAD]]
    )
    np.testing.assert_array_equal(
        packed.sample_weight, [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    )
    dtypes = [array.dtype for array in packed]
    assert dtypes == [np.int32] * 4 + [np.float32]


def test_cuts_long_documents_and_keeps_the_target_across_the_cut():
    packed = pack_documents([[1, 2, 3, 4, 5]], 2)
    np.testing.assert_array_equal(packed.token_ids, [[1, 2], [3, 4], [5, 0]])
    np.testing.assert_array_equal(packed.targets, [[2, 3], [4, 5], [0, 0]])
    np.testing.assert_array_equal(
        packed.sample_weight, [[1, 1], [1, 1], [0, 0]]
    )
    np.testing.assert_array_equal(packed.positions, [[0, 1], [0, 1], [0, 0]])


# The hundreds are the document, the rest the place: tokens tell where from.
documents_strategy = st.lists(st.integers(0, 30), max_size=12).map(
    lambda sizes: [
        100 * (index + 1) + np.arange(size) for index, size in enumerate(sizes)
    ]
)


@given(documents_strategy, st.integers(1, 20))
def test_every_token_is_there_once_and_every_target_follows_it(
    documents, length
):
    packed = pack_documents(documents, length)
    is_real = packed.segment_ids > 0
    tokens = packed.token_ids[is_real]
    everything = [token for document in documents for token in document]
    assert sorted(tokens) == sorted(everything)
    has_target = packed.sample_weight > 0
    # All tokens but the last of each document.
    num_targets = sum(max(len(document) - 1, 0) for document in documents)
    assert has_target.sum() == num_targets
    assert (
        packed.targets[has_target] == packed.token_ids[has_target] + 1
    ).all()
    assert (tokens % 100 % length == packed.positions[is_real]).all()
    for array in (packed.token_ids, packed.positions, packed.targets):
        assert (array[~is_real] == 0).all()
    # Within a row, equal segments are one piece of one document.
    for row, segments in zip(packed.token_ids, packed.segment_ids, strict=True):
        for segment in range(1, segments.max() + 1):
            assert (np.diff(row[segments == segment]) == 1).all()


@given(st.lists(st.integers(1, 20), max_size=40))
def test_first_fit_takes_the_first_row_with_room(sizes):
    free, expected = [], []
    for size in sizes:
        row = next((i for i, room in enumerate(free) if room >= size), None)
        if row is None:
            row = len(free)
            free.append(20)
        free[row] -= size
        expected.append(row)
    assert first_fit(sizes, 20) == expected


def test_packs_many_documents_in_time_that_does_not_grow_with_the_rows():
    sizes = np.random.default_rng(0).integers(1, 513, 50_000).tolist()
    start = time.process_time()
    rows = first_fit(sizes, 512)
    assert time.process_time() - start < 10
    assert sum(sizes) / 512 <= max(rows) + 1 <= 1.1 * sum(sizes) / 512


def test_no_documents_give_no_rows():
    assert [array.shape for array in pack_documents([], 4)] == [(0, 4)] * 5
    assert pack_documents([[], [1]], 4).token_ids.shape == (1, 4)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {"length": 0}, "`length` must be a positive integer.*=0"),
        ([], {"pad_id": -1}, "`pad_id` must be an integer of at least 0.*=-1"),
        ([["a"]], {}, r"`document.dtype` must be integers"),
        ([1, 2], {}, r"`document.shape` must be an array of rank 1.*\(\)"),
    ],
)
def test_rejects_bad_arguments(documents, options, message):
    with pytest.raises(ValueError, match=message):
        pack_documents(documents, **{"length": 4, **options})
