"""Gated feed-forward networks: SwiGLU, GEGLU and their relatives."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import dtype_config, register
from keras_transformer._internal.sublayers import built_dense, run
from keras_transformer.feed_forward.dense import model_dim_of


@register
class GatedFeedForward(keras.layers.Layer):
    """Computes `down(dropout(activation(gate(x)) * up(x)))` at every position.

    The activation names the variant: `"silu"` is SwiGLU, `"gelu"` GEGLU,
    `"relu"` ReGLU, `"sigmoid"` the original GLU, `"linear"` the bilinear one.
    It has half as many weights again as a `FeedForward` of the same
    `intermediate_dim`; two thirds of the width make them equal.

    Reference: [Shazeer, 2020](https://arxiv.org/abs/2002.05202)

    Args:
        intermediate_dim: Width of the gate and of the up projection.
        activation: Applied to the gate.
        dropout: Rate at which hidden units are dropped in training.
        use_bias: Whether the three projections have a bias.
        kernel_initializer: Initializer of the three kernels.
        bias_initializer: Initializer of the three biases.
        seed: Seed of the dropout.

    Call arguments:
        inputs: `(..., model_dim)`. Its mask passes through unchanged.
        training: Whether dropout is active.

    Returns:
        `(..., model_dim)`.

    Raises:
        ValueError: If an argument is out of range, or the last axis of the
            inputs has no fixed size.

    Example:

    ```python
    inputs = keras.random.normal((2, 10, 64))
    outputs = GatedFeedForward(168, use_bias=False)(inputs)
    ```
    """

    def __init__(
        self,
        intermediate_dim: int,
        *,
        activation="silu",
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed: int | None = None,
        **kwargs,
    ):
        checks.positive_int(intermediate_dim=intermediate_dim)
        checks.rate(dropout=dropout)
        checks.boolean(use_bias=use_bias)
        super().__init__(**kwargs)
        self.intermediate_dim = intermediate_dim
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        self.supports_masking = True

    def build(self, input_shape):
        model_dim = model_dim_of(input_shape)
        width = self.intermediate_dim
        hidden_shape = (*input_shape[:-1], width)
        options = {
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            "bias_initializer": self.bias_initializer,
        }
        self._gate = built_dense(self, width, "gate", input_shape, **options)
        self._up = built_dense(self, width, "up", input_shape, **options)
        self._down = built_dense(
            self, model_dim, "down", hidden_shape, **options
        )
        self._dropout = keras.layers.Dropout(
            self.dropout,
            seed=self.seed,
            dtype=self.dtype_policy,
            name="dropout",
        )

    def call(self, inputs, training=None):
        hidden = self.activation(run(self._gate, inputs))
        hidden = hidden * run(self._up, inputs)
        hidden = run(self._dropout, hidden, training=training)
        return run(self._down, hidden)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "bias_initializer": keras.initializers.serialize(
                self.bias_initializer
            ),
            "seed": self.seed,
            **dtype_config(self),
        }
