import functools

import keras
import numpy as np
import pytest

from keras_transformer.masks import Causal, SlidingWindow
from keras_transformer.models import encoder_decoder
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
from tests.sizes import VOCABULARY_SIZE

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 28, 0, 0, 0]], "int32")
ENCODER_IDS = np.array(
    [[3, 1, 4, 0, 0, 0, 0], [0, 2, 6, 0, 5, 3, 1], [2, 7, 1, 8, 2, 8, 1]],
    "int32",
)
DATA = {"encoder_token_ids": ENCODER_IDS, "decoder_token_ids": IDS}
PADDING = {
    "encoder_padding_mask": np.arange(7) < np.array([[3], [7], [5]]),
    "decoder_padding_mask": np.arange(5) < np.array([[5], [3], [1]]),
}
BASE = arguments()


@functools.cache
def model():
    made = encoder_decoder(**BASE, inputs=(*DATA, *PADDING))
    randomize_weights(made, scale=0.2)
    return made


def logits(made=None, **changed):
    made = model() if made is None else made
    return to_numpy(made({**DATA, **PADDING, **changed}))


def test_maps_two_sequences_to_logits():
    assert model().output_shape == (None, None, VOCABULARY_SIZE)
    assert logits().shape == (*IDS.shape, VOCABULARY_SIZE)


@pytest.mark.parametrize(
    ("options", "norms"), [({}, True), ({"norm_placement": "post"}, False)]
)
def test_reads_like_the_figure_of_the_paper(options, norms):
    made = encoder_decoder(**BASE, **options)
    assert layer_names(made) == [
        "embedding",
        "encoder_0",
        "encoder_1",
        *["encoder_norm"] * norms,
        "decoder_0",
        "decoder_1",
        *["decoder_norm"] * norms,
        "unembedding",
    ]


def test_pads_of_either_sequence_change_nothing_else():
    for name, ids in DATA.items():
        padding = PADDING[name.replace("token_ids", "padding_mask")]
        changed = logits(**{name: np.where(padding, ids, 7)})
        real = PADDING["decoder_padding_mask"]
        np.testing.assert_array_equal(changed[real], logits()[real])


def test_the_future_does_not_change_the_past():
    changed = IDS.copy()
    changed[:, 3:] = 7
    outputs = logits(decoder_token_ids=changed)
    np.testing.assert_array_equal(outputs[:, :3], logits()[:, :3])


def test_the_encoder_is_read():
    other = np.where(ENCODER_IDS == 3, 8, ENCODER_IDS)
    changed = abs(logits(encoder_token_ids=other) - logits()).max((1, 2))
    # Row 1 and 0 have a 3 among their real tokens, row 2 has none.
    assert (changed[:2] > 1e-3).all()
    assert changed[2] == 0


def test_one_step_of_fit_lowers_the_loss():
    made = encoder_decoder(**BASE, norm_placement="post")
    steps_lower_the_loss(made, DATA, np.roll(IDS, -1, axis=1))


@pytest.mark.parametrize("copy", ["saved", "cloned", "rebuilt"])
def test_ties_and_the_biases_of_both_stacks_survive(copy, tmp_path):
    made = encoder_decoder(**BASE, position="t5", attention_bias=False)
    randomize_weights(made)
    first, second = copies_of(made, copy, tmp_path)
    for again in (first, second):
        assert len(again.weights) == len(made.weights)
        again.set_weights(made.get_weights())
        assert_close(again(DATA), to_numpy(made(DATA)))
        biases = [
            again.get_layer(f"{stack}_{index}").position
            for stack in ("encoder", "decoder")
            for index in range(2)
        ]
        assert biases[0] is biases[1]
        assert biases[2] is biases[3]
        assert biases[0].bidirectional
        assert not biases[2].bidirectional
    # Two copies are two models.
    randomize_weights(first, seed=1)
    assert_close(second(DATA), to_numpy(made(DATA)))


def test_separate_embeddings_start_apart():
    made = encoder_decoder(
        **BASE,
        share_embeddings=False,
        embeddings_initializer=keras.initializers.RandomNormal(seed=1),
        position="learned",
        max_length=9,
    )
    tables = {
        weight.path: to_numpy(weight)
        for weight in made.weights
        if "embedding" in weight.path.split("/")[0]
    }
    assert len(tables) == 5
    first, second = (
        to_numpy(made.get_layer(f"{side}_embedding")._embedding.embeddings)
        for side in ("encoder", "decoder")
    )
    assert not np.allclose(first, second)


OPTIONS = {
    **MODEL_OPTIONS,
    "num_decoder_layers": (2, "weights"),
    "encoder_mask": (Causal(), "outputs"),
    "mask": (Causal() & SlidingWindow(2), "outputs"),
    "cross_mask": (SlidingWindow(2), "outputs"),
    "position": ("alibi", "outputs"),
    "scale_embedding": (False, "outputs"),
    "share_embeddings": (False, "weights"),
    "dtype": DTYPE_OPTION,
    "name": NAME_OPTION,
}


def test_the_table_of_options_is_complete():
    assert_complete(encoder_decoder, {**OPTIONS, "inputs": None})


@cases(OPTIONS)
def test_each_option_acts_and_survives(name):
    check_option(
        encoder_decoder,
        arguments(num_layers=1),
        OPTIONS[name],
        name,
        (DATA,),
        model_again,
    )


@pytest.mark.parametrize("name", list(PADDING))
def test_each_input_acts(name):
    everything = np.ones_like(PADDING[name])
    changed = abs(logits(**{name: everything}) - logits()).max(axis=-1)
    assert changed.max() > 1e-4
    # Pads at the end of a causal sequence have nobody after them.
    if name == "decoder_padding_mask":
        assert (changed[PADDING[name]] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer"),
        ({"num_decoder_layers": 0}, "`num_decoder_layers` must be a positive"),
        (
            {"inputs": ("encoder_token_ids",)},
            "`inputs` must be different names.*'decoder_token_ids'",
        ),
        (
            {"encoder_mask": [Causal()]},
            "`encoder_mask` must be a Mask, or a sequence of 2",
        ),
        (
            {"mask": [Causal()] * 2, "num_decoder_layers": 3},
            "`mask` must be a Mask, or a sequence of 3",
        ),
        ({"cross_mask": "full"}, "`cross_mask` must be a Mask or None"),
        ({"position": "learned"}, "`max_length` must be given"),
    ],
)
def test_rejects_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        encoder_decoder(**{**BASE, **options})
