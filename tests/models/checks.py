"""What the tests of the builders share."""

import keras
import numpy as np
import pytest

from keras_transformer.feed_forward import FeedForward
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    VOCABULARY_SIZE,
)


def arguments(**options):
    """The arguments that a builder needs, for a small model."""
    return {
        "vocabulary_size": VOCABULARY_SIZE,
        "num_layers": 2,
        "model_dim": MODEL_DIM,
        "num_heads": NUM_HEADS,
        "intermediate_dim": INTERMEDIATE_DIM,
        **options,
    }


def layer_names(model):
    """The names of the layers, inputs left out, as the summary lists them."""
    return [
        layer.name
        for layer in model.layers
        if not isinstance(layer, keras.layers.InputLayer)
    ]


def steps_lower_the_loss(model, inputs, targets):
    """Asserts that one step of `fit` lowers the loss on its batch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    # An epoch is one step, and its loss the one before that step.
    history = model.fit(inputs, targets, epochs=2, verbose=0)
    before, after = history.history["loss"]
    assert np.isfinite(after)
    assert after < before


def copies_of(model, how, folder):
    """Two copies: saved and loaded, cloned, or made of the configuration."""

    def copy():
        if how == "cloned":
            return keras.models.clone_model(model)
        if how == "rebuilt":
            return keras.Model.from_config(model.get_config())
        model.save(folder / "model.keras")
        return keras.models.load_model(folder / "model.keras")

    return copy(), copy()


def _dtype_changes(plain, changed, inputs):
    dtypes = [
        keras.backend.standardize_dtype(model(*inputs).dtype)
        for model in (plain, changed)
    ]
    assert dtypes == ["float32", "bfloat16"]
    layers = [
        layer
        for layer in changed.layers
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    assert {layer.compute_dtype for layer in layers} == {"bfloat16"}


def _name_changes(plain, changed, inputs):
    assert (changed.name, plain.name == changed.name) == ("other", False)


def _longer_raises(plain, changed, inputs):
    plain(*inputs)
    with pytest.raises(ValueError, match="max_length=4"):
        changed(*inputs)


DTYPE_OPTION = ("mixed_bfloat16", _dtype_changes)
NAME_OPTION = ("other", _name_changes)
# The options that the builders have in common, for `num_layers=1`.
MODEL_OPTIONS = {
    "vocabulary_size": (31, "weights"),
    "num_layers": (2, "weights"),
    "model_dim": (16, "weights"),
    "num_heads": (2, "outputs"),
    "intermediate_dim": (12, "weights"),
    "max_length": (4, _longer_raises),
    "dropout": (0.5, "training"),
    "normalization": ("rms_norm", "weights"),
    "layer_norm_epsilon": (0.5, "outputs"),
    "norm_placement": ("post", "weights"),
    "feed_forward": (
        lambda: FeedForward(INTERMEDIATE_DIM, activation="gelu"),
        "outputs",
    ),
    "scale_embedding": (True, "outputs"),
    "embeddings_initializer": ("ones", "initial"),
    "seed": (5, "training", {"dropout": 0.5, "seed": 4}),
}
