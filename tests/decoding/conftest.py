"""Models that several tests share, so that they are compiled once."""

import keras
import pytest

from keras_transformer.masks import Causal, SlidingWindow
from keras_transformer.models import decoder_only, encoder_decoder
from tests.decoding.uncached import randomized
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    VOCABULARY_SIZE,
)


@pytest.fixture(scope="module")
def _quick_compilation():
    """Programs that run once are better compiled quickly than well."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SIZES = (VOCABULARY_SIZE, 2, MODEL_DIM, NUM_HEADS, INTERMEDIATE_DIM, 40)


@pytest.fixture(scope="session")
def model():
    """A decoder of two blocks, the second with a window."""
    keras.utils.set_random_seed(0)
    return randomized(
        decoder_only(
            *SIZES,
            num_key_value_heads=NUM_KEY_VALUE_HEADS,
            mask=[Causal(), Causal() & SlidingWindow(4)],
        )
    )


@pytest.fixture(scope="session")
def translator():
    """An encoder-decoder with all its inputs."""
    keras.utils.set_random_seed(0)
    return randomized(
        encoder_decoder(
            *SIZES,
            inputs=(
                "encoder_token_ids",
                "decoder_token_ids",
                "encoder_padding_mask",
                "decoder_padding_mask",
            ),
        )
    )
