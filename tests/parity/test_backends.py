"""A file saved here opens on the other backends and says the same there."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_transformer.masks import Causal, SlidingWindow
from keras_transformer.models import (
    decoder_only,
    encoder_decoder,
    encoder_only,
)
from tests.conftest import ROOT
from tests.numerics import assert_close, randomize_weights
from tests.parity.one_backend import measured
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    VOCABULARY_SIZE,
)

SIZES = (VOCABULARY_SIZE, 2, MODEL_DIM, NUM_HEADS, INTERMEDIATE_DIM)
OTHERS = sorted({"jax", "tensorflow", "torch"} - {keras.backend.backend()})


def models():
    return {
        "decoder": decoder_only(
            *SIZES,
            num_key_value_heads=NUM_KEY_VALUE_HEADS,
            normalization="rms_norm",
            feed_forward="gated",
            mask=Causal() & SlidingWindow(4),
        ),
        "translator": encoder_decoder(
            *SIZES,
            position="t5",
            inputs=(
                "encoder_token_ids",
                "decoder_token_ids",
                "encoder_padding_mask",
            ),
        ),
        "classifier": encoder_only(
            *SIZES,
            max_length=9,
            inputs=("token_ids", "padding_mask"),
            head="classification",
            num_classes=3,
            norm_placement="post",
        ),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Name of a backend to what it computes from files saved on this one."""
    folder = tmp_path_factory.mktemp("saved")
    for name, model in models().items():
        randomize_weights(model)
        model.save(folder / f"{name}.keras")
    found = {keras.backend.backend(): measured(folder)}
    for backend in OTHERS:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.parity.one_backend", str(folder)],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
        )
        assert finished.returncode == 0, finished.stderr
        with np.load(folder / f"{backend}.npz") as arrays:
            found[backend] = dict(arrays)
    return found


@pytest.mark.parametrize("other", OTHERS)
def test_outputs_and_gradients_are_the_same_elsewhere(results, other):
    here = results[keras.backend.backend()]
    assert here.keys() == results[other].keys()
    for name, expected in here.items():
        if "tokens" not in name:
            # Gradients of key biases are zero but for rounding: a shift of
            # all scores of a query changes nothing.
            floor = 1.0 if name.endswith("key/bias") else 1e-3
            assert_close(results[other][name], expected, floor=floor)


@pytest.mark.parametrize("other", OTHERS)
def test_texts_are_the_same_elsewhere(results, other):
    for name, expected in results[keras.backend.backend()].items():
        if "tokens" in name:
            np.testing.assert_array_equal(results[other][name], expected)
