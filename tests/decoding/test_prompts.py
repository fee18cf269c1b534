import numpy as np
import pytest

from keras_transformer.decoding.graph import ModelGraph
from keras_transformer.decoding.prompts import padded, ragged_rows, read_prompts
from keras_transformer.masks import Causal, Documents, Prefix
from keras_transformer.models import decoder_only
from tests.decoding.conftest import SIZES
from tests.decoding.uncached import SOURCES
from tests.sizes import VOCABULARY_SIZE


@pytest.fixture(scope="module")
def many_inputs():
    """The graph of a model with every input that a decoder may have."""
    names = ("token_ids", "padding_mask", "segment_ids", "positions")
    mask = (Causal() | Prefix()) & Documents()
    return ModelGraph(
        decoder_only(*SIZES, inputs=(*names, "prefix_length"), mask=mask)
    )


@pytest.fixture(scope="module")
def one_input(model):
    return ModelGraph(model)


@pytest.fixture(scope="module")
def two_sequences(translator):
    return ModelGraph(translator)


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [3]],
        ([1, 2], (3,)),
        [np.array([1, 2]), np.array([3], "uint8")],
    ],
)
def test_rows_of_any_integers_become_int32(value):
    rows = ragged_rows("rows", value)
    assert [row.tolist() for row in rows] == [[1, 2], [3]]
    assert {row.dtype for row in rows} == {np.dtype("int32")}
    assert padded(rows, 3, 9).tolist() == [[1, 2, 9], [3, 9, 9]]


def test_an_array_is_rows():
    rows = ragged_rows("rows", np.arange(6).reshape(2, 3))
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some text", "rows of token ids.*Tokenize it first"),
        ({"a": [1]}, "rows of token ids.*Tokenize it first"),
        (["some text"], "a list of rows of token ids"),
        (7, "rows of token ids"),
        ([], "at least one row"),
        ([1, 2], "a list of rows.*pass \\[prompt\\]"),
        ([[[1]]], "a list of rows"),
        ([[1.0, 2.0]], "rows of integers"),
        ([[True]], "rows of integers"),
        ([[2**31]], "rows of integers of 32 bits"),
    ],
)
def test_other_values_are_refused(value, message):
    with pytest.raises(ValueError, match=f"`rows` must be {message}"):
        ragged_rows("rows", value)


def test_plain_rows_are_the_token_input(one_input):
    prompts = read_prompts(one_input, [[1, 2], [3]], None)
    assert prompts.tokens.tolist() == [[1, 2], [3, 0]]
    assert prompts.lengths.tolist() == [2, 1]
    assert prompts.growing == prompts.static == {}


def test_inputs_that_are_left_out_follow_from_the_rows(many_inputs):
    prompts = read_prompts(many_inputs, {"token_ids": [[1, 2], [3]]}, None)
    assert prompts.growing["positions"].tolist() == [[0, 1], [0, 0]]
    assert prompts.growing["segment_ids"].tolist() == [[0, 0], [0, 0]]
    assert prompts.static["prefix_length"].tolist() == [2, 1]
    assert "padding_mask" not in {**prompts.growing, **prompts.static}


def test_inputs_that_are_given_are_kept(many_inputs):
    prompts = read_prompts(
        many_inputs,
        {
            "token_ids": [[1, 2], [3]],
            "positions": [[4, 5], [7]],
            "segment_ids": [[1, 1], [2]],
            "prefix_length": [1, 0],
        },
        None,
    )
    assert prompts.growing["positions"].tolist() == [[4, 5], [7, 0]]
    assert prompts.growing["segment_ids"].tolist() == [[1, 1], [2, 0]]
    assert prompts.static["prefix_length"].tolist() == [1, 0]
    assert prompts.static["prefix_length"].dtype == np.int32


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokens": [[1]]}, "no inputs of 'decoder_only': \\['tokens'\\]"),
        ({"padding_mask": [[1]]}, "must not hold 'padding_mask'"),
        ({"segment_ids": [[1], [1]]}, "'segment_ids'.*lengths of the prompts"),
        ({"positions": [[0.0, 1.0], [0.0]]}, "'?positions.*rows of integers"),
        ({"prefix_length": [1]}, "as many rows as the prompts, 2"),
        ({"prefix_length": 1}, "as many rows as the prompts, 2"),
        ({"token_ids": [[1, 2], []]}, "at least one token.*in row 1"),
        (
            {"token_ids": [[1], [VOCABULARY_SIZE]]},
            "in \\[0, 29\\).*29 in row 1",
        ),
        ({"token_ids": [[-1], [2]]}, "in \\[0, 29\\).*-1 in row 0"),
        ({"token_ids": [[1.0], [2.0]]}, "`token_ids` must be rows of integers"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(many_inputs, more, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(many_inputs, {"token_ids": [[1, 2], [3]], **more}, None)


def test_ragged_sources_are_padded_and_masked(two_sequences):
    prompts = read_prompts(two_sequences, {"encoder_token_ids": SOURCES}, 4)
    assert prompts.tokens.tolist() == [[4], [4]]
    assert prompts.static["encoder_token_ids"].tolist() == [
        [3, 8, 1, 6, 2],
        [9, 4, 6, 0, 0],
    ]
    is_real = prompts.static["encoder_padding_mask"]
    assert is_real.sum(1).tolist() == [5, 3]
    assert is_real[1, :3].all()


def test_a_padding_mask_of_the_sources_is_taken(two_sequences):
    sources = {
        "encoder_padding_mask": [[1, 1, 0]],
        "encoder_token_ids": [[5, 6, 7]],
    }
    for given in (sources, dict(reversed(sources.items()))):
        prompts = read_prompts(two_sequences, given, 4)
        is_real = prompts.static["encoder_padding_mask"]
        assert is_real.tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("given", "start_token", "message"),
    [
        ({}, None, "must hold 'decoder_token_ids', or `start_token`"),
        ({}, 1, "must hold 'decoder_token_ids', or `start_token`"),
        ({"encoder_token_ids": [[1]]}, None, "must hold 'decoder_token_ids'"),
        ({"encoder_token_ids": [[1]]}, 1.5, "`start_token` must be an integer"),
        ({"encoder_token_ids": [[1]]}, 99, "'decoder_token_ids' must be in"),
        ({"encoder_token_ids": [[99]]}, 1, "'encoder_token_ids' must be in"),
        ({"decoder_token_ids": [[1]]}, None, "\\['encoder_token_ids', 'enc"),
        (
            {"encoder_token_ids": [[1]], "decoder_token_ids": [[1]]},
            1,
            "`start_token` is the prompt of rows that have none",
        ),
        (
            {"encoder_token_ids": [[1]], "encoder_padding_mask": [[1, 1]]},
            1,
            "must have the shape of the tokens, \\(1, 1\\)",
        ),
        (
            {"encoder_padding_mask": [[1], [1, 1]]},
            1,
            "`encoder_padding_mask` must be an array",
        ),
        (
            {"encoder_token_ids": [[1]], "decoder_token_ids": [[1], [2]]},
            None,
            "as many rows as the prompts, 2",
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(
    two_sequences, given, start_token, message
):
    with pytest.raises(ValueError, match=message):
        read_prompts(two_sequences, given, start_token)
