"""Position schemes, forward and backward, beside KerasHub's.

    KERAS_BACKEND=jax python benchmarks/positions.py [--quick]

`RelativePositionBias` has no public layer as its peer: it is beside our own
ALiBi of the same shape. Ratios above 1 are in our favour.
"""

import execution
import keras
import numpy as np
from keras import ops
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import (
    ALiBi,
    Learned,
    RelativePositionBias,
    RoPE,
    Sinusoidal,
)


def rotary(is_ours, shape):
    """Rotation of queries; both in halves."""
    if is_ours:
        layer = RoPE()
    else:
        import keras_hub

        layer = keras_hub.layers.RotaryEmbedding()
    return _step(layer, shape)


def learned(is_ours, shape):
    """A table of positions, added to embeddings."""
    if is_ours:
        layer = Learned(shape[1])
    else:
        import keras_hub

        layer = keras_hub.layers.PositionEmbedding(shape[1])
    return _step(_Added(layer), shape)


def sinusoidal(is_ours, shape):
    """Sines and cosines, added to embeddings."""
    if is_ours:
        layer = Sinusoidal()
    else:
        import keras_hub

        layer = keras_hub.layers.SinePositionEncoding()
    return _step(_Added(layer), shape)


def score_bias(scheme, shape):
    """A bias, added to scores of (batch, heads, query, key)."""
    if scheme == "ALiBi":
        layer = _OnScores(ALiBi(num_heads=shape[1]))
    elif scheme == "T5":
        layer = _OnScores(RelativePositionBias(num_heads=shape[1]))
    else:
        import keras_hub

        layer = keras_hub.layers.AlibiBias()
    return _step(layer, shape)


class _Added(keras.layers.Layer):
    """Adds what a layer gives to its inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        if not self.layer.built:
            self.layer.build(shape)

    def call(self, inputs):
        return inputs + self.layer(inputs)


class _OnScores(_Added):
    """Adds the bias of a scheme to scores."""

    def build(self, shape):
        self.slots = np.arange(shape[-1], dtype="int32")
        self.layer(self.slots, self.slots)

    def call(self, inputs):
        return ops.add(inputs, self.layer(self.slots, self.slots))


def _step(layer, shape):
    inputs = execution.random_tensor(shape)
    return execution.layer_gradient_runner(layer, inputs)


def main(chosen):
    """Prints the table."""
    table = comparison_table()
    batch, length, heads = 8, chosen.size(1024, 16), 8
    for make, shape in (
        (rotary, (batch, length, heads, 64)),
        (learned, (batch, length, 512)),
        (sinusoidal, (batch, length, 512)),
    ):
        compare(
            table,
            chosen,
            make.__name__,
            Rival(make, True, shape),
            "KerasHub",
            Rival(make, False, shape),
            shape=" x ".join(map(str, shape)),
        )
    shape = (1, heads, length, length)
    for scheme, peer in (("ALiBi", "KerasHub"), ("T5", "ALiBi")):
        compare(
            table,
            chosen,
            f"{scheme} on scores",
            Rival(score_bias, scheme, shape),
            f"{'our ' * (peer == 'ALiBi')}{peer}",
            Rival(score_bias, peer, shape),
            shape=" x ".join(map(str, shape)),
        )


if __name__ == "__main__":
    main(options(__doc__))
