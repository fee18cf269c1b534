"""A value other than the default for the arguments of both blocks."""

import keras

from keras_transformer.feed_forward import FeedForward
from tests.sizes import INTERMEDIATE_DIM

BLOCK_OPTIONS = {
    "intermediate_dim": (12, "weights"),
    "num_heads": (2, "outputs"),
    "key_dim": (5, "weights"),
    "value_dim": (5, "weights"),
    "num_key_value_heads": (2, "weights"),
    "position": ("rope", "outputs"),
    "dropout": (0.5, "training"),
    "attention_dropout": (0.5, "training"),
    "attention_bias": (False, "weights"),
    "activation": ("gelu", "outputs"),
    "use_bias": (False, "weights"),
    "normalization": (
        lambda: keras.layers.LayerNormalization(center=False),
        "weights",
    ),
    "layer_norm_epsilon": (0.5, "outputs"),
    "norm_placement": ("post", "outputs"),
    "feed_forward": (
        lambda: FeedForward(
            INTERMEDIATE_DIM, activation="gelu", name="feed_forward"
        ),
        "outputs",
    ),
    "layer_scale": (0.5, "weights"),
    "stochastic_depth": (0.9, "training", {"seed": 1}),
    "kernel_initializer": ("ones", "initial"),
    "bias_initializer": ("ones", "initial"),
    "seed": (5, "training", {"dropout": 0.5, "seed": 4}),
}
