import keras
import pytest

from keras_transformer import positions
from keras_transformer.positions import (
    ALiBi,
    Learned,
    RelativePositionBias,
    RoPE,
    Sinusoidal,
)


@pytest.mark.parametrize(
    ("name", "scheme", "acts_on"),
    [
        ("sinusoidal", Sinusoidal, "embeddings"),
        ("learned", Learned, "embeddings"),
        ("rope", RoPE, "query_key"),
        ("alibi", ALiBi, "scores"),
        ("t5", RelativePositionBias, "scores"),
    ],
)
def test_names_give_schemes(name, scheme, acts_on):
    made = positions.get(name, max_length=9)
    assert type(made) is scheme
    assert made.acts_on == acts_on


def test_objects_and_none_pass_unchanged():
    scheme = RoPE()
    assert positions.get(scheme) is scheme
    assert positions.get(None) is None


def test_configurations_give_equal_schemes():
    config = keras.saving.serialize_keras_object(RoPE(500.0, layout="half"))
    made = positions.get(config)
    assert type(made) is RoPE
    assert made.max_wavelength == 500.0


def test_t5_of_a_decoder_has_no_buckets_for_the_future():
    assert positions.get("t5").bidirectional
    assert not positions.get("t5", causal=True).bidirectional


def test_learned_takes_the_length():
    assert positions.get("learned", max_length=9).max_length == 9
    with pytest.raises(ValueError, match=r"`max_length` must be given.*Lear"):
        positions.get("learned")


@pytest.mark.parametrize(
    "identifier", ["rotary", 7, {"rope": 1}, keras.layers.ReLU()]
)
def test_rejects_what_is_no_scheme(identifier):
    with pytest.raises(ValueError, match=r"position scheme or one of.*'rope'"):
        positions.get(identifier)
