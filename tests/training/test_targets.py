import numpy as np
import pytest

from keras_transformer.training import next_token_pairs, shift_right

TOKENS = np.array([[5, 6, 7, 8], [3, 2, 0, 0]])


def test_shift_right_begins_with_the_start_token_and_drops_the_last():
    shifted = shift_right(TOKENS, 1)
    np.testing.assert_array_equal(shifted, [[1, 5, 6, 7], [1, 3, 2, 0]])
    assert shifted.dtype == np.int32


def test_shift_right_takes_lists():
    assert shift_right([[4, 5]], start_token=0).tolist() == [[0, 4]]


def test_each_input_is_paired_with_the_token_after_it():
    inputs, targets, weights = next_token_pairs(TOKENS)
    np.testing.assert_array_equal(inputs, [[5, 6, 7], [3, 2, 0]])
    np.testing.assert_array_equal(targets, [[6, 7, 8], [2, 0, 0]])
    np.testing.assert_array_equal(weights, np.ones((2, 3)))
    assert inputs.dtype == targets.dtype == np.int32
    assert weights.dtype == np.float32


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_with_padding_have_no_weight(side):
    step = 1 if side == "right" else -1
    tokens = TOKENS[:, ::step]
    _, _, weights = next_token_pairs(tokens, padding_mask=tokens != 0)
    np.testing.assert_array_equal(weights[:, ::step], [[1, 1, 1], [1, 0, 0]])


def test_rejects_tokens_that_are_no_matrix_of_integers():
    with pytest.raises(ValueError, match=r"`token_ids.shape` must be an array"):
        shift_right([1, 2], 0)
    with pytest.raises(ValueError, match=r"`token_ids.dtype` must be integers"):
        shift_right([[1.0, 2.0]], 0)
    with pytest.raises(
        ValueError, match=r"`start_token` must be an integer.*-1"
    ):
        shift_right(TOKENS, -1)


def test_rejects_rows_of_one_token():
    with pytest.raises(ValueError, match=r"at least two columns.*A pair takes"):
        next_token_pairs([[1], [2]])


def test_rejects_a_padding_mask_of_another_shape():
    with pytest.raises(
        ValueError, match=r"`padding_mask.shape` must be of the"
    ):
        next_token_pairs(TOKENS, padding_mask=TOKENS[:, 1:] != 0)
