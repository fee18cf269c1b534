"""The encoder block."""

from functools import partial

import keras
from keras import ops

from keras_transformer._internal.padding import combined_padding
from keras_transformer._internal.serialization import register
from keras_transformer._internal.sublayers import run
from keras_transformer.blocks import parts
from keras_transformer.masks import Full, Mask


@register
class TransformerEncoder(keras.layers.Layer):
    """One encoder block: self-attention, then a feed-forward network.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.1; the other norm placements are those of `ResidualBranch`.

    Args:
        intermediate_dim: Width of the feed-forward network that is made from
            a name.
        num_heads: Number of query heads.
        key_dim: Width of a head; None: model width divided by `num_heads`.
        value_dim: Width of a value head; None: `key_dim`.
        num_key_value_heads: Number of key and value heads; None: `num_heads`.
        mask: A `Mask`; None is `Full()`.
        position: A scheme for queries, keys or scores; see
            `MultiHeadAttention`. One `RelativePositionBias` can be given to
            several blocks, which then share it.
        dropout: Rate on each sub-layer's output.
        attention_dropout: Rate on the attention weights; None: `dropout`.
        attention_bias: Whether the attention's projections have biases; None:
            `use_bias`.
        activation: Of the feed-forward network; None: `"relu"`, or `"silu"`
            when it is gated.
        use_bias: Whether projections have biases.
        normalization: `"layer_norm"`, `"rms_norm"` or a layer, which is
            copied for each place.
        layer_norm_epsilon: Added to the variance; a given layer has its own.
        norm_placement: `"pre"`, `"post"`, `"sandwich"` or `"parallel"`.
        feed_forward: `"dense"`, `"gated"` or a layer.
        attention: None, or a layer to use in place of the multi-head
            attention made from the arguments above; it takes the call
            arguments of `MultiHeadAttention`.
        layer_scale: None, or the initial value of a trained factor on each
            feature of a sub-layer's output.
        stochastic_depth: Chance that a row skips a sub-layer in training.
        kernel_initializer: For all projections.
        bias_initializer: For all biases.
        seed: Seed of the dropouts.

    Call arguments:
        inputs: (batch, length, model_dim).
        mask, inputs_mask: Filled by Keras from the mask the inputs carry.
        padding_mask: (batch, length) booleans, True for a real token. Padded
            tokens are hidden as keys, and computed like any other as queries.
        attention_mask: Booleans (batch, length, length), True = may attend.
        segment_ids: (batch, length) int32, read by `Documents()`.
        prefix_length: int32 (batch,), read by `Prefix()`.
        positions: int32 (length,) or (batch, length); None: slots.
        training: Whether dropout is active.

    Returns:
        (batch, length, model_dim).

    Example:

    ```python
    block = TransformerEncoder(256, num_heads=8, dropout=0.1)
    outputs = block(keras.random.normal((2, 10, 64)))
    ```
    """

    def __init__(
        self,
        intermediate_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_key_value_heads: int | None = None,
        mask: Mask | None = None,
        position=None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        attention_bias: bool | None = None,
        activation=None,
        use_bias: bool = True,
        normalization="layer_norm",
        layer_norm_epsilon: float = 1e-5,
        norm_placement: str = "pre",
        feed_forward="dense",
        attention=None,
        layer_scale: float | None = None,
        stochastic_depth: float = 0.0,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed: int | None = None,
        **kwargs,
    ):
        # The block casts its inputs itself, so that a tensor stays the same
        # object on its way to the attention layer.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        parts.set_options(self, locals(), default_mask=Full())

    def build(self, inputs_shape):
        shape = inputs_shape
        self._self_attention = parts.build_self_attention(self, shape)
        self._feed_forward = parts.build_feed_forward(self, shape)
        self._attention_branch = parts.build_branch(
            self, "attention_branch", shape
        )
        self._feed_forward_branch = parts.build_branch(
            self, "feed_forward_branch", shape
        )
        self._norm = parts.build_shared_norm(self, shape)

    def call(
        self,
        inputs,
        mask=None,
        inputs_mask=None,
        *,
        padding_mask=None,
        attention_mask=None,
        segment_ids=None,
        prefix_length=None,
        positions=None,
        training=None,
    ):
        padding_mask = combined_padding(mask, inputs_mask, padding_mask)
        stream = ops.cast(inputs, self.compute_dtype)
        (data,) = parts.mask_data(
            self,
            [self._self_attention],
            segment_ids=segment_ids,
            prefix_length=prefix_length,
        )
        attend = partial(
            run,
            self._self_attention,
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            positions=positions,
            training=training,
            **data,
        )
        transform = parts.feed_forward_call(
            self._feed_forward, padding_mask, training
        )
        sublayers = (
            (self._attention_branch, attend),
            (self._feed_forward_branch, transform),
        )
        return parts.run_sublayers(stream, sublayers, self._norm, training)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), **parts.options_config(self)}
