import numpy as np
import pytest

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.masks import (
    Causal,
    Chunked,
    Full,
    Global,
    Prefix,
    SlidingWindow,
)
from tests.numerics import normal
from tests.sizes import BATCH, MODEL_DIM, NUM_HEADS

LENGTH = 9
INPUTS = normal(BATCH, LENGTH, MODEL_DIM, seed=1)


def built(mask):
    layer = MultiHeadAttention(NUM_HEADS, mask=mask)
    layer.build(INPUTS.shape)
    return layer


@pytest.mark.parametrize(
    "mask",
    # 97 divides the slot from which on masks are asked, plus 1.
    [Full(), SlidingWindow(2), Chunked(4), Chunked(97), ~Causal()],
    ids=repr,
)
def test_a_mask_that_sees_later_tokens_is_refused(mask):
    layer = built(mask)
    with pytest.raises(ValueError, match="lets a token see tokens that come"):
        layer.call_with_cache(INPUTS[:, :4], layer.init_cache(BATCH, LENGTH))


@pytest.mark.parametrize(
    ("mask", "data"),
    [
        (Causal() | Prefix(4), {}),
        (Causal() | Prefix(), {"prefix_length": np.array([0, 3, 4], "int32")}),
        (Causal() | Global(1), {}),
    ],
    ids=["prefix", "a prefix for each row", "global"],
)
def test_a_piece_that_ends_before_what_it_sees_is_refused(mask, data):
    layer = built(mask)
    cache = layer.init_cache(BATCH, LENGTH)
    with pytest.raises(ValueError, match="this piece see tokens that come aft"):
        layer.call_with_cache(INPUTS[:, :3], cache, **data)


def test_rows_that_hold_their_whole_prefix_are_taken():
    layer = built(Causal() | Prefix())
    layer.call_with_cache(
        INPUTS[:, :3],
        layer.init_cache(BATCH, LENGTH),
        lengths=np.array([1, 3, 2]),
        prefix_length=np.array([1, 3, 0], "int32"),
    )


@pytest.mark.parametrize("lengths", [[1, 2], [0, 1, 3], [0, -1, 2]])
def test_lengths_that_no_piece_has_are_rejected(lengths):
    layer = built(Causal())
    with pytest.raises(ValueError, match=r"`lengths` must be 3 numbers from 0"):
        layer.call_with_cache(
            INPUTS[:, :2], layer.init_cache(BATCH, LENGTH), lengths=lengths
        )


@pytest.mark.parametrize(
    ("cache", "text"), [(None, "init_cache"), ({}, "init_cache")]
)
def test_refuses_what_is_no_cache(cache, text):
    layer = MultiHeadAttention(4, mask=Causal())
    with pytest.raises(ValueError, match=text):
        layer.call_with_cache(normal(3, 5, 24), cache)


@pytest.mark.parametrize("name", ["positions", "key_positions"])
def test_refuses_positions_that_no_scheme_reads(name):
    layer = MultiHeadAttention(4)
    with pytest.raises(ValueError, match=f"`{name}` is read by no position"):
        layer(normal(3, 5, 24), **{name: np.arange(5, dtype="int32")})
