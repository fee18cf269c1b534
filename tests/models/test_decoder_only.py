import functools

import keras
import numpy as np
import pytest

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.feed_forward import FeedForward
from keras_transformer.masks import Causal, Documents, Prefix, SlidingWindow
from keras_transformer.models import decoder_only
from keras_transformer.positions import RelativePositionBias
from tests.models.checks import (
    DTYPE_OPTION,
    MODEL_OPTIONS,
    NAME_OPTION,
    arguments,
    copies_of,
    layer_names,
    steps_lower_the_loss,
)
from tests.numerics import assert_close, randomize_weights, to_numpy
from tests.option_walk import (
    assert_complete,
    cases,
    check_option,
    model_again,
)
from tests.sizes import MODEL_DIM, VOCABULARY_SIZE

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 28, 0, 0, 0]], "int32")
BASE = arguments()
PADDING = np.arange(5) < np.array([[5], [3], [1]])


@functools.cache
def model():
    made = decoder_only(**BASE)
    randomize_weights(made, scale=0.2)
    return made


def test_maps_tokens_to_logits_at_any_size():
    assert model().output_shape == (None, None, VOCABULARY_SIZE)
    logits = to_numpy(model()(IDS))
    assert logits.shape == (*IDS.shape, VOCABULARY_SIZE)
    assert_close(model()(IDS[:2, :3]), logits[:2, :3])


def test_reads_like_a_figure():
    assert layer_names(model()) == [
        "embedding",
        "decoder_0",
        "decoder_1",
        "final_norm",
        "unembedding",
    ]
    lines = []
    model().summary(line_length=120, print_fn=lines.append)
    rows = [line for line in "".join(lines).split("\n") if "decoder_0" in line]
    assert f"(None, None, {MODEL_DIM})" in rows[0]


def test_the_future_does_not_change_the_past():
    changed = IDS.copy()
    changed[:, 3:] = 7
    np.testing.assert_array_equal(
        to_numpy(model()(changed))[:, :3], to_numpy(model()(IDS))[:, :3]
    )


def test_one_step_of_fit_lowers_the_loss():
    steps_lower_the_loss(decoder_only(**BASE), IDS, np.roll(IDS, -1, axis=1))


@pytest.mark.parametrize("copy", ["saved", "cloned", "rebuilt"])
def test_ties_and_shared_biases_survive(copy, tmp_path):
    made = decoder_only(**BASE, position="t5")
    randomize_weights(made)
    first, second = copies_of(made, copy, tmp_path)
    for again in (first, second):
        assert len(again.weights) == len(made.weights)
        again.set_weights(made.get_weights())
        assert_close(again(IDS), to_numpy(made(IDS)))
        blocks = [again.get_layer(f"decoder_{i}") for i in range(2)]
        assert blocks[0].position is blocks[1].position
    # Two copies are two models.
    randomize_weights(first, seed=1)
    assert_close(second(IDS), to_numpy(made(IDS)))
    assert not np.allclose(to_numpy(first(IDS)), to_numpy(made(IDS)))


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
def test_a_quantised_model_survives_saving_twice(tmp_path):
    made = decoder_only(
        **BASE,
        feed_forward=FeedForward(BASE["intermediate_dim"], activation="gelu"),
    )
    randomize_weights(made, scale=0.2)
    exact = to_numpy(made(IDS))
    made.quantize("int8")
    expected = to_numpy(made(IDS))
    assert 0 < abs(expected - exact).max() < 0.1 * abs(exact).max()
    for step in range(2):
        made.save(tmp_path / f"{step}.keras")
        made = keras.models.load_model(tmp_path / f"{step}.keras")
        assert_close(made(IDS), expected)
    assert made.get_layer("decoder_0")._feed_forward._up.quantization_mode


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_near_single(dtype):
    half = decoder_only(**BASE, dtype=f"mixed_{dtype}")
    half.set_weights(model().get_weights())
    logits = half(IDS)
    assert keras.backend.standardize_dtype(logits.dtype) == dtype
    logits = keras.ops.cast(logits, "float32")
    assert_close(logits, to_numpy(model()(IDS)), dtype, scale=3)


OPTIONS = {
    **MODEL_OPTIONS,
    "mask": ([Causal() & SlidingWindow(2)], "outputs"),
    "position": ("alibi", "outputs"),
    "tie_embeddings": (False, "weights"),
    "dtype": DTYPE_OPTION,
    "name": NAME_OPTION,
}


def test_the_table_of_options_is_complete():
    assert_complete(decoder_only, {**OPTIONS, "inputs": None})


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    check_option(
        decoder_only,
        arguments(num_layers=1),
        OPTIONS[name],
        name,
        (IDS,),
        model_again,
    )


def test_block_options_reach_every_block():
    made = decoder_only(**BASE, layer_scale=0.1, num_key_value_heads=2)
    for index in range(2):
        block = made.get_layer(f"decoder_{index}")
        assert (block.layer_scale, block.num_key_value_heads) == (0.1, 2)


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("padding_mask", PADDING, {}),
        ("segment_ids", IDS // 4, {"mask": Causal() & Documents()}),
        ("positions", IDS, {}),
        ("positions", IDS, {"position": "learned", "max_length": 30}),
        (
            "prefix_length",
            np.array([3, 2, 5], "int32"),
            {"mask": Causal() | Prefix()},
        ),
    ],
)
def test_each_input_acts(name, value, options):
    made = decoder_only(**BASE, inputs=("token_ids", name), **options)
    randomize_weights(made, scale=0.2)
    again = model_again(made)
    again.set_weights(made.get_weights())
    plain = {
        "padding_mask": np.ones_like(PADDING),
        "positions": np.broadcast_to(np.arange(5, dtype="int32"), IDS.shape),
    }.get(name, np.zeros_like(value))
    acted = to_numpy(made({"token_ids": IDS, name: value}))
    left = to_numpy(made({"token_ids": IDS, name: plain}))
    # A pad hides from those after it, in causal attention.
    changed = np.abs(acted - left).max(axis=-1) > 1e-5
    assert changed.any()
    if name == "padding_mask":
        assert not changed[PADDING].any()
    assert_close(again({"token_ids": IDS, name: value}), acted)


def test_blocks_and_parts_with_one_seed_drop_different_units():
    made = decoder_only(
        **BASE,
        dropout=0.5,
        seed=3,
        feed_forward=FeedForward(10, dropout=0.5, seed=3),
    )
    blocks = [made.get_layer(f"decoder_{i}") for i in range(2)]
    seeds = [made.get_layer("embedding").seed]
    for block in blocks:
        seeds += [
            block._self_attention.seed,
            block._feed_forward.seed,
            block._attention_branch._dropout.seed,
            block._feed_forward_branch._dropout.seed,
        ]
    assert None not in seeds
    assert len(set(seeds)) == len(seeds)


def test_blocks_with_one_seeded_initializer_start_apart():
    made = decoder_only(
        **BASE, kernel_initializer=keras.initializers.GlorotUniform(seed=1)
    )
    first, second = (
        to_numpy(made.get_layer(f"decoder_{i}")._self_attention._query.kernel)
        for i in range(2)
    )
    assert not np.allclose(first, second)


def test_copies_a_given_layer_for_each_block():
    attention = MultiHeadAttention(BASE["num_heads"], mask=Causal())
    made = decoder_only(
        **BASE,
        attention=attention,
        position=None,
        normalization=keras.layers.RMSNormalization(),
    )
    blocks = [made.get_layer(f"decoder_{i}") for i in range(2)]
    assert blocks[0].attention is not blocks[1].attention
    assert not attention.built
    assert "final_norm/scale" in made.get_layer("final_norm").weights[0].path


def test_one_bias_serves_all_blocks():
    bias = RelativePositionBias(bidirectional=False)
    made = decoder_only(**BASE, position=bias)
    tables = [w for w in made.weights if w.shape == (32, BASE["num_heads"])]
    assert len(tables) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer"),
        ({"position": "learned"}, "`max_length` must be given"),
        ({"inputs": ("padding_mask",)}, r"`inputs` must be different names"),
        ({"inputs": ("token_ids", "masks")}, "`inputs` must be different na"),
        ({"inputs": ("token_ids", "token_ids")}, "`inputs` must be different"),
        (
            {"inputs": ("token_ids", "segment_ids")},
            r"free of 'segment_ids'.*Add `Documents\(\)` to `mask`",
        ),
        (
            {"inputs": ("token_ids", "prefix_length"), "mask": Prefix(2)},
            r"free of 'prefix_length'.*Add `Prefix\(\)` to `mask`",
        ),
        (
            {"inputs": ("token_ids", "positions"), "position": None},
            "free of 'positions' with `position=None`",
        ),
        (
            {"mask": [Causal()]},
            "`mask` must be a Mask, or a sequence of 2, one per block",
        ),
        ({"mask": "causal"}, "`mask` must be a Mask, or a sequence of 2"),
        ({"normalization": "batch"}, "`normalization` must be"),
        ({"head": "classes"}, "head"),
    ],
)
def test_rejects_what_does_not_fit(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        decoder_only(**{**BASE, **options})


def test_a_call_longer_than_max_length_raises():
    made = decoder_only(**BASE, max_length=4, position="learned")
    with pytest.raises(ValueError, match="at most max_length=4 tokens a row"):
        made(IDS)
