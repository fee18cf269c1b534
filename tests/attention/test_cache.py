import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._internal.decoding_scope import DecodingScope
from keras_transformer.attention import MultiHeadAttention
from keras_transformer.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Explicit,
    Global,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from keras_transformer.positions import (
    RelativePositionBias,
    RoPE,
    RoPEScaling,
)
from tests.attention.checks import compiled
from tests.numerics import assert_close, normal, randomize_weights, to_numpy
from tests.sizes import BATCH, NUM_HEADS

LENGTH, MODEL_DIM, PREFIX = 9, 24, 4
INPUTS = normal(BATCH, LENGTH, MODEL_DIM, seed=1)
SEGMENTS = np.array(
    [[0] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 4, 4, 5]], "int32"
)
# Ragged pieces of at most four tokens; the rows end at unequal lengths.
PIECES = [(4, 2, 1), (3, 1, 4), (0, 4, 2), (2, 1, 1)]
TABLE = np.random.default_rng(2).random((3, 3)) < 0.6
PAIRS = np.random.default_rng(3).random((LENGTH, LENGTH)) < 0.6

MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(3),
    "window of the past": SlidingWindow((2, 0)),
    "window and sink": Causal() & (SlidingWindow(3) | Global(1)),
    "prefix": Causal() | Prefix(PREFIX),
    "chunks": Causal() & Chunked(4),
    "strides": Causal() & Strided(3),
    "documents": Causal() & Documents(),
    "heads": Causal()
    & PerHead([SlidingWindow(2), SlidingWindow(4), Chunked(3), Chunked(4)]),
    "heads without a bound": PerHead(
        [Causal(), Causal() & SlidingWindow(2)] * 2
    ),
    "blocks": Causal() & BlockSparse(TABLE, 3),
    "pairs": Causal() & Explicit(PAIRS),
}
# Places that a cache for nine tokens needs: what a query can look back, and
# its own.
SIZES = {
    "window": 3,
    "window of the past": 3,
    "chunks": 4,
    "heads": 4,
}
POSITIONS = {
    "none": lambda: None,
    "rope": lambda: "rope",
    "interleaved": lambda: RoPE(layout="interleaved", rotary_dim=4),
    "alibi": lambda: "alibi",
    "t5": lambda: RelativePositionBias(8, 16, bidirectional=False),
    "dynamic ntk": lambda: RoPE(scaling=RoPEScaling.dynamic_ntk(2.0, 4)),
}
# Every mask with one scheme, and every scheme with two masks.
PAIRINGS = [(mask, "rope") for mask in MASKS] + [
    (mask, position)
    for mask in ("window", "prefix")
    for position in POSITIONS
    if position != "rope"
]


def built(mask, position=None, **arguments):
    layer = MultiHeadAttention(
        NUM_HEADS,
        num_key_value_heads=2,
        mask=mask,
        position=position,
        **arguments,
    )
    layer.build(INPUTS.shape)
    randomize_weights(layer)
    return layer


def data_of(layer, start=0, stop=LENGTH):
    if "segment_ids" in layer.mask.data_names:
        return {"segment_ids": SEGMENTS[:, start:stop]}
    return {}


def whole(layer, length=LENGTH):
    """One call; later tokens are padding, so that all calls have one shape."""
    padding = np.broadcast_to(np.arange(LENGTH) < length, (BATCH, LENGTH))
    data = {} if length == LENGTH else {"padding_mask": padding}
    return to_numpy(layer(INPUTS, **data_of(layer), **data))


def expected_pieces(layer, bounds):
    """What the whole call gives for the tokens of each piece.

    Frequencies that follow the running length are those at the piece's end.
    """
    if getattr(layer.position, "depends_on_length", False):
        return [whole(layer, stop)[:, start:stop] for start, stop in bounds]
    full = whole(layer)
    return [full[:, start:stop] for start, stop in bounds]


def check_pieces(layer, sizes, cache_length=LENGTH):
    stops = np.cumsum(sizes)
    bounds = list(zip(stops - sizes, stops, strict=True))
    cache = layer.init_cache(BATCH, cache_length)
    for (start, stop), expected in zip(
        bounds, expected_pieces(layer, bounds), strict=True
    ):
        outputs, cache = layer.call_with_cache(
            INPUTS[:, start:stop], cache, **data_of(layer, start, stop)
        )
        assert_close(outputs, expected)
    np.testing.assert_array_equal(to_numpy(cache["length"]), stops[-1])
    return cache


@pytest.mark.parametrize(("mask", "position"), PAIRINGS)
def test_steps_equal_the_whole_call(mask, position):
    # A prefix sees itself, so it comes in one piece.
    sizes = [1] * LENGTH
    if mask == "prefix":
        sizes = [PREFIX] + [1] * (LENGTH - PREFIX)
    check_pieces(built(MASKS[mask], POSITIONS[position]()), sizes)


@pytest.mark.parametrize(("mask", "position"), PAIRINGS)
def test_chunks_equal_the_whole_call(mask, position):
    layer = built(MASKS[mask], POSITIONS[position]())
    check_pieces(layer, [4, 1, 4])
    # Both pieces are longer than the rings, or as long.
    check_pieces(layer, [5, 4])


def test_the_whole_may_come_in_one_piece():
    check_pieces(built(MASKS["window"], "rope"), [LENGTH])


def test_a_call_with_padding_equals_a_shorter_one():
    layer = built(Causal(), POSITIONS["dynamic ntk"]())
    assert_close(layer(INPUTS[:, :5]), whole(layer, 5)[:, :5])


@pytest.mark.parametrize(
    ("mask", "position"), [pair for pair in PAIRINGS if pair[0] != "prefix"]
)
def test_rows_of_unequal_lengths_equal_each_row_alone(mask, position):
    check_ragged(built(MASKS[mask], POSITIONS[position]()), PIECES)


def test_a_ragged_prefix_is_read_in_one_piece():
    check_ragged(built(MASKS["prefix"], "rope"), [(4, 5, 6), (2, 1, 1)])


def check_ragged(layer, pieces):
    by_length = getattr(layer.position, "depends_on_length", False)
    full = None if by_length else whole(layer)
    starts = np.zeros(BATCH, int)
    width = max(map(max, pieces))
    cache = layer.init_cache(BATCH, LENGTH)
    for lengths in np.asarray(pieces, "int32"):
        # What lies past a row's end must not matter.
        piece = np.full((BATCH, width, MODEL_DIM), 7.0, "float32")
        segments = np.full((BATCH, width), -5, "int32")
        for row, (start, length) in enumerate(
            zip(starts, lengths, strict=True)
        ):
            piece[row, :length] = INPUTS[row, start : start + length]
            segments[row, :length] = SEGMENTS[row, start : start + length]
        data = {"segment_ids": segments} if data_of(layer) else {}
        outputs, cache = layer.call_with_cache(
            piece, cache, lengths=lengths, **data
        )
        outputs = to_numpy(outputs)
        assert np.isfinite(outputs).all()
        for row, (start, length) in enumerate(
            zip(starts, lengths, strict=True)
        ):
            stop = start + length
            if length:
                rows = whole(layer, stop) if by_length else full
                assert_close(outputs[row, :length], rows[row, start:stop])
        starts += lengths
        np.testing.assert_array_equal(to_numpy(cache["length"]), starts)


@pytest.mark.parametrize("mask", MASKS)
def test_a_bounded_mask_keeps_no_more_than_it_looks_back(mask):
    layer = built(MASKS[mask])
    cache = layer.init_cache(BATCH, LENGTH)
    (places,) = cache["caches"].values()
    expected = SIZES.get(mask, LENGTH)
    assert {part.shape[1] for part in places.values()} == {expected}
    assert places["key"].shape == (BATCH, expected, 2, MODEL_DIM // NUM_HEADS)


def test_a_ring_goes_on_beyond_the_length_of_the_cache():
    check_pieces(built(MASKS["window"], "rope"), [1] * LENGTH, cache_length=3)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_padding_in_a_cached_prompt_stays_hidden(mask):
    layer = built(MASKS[mask], "rope")
    real = np.ones((BATCH, LENGTH), bool)
    real[0, :2] = real[2, 3] = False
    expected = to_numpy(layer(INPUTS, padding_mask=real))
    cache = layer.init_cache(BATCH, LENGTH)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        outputs, cache = layer.call_with_cache(
            INPUTS[:, start:stop], cache, padding_mask=real[:, start:stop]
        )
        assert_close(outputs, expected[:, start:stop])


def test_the_mask_that_keras_carries_hides_cached_keys():
    embedding = keras.layers.Embedding(6, MODEL_DIM, mask_zero=True)
    ids = np.array([[0, 0, 1, 2, 3], [4, 0, 5, 1, 1], [1, 2, 3, 4, 5]], "int32")
    embedding.build()
    layer = built(Causal())
    expected = to_numpy(layer(embedding(ops.convert_to_tensor(ids))))
    cache = layer.init_cache(BATCH, LENGTH)
    for piece in (slice(0, 3), slice(3, 4), slice(4, 5)):
        outputs, cache = layer.call_with_cache(
            embedding(ops.convert_to_tensor(ids[:, piece])), cache
        )
        assert_close(outputs, expected[:, piece])


@pytest.mark.parametrize("position", ["rope", "alibi", "dynamic ntk"])
def test_given_positions_follow_their_tokens(position):
    layer = built(Causal(), POSITIONS[position]())
    positions = np.arange(LENGTH, dtype="int32") + np.array([[0], [3], [9]])
    positions = positions.astype("int32")
    # All at once, so that dynamic frequencies are those of the whole.
    expected = to_numpy(layer(INPUTS, positions=positions))
    cache = layer.init_cache(BATCH, LENGTH)
    _, cache = layer.call_with_cache(
        INPUTS[:, :5], cache, positions=positions[:, :5]
    )
    outputs, cache = layer.call_with_cache(
        INPUTS[:, 5:], cache, positions=positions[:, 5:]
    )
    assert_close(outputs, expected[:, 5:])


def test_a_prefix_for_each_row_is_read_again_at_each_step():
    layer = built(Causal() | Prefix())
    prefix = np.array([0, 2, 4], "int32")
    expected = to_numpy(layer(INPUTS, prefix_length=prefix))
    cache = layer.init_cache(BATCH, LENGTH)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        outputs, cache = layer.call_with_cache(
            INPUTS[:, start:stop], cache, prefix_length=prefix
        )
        assert_close(outputs, expected[:, start:stop])


def test_a_cache_has_the_compute_dtype():
    layer = built(
        MASKS["window"],
        "rope",
        query_key_norm=keras.layers.RMSNormalization(),
        dtype="mixed_bfloat16",
    )
    inputs = ops.convert_to_tensor(INPUTS)
    expected = to_numpy(ops.cast(compiled(layer)(inputs), "float32"))
    cache = layer.init_cache(BATCH, LENGTH)
    step = compiled(lambda x, cache: layer.call_with_cache(x, cache))
    for start, stop in ((0, 4), (4, 5)):
        outputs, cache = step(inputs[:, start:stop], cache)
        outputs = ops.cast(outputs, "float32")
        assert_close(outputs, expected[:, start:stop], "bfloat16")
        (places,) = cache["caches"].values()
        for part in ("key", "value"):
            dtypes = keras.backend.standardize_dtype(places[part].dtype)
            assert dtypes == "bfloat16"


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_a_compiled_step_equals_the_whole_call(mask):
    layer = built(MASKS[mask], "rope")
    step = compiled(lambda x, cache: layer.call_with_cache(x, cache))
    cache = layer.init_cache(BATCH, LENGTH)
    full = whole(layer)
    for start in range(LENGTH):
        piece = ops.convert_to_tensor(INPUTS[:, start : start + 1])
        outputs, cache = step(piece, cache)
        assert_close(outputs, full[:, start : start + 1])


def test_a_compiled_ragged_step_equals_each_row_alone():
    layer = built(MASKS["window"], "rope")
    step = compiled(
        lambda x, cache, lengths: layer.call_with_cache(
            x, cache, lengths=lengths
        )
    )
    cache = layer.init_cache(BATCH, LENGTH)
    full, starts = whole(layer), np.zeros(BATCH, int)
    for lengths in np.array([[2, 1, 0], [1, 2, 2], [2, 2, 1]], "int32"):
        rows = np.arange(BATCH)[:, None]
        tokens = np.minimum(starts[:, None] + np.arange(2), LENGTH - 1)
        outputs, cache = step(
            ops.convert_to_tensor(INPUTS[rows, tokens]),
            cache,
            ops.convert_to_tensor(lengths),
        )
        for row, length in enumerate(lengths):
            if length:
                start = starts[row]
                assert_close(
                    to_numpy(outputs)[row, :length],
                    full[row, start : start + length],
                )
        starts += lengths


def test_a_call_leaves_the_cache_it_was_given_as_it_was():
    layer = built(MASKS["window"])
    _, cache = layer.call_with_cache(
        INPUTS[:, :2], layer.init_cache(BATCH, LENGTH)
    )
    first, _ = layer.call_with_cache(INPUTS[:, 2:3], cache)
    second, _ = layer.call_with_cache(INPUTS[:, 2:3], cache)
    np.testing.assert_array_equal(to_numpy(first), to_numpy(second))


def test_scores_of_a_step_are_over_the_places_of_the_cache():
    layer = built(Causal())
    _, expected = layer(INPUTS, return_attention_scores=True)
    _, cache = layer.call_with_cache(
        INPUTS[:, :5], layer.init_cache(BATCH, LENGTH)
    )
    (_, scores), _ = layer.call_with_cache(
        INPUTS[:, 5:], cache, return_attention_scores=True
    )
    assert_close(scores, to_numpy(expected)[:, :, 5:])


def test_cross_attention_projects_a_static_sequence_once():
    layer = MultiHeadAttention(NUM_HEADS, position="rope")
    encoded = ops.convert_to_tensor(normal(BATCH, 5, 10, seed=4))
    layer.build(INPUTS.shape, encoded.shape)
    randomize_weights(layer)
    real = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 1]], bool)
    expected = to_numpy(
        layer(ops.convert_to_tensor(INPUTS), encoded, padding_mask=real)
    )
    caches = {}
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        slots = np.broadcast_to(np.arange(start, stop), (BATCH, stop - start))
        scope = DecodingScope(
            ops.convert_to_tensor(slots, "int32"), caches, capacity=LENGTH
        )
        scope.mark_static(encoded)
        with scope:
            outputs = layer(
                ops.convert_to_tensor(INPUTS[:, start:stop]),
                encoded,
                padding_mask=real,
            )
        assert_close(outputs, expected[:, start:stop])
        assert not scope.watched
        if caches:
            for name, cache in scope.new_caches.items():
                assert all(cache[part] is caches[name][part] for part in cache)
        caches = scope.new_caches


def test_a_scope_makes_its_own_caches_and_reads_only_what_is_used():
    layer = built(Causal(), "rope")
    full, caches = whole(layer), {}
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        slots = np.broadcast_to(np.arange(start, stop), (BATCH, stop - start))
        scope = DecodingScope(
            ops.convert_to_tensor(slots, "int32"),
            caches,
            capacity=LENGTH + 4,
            used=stop,
        )
        with scope:
            outputs, scores = layer(
                ops.convert_to_tensor(INPUTS[:, start:stop]),
                return_attention_scores=True,
            )
        assert_close(outputs, full[:, start:stop])
        assert scores.shape[-1] == stop
        caches = scope.new_caches
        (places,) = caches.values()
        assert places["slots"].shape == (BATCH, LENGTH + 4)


def test_a_full_cache_raises_and_stays_usable():
    layer = built(Causal())
    cache = layer.init_cache(BATCH, 4)
    _, cache = layer.call_with_cache(INPUTS[:, :3], cache)
    with pytest.raises(ValueError, match=r"holds 4 tokens.*at slot 4.*longer"):
        layer.call_with_cache(INPUTS[:, 3:5], cache)
    outputs, _ = layer.call_with_cache(INPUTS[:, 3:4], cache)
    assert_close(outputs, whole(layer)[:, 3:4])


def test_a_window_wider_than_the_cache_is_no_ring():
    layer = built(Causal() & SlidingWindow(6))
    cache = check_pieces(layer, [1] * 4, cache_length=4)
    with pytest.raises(ValueError, match="holds 4 tokens"):
        layer.call_with_cache(INPUTS[:, 4:5], cache)


def test_an_attention_mask_is_refused_in_cached_mode():
    layer = built(Causal())
    with pytest.raises(ValueError, match=r"`attention_mask` of layer.*by `ma"):
        layer.call_with_cache(
            INPUTS[:, :1],
            layer.init_cache(BATCH, LENGTH),
            attention_mask=np.ones((BATCH, 1, 1), bool),
        )


def test_segment_ids_that_are_missing_are_named():
    layer = built(MASKS["documents"])
    with pytest.raises(ValueError, match="`segment_ids` must be given"):
        layer.call_with_cache(INPUTS[:, :1], layer.init_cache(BATCH, LENGTH))


def test_an_unbuilt_layer_has_no_cache():
    with pytest.raises(ValueError, match="must be built before `init_cache`"):
        MultiHeadAttention(NUM_HEADS).init_cache(1, 1)


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 4), "batch_size"), ((2, -1), "length")]
)
def test_a_cache_needs_a_size(sizes, name):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive"):
        built(Causal()).init_cache(*sizes)
