"""The position-wise feed-forward network of the original Transformer."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import dtype_config, register
from keras_transformer._internal.sublayers import built_dense, run


def model_dim_of(input_shape) -> int:
    """The size of the last axis, which weights need to be known."""
    model_dim = input_shape[-1]
    if model_dim is None:
        checks.fail(
            "a shape whose last axis is known",
            "input_shape",
            tuple(input_shape),
            "Give `keras.Input` the size of its last axis.",
        )
    return model_dim


@register
class FeedForward(keras.layers.Layer):
    """Computes `down(dropout(activation(up(x))))` at every position.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.3.

    Args:
        intermediate_dim: Width of the hidden layer.
        activation: Applied to the hidden layer.
        dropout: Rate at which hidden units are dropped in training.
        use_bias: Whether both projections have a bias.
        kernel_initializer: Initializer of both kernels.
        bias_initializer: Initializer of both biases.
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
    outputs = FeedForward(256, activation="gelu", dropout=0.1)(inputs)
    ```
    """

    def __init__(
        self,
        intermediate_dim: int,
        *,
        activation="relu",
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
        hidden_shape = (*input_shape[:-1], self.intermediate_dim)
        options = {
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            "bias_initializer": self.bias_initializer,
        }
        self._up = built_dense(
            self, self.intermediate_dim, "up", input_shape, **options
        )
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
        hidden = self.activation(run(self._up, inputs))
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
