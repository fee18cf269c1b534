import numpy as np
import pytest
from keras import ops

from keras_transformer.masks import Causal, Documents, Full, MaskData, Padding
from tests.numerics import to_numpy


def test_padding_is_and_ed_whether_or_not_the_mask_says_so():
    padding_mask = [[True, False, True], [False, True, True]]
    said = (Causal() & Padding()).dense(3, padding_mask=padding_mask)
    unsaid = Causal().dense(3, padding_mask=padding_mask)
    expected = np.tril(np.ones((3, 3))) * np.array(padding_mask)[:, None, None]
    np.testing.assert_array_equal(to_numpy(said), expected)
    np.testing.assert_array_equal(to_numpy(unsaid), expected)


def test_padding_of_zeros_and_ones_is_boolean():
    dense = Full().dense(1, 3, padding_mask=np.array([[2, 0, 1]]))
    np.testing.assert_array_equal(to_numpy(dense).ravel(), [1, 0, 1])


def test_documents_of_keys_may_differ_from_those_of_queries():
    dense = Documents().dense(
        2, 3, segment_ids=[[7, 8]], key_segment_ids=[[8, 7, 9]]
    )
    expected = [[0, 1, 0], [1, 0, 0]]
    np.testing.assert_array_equal(to_numpy(dense)[0, 0], expected)


def test_one_row_of_documents_serves_a_batch_of_keys():
    dense = Documents().dense(
        2, 3, segment_ids=[[1, 2]], key_segment_ids=[[1, 2, 2], [2, 2, 1]]
    )
    assert dense.shape == (2, 1, 2, 3)
    plan = Documents().plan(
        2, 3, 1, segment_ids=[[1, 2]], key_segment_ids=[[1, 2, 2], [2, 2, 1]]
    )
    assert plan.row(1) == [(0, 1, False), (1, 2, True), (2, 3, False)]


def test_needs_the_data_it_reads():
    with pytest.raises(
        ValueError, match=r"`padding_mask` must be given .*`Padding\(\)`"
    ):
        (Causal() & Padding()).dense(3)
    with pytest.raises(
        ValueError, match=r"`segment_ids` must be given .*`Documents\(\)`"
    ):
        Documents().evaluate(np.arange(3), np.arange(3), MaskData())


def test_rejects_data_of_another_length():
    with pytest.raises(ValueError, match=r"`padding_mask` .* each of the 3"):
        Causal().dense(3, padding_mask=[[True, True]])
    with pytest.raises(ValueError, match=r"`segment_ids` .* each of the 3"):
        Documents().dense(3, segment_ids=[[0]])
    with pytest.raises(ValueError, match="Pass `key_segment_ids` where"):
        Documents().dense(2, 3, segment_ids=[[0, 0]])
    with pytest.raises(ValueError, match=r"`key_segment_ids` .* of the 3"):
        Documents().dense(
            2,
            3,
            segment_ids=[[0, 0]],
            key_segment_ids=ops.zeros((1, 2), "int32"),
        )
    with pytest.raises(ValueError, match="Pass `key_segment_ids` where"):
        Documents().plan(2, 3, segment_ids=[[0, 0]])


@pytest.mark.parametrize(
    "data",
    [
        {"padding_mask": [True, False]},
        {"segment_ids": np.zeros((1, 2, 3), "int32")},
        {"key_segment_ids": [0]},
        {"prefix_length": [[1]]},
    ],
)
def test_rejects_data_of_another_rank(data):
    (name,) = data
    with pytest.raises(ValueError, match=rf"`{name}` must be of shape"):
        MaskData(**data)
