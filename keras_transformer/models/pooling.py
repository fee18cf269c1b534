"""The pooling of a classifier."""

import keras
from keras import ops

from keras_transformer._internal.padding import combined_padding
from keras_transformer._internal.serialization import register


@register
class MeanPooling(keras.layers.Layer):
    """The mean of the real tokens' states.

    A row without real tokens, as the padding of a batch has, gives zeros: a
    NaN would spoil the loss of the whole batch, whatever its sample weight.

    Call arguments:
        inputs: (batch, length, model_dim).
        mask, inputs_mask: Filled by Keras from the mask the inputs carry.
        padding_mask: (batch, length) booleans, True for a real token.

    Returns:
        (batch, model_dim).
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs, mask=None, inputs_mask=None, *, padding_mask=None):
        padding_mask = combined_padding(mask, inputs_mask, padding_mask)
        # Half precision would round long sums, and float16 overflow.
        states = ops.cast(inputs, "float32")
        if padding_mask is None:
            means = ops.mean(states, axis=1)
        else:
            real = padding_mask[..., None]
            total = ops.sum(ops.where(real, states, 0.0), axis=1)
            count = ops.sum(ops.cast(real, "float32"), axis=1)
            means = total / ops.maximum(count, 1.0)
        return ops.cast(means, self.compute_dtype)

    def compute_mask(self, inputs, previous_mask=None):
        """The axis of tokens is gone."""
        return None

    def compute_output_shape(self, inputs_shape):
        return (inputs_shape[0], inputs_shape[-1])
