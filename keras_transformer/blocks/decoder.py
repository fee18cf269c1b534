"""The decoder block."""

from functools import partial

import keras
from keras import ops

from keras_transformer._internal.padding import combined_padding
from keras_transformer._internal.serialization import register, serialize
from keras_transformer._internal.sublayers import run
from keras_transformer.attention.stepwise import call_with_cache
from keras_transformer.blocks import parts
from keras_transformer.masks import Causal, Full, Mask


@register
class TransformerDecoder(keras.layers.Layer):
    """One decoder block: causal self-attention, cross-attention, feed-forward.

    Cross-attention is there when the block is built with an encoder sequence;
    a decoder-only model calls the block with one sequence.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.1; the other norm placements are those of `ResidualBranch`.

    Args:
        intermediate_dim: Width of the feed-forward network that is made from
            a name.
        num_heads: Number of query heads.
        key_dim: Width of a head; None: model width divided by `num_heads`.
        value_dim: Width of a value head; None: `key_dim`.
        num_key_value_heads: Number of key and value heads; None: `num_heads`.
        mask: A `Mask` for the self-attention; None is `Causal()`.
        cross_mask: A `Mask` for the cross-attention; None is `Full()`.
        position: A scheme for queries, keys or scores of the self-attention;
            see `MultiHeadAttention`. One `RelativePositionBias` can be given
            to several blocks, which then share it.
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
        attention: None, or a layer to use in place of the self-attention made
            from the arguments above; it takes the call arguments of
            `MultiHeadAttention`.
        layer_scale: None, or the initial value of a trained factor on each
            feature of a sub-layer's output.
        stochastic_depth: Chance that a row skips a sub-layer in training.
        kernel_initializer: For all projections.
        bias_initializer: For all biases.
        seed: Seed of the dropouts.

    Call arguments:
        decoder_sequence: (batch, length, model_dim).
        encoder_sequence: (batch, encoder_length, encoder_dim), or None.
        mask, decoder_sequence_mask, encoder_sequence_mask: Filled by Keras
            from the masks the sequences carry.
        padding_mask: (batch, length) booleans, True for a real token.
        attention_mask: Booleans (batch, length, length), True = may attend.
        encoder_padding_mask: (batch, encoder_length) booleans.
        encoder_attention_mask: Booleans (batch, length, encoder_length).
        segment_ids: (batch, length) int32, read by `Documents()`.
        encoder_segment_ids: (batch, encoder_length) int32.
        prefix_length: int32 (batch,), read by `Prefix()`.
        positions: int32 (length,) or (batch, length); None: slots.
        training: Whether dropout is active.

    Returns:
        (batch, length, model_dim).

    Raises:
        ValueError: If the block is built with an encoder sequence and called
            without one, or the other way round.

    Example:

    ```python
    block = TransformerDecoder(256, num_heads=8, position="rope")
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
        cross_mask: Mask | None = None,
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
        parts.set_options(self, locals(), default_mask=Causal())
        self.cross_mask = parts.mask_or_default(Full(), cross_mask=cross_mask)

    def build(self, decoder_sequence_shape, encoder_sequence_shape=None):
        shape = decoder_sequence_shape
        self._self_attention = parts.build_self_attention(
            self, shape, has_other=encoder_sequence_shape is not None
        )
        self._attention_branch = parts.build_branch(
            self, "attention_branch", shape
        )
        self._cross_attention = None
        if encoder_sequence_shape is not None:
            self._cross_attention = parts.build_attention(
                self,
                "cross_attention",
                shape,
                encoder_sequence_shape,
                mask=self.cross_mask,
            )
            self._cross_branch = parts.build_branch(
                self, "cross_attention_branch", shape
            )
        self._feed_forward = parts.build_feed_forward(self, shape)
        self._feed_forward_branch = parts.build_branch(
            self, "feed_forward_branch", shape
        )
        self._norm = parts.build_shared_norm(self, shape)

    def call(
        self,
        decoder_sequence,
        encoder_sequence=None,
        mask=None,
        decoder_sequence_mask=None,
        encoder_sequence_mask=None,
        *,
        padding_mask=None,
        attention_mask=None,
        encoder_padding_mask=None,
        encoder_attention_mask=None,
        segment_ids=None,
        encoder_segment_ids=None,
        prefix_length=None,
        positions=None,
        training=None,
    ):
        self._check_encoder_sequence(encoder_sequence is not None)
        if encoder_sequence is None:
            self._check_no_encoder_data(
                encoder_padding_mask=encoder_padding_mask,
                encoder_attention_mask=encoder_attention_mask,
                encoder_segment_ids=encoder_segment_ids,
            )
        padding_mask = combined_padding(
            mask, decoder_sequence_mask, padding_mask
        )
        stream = ops.cast(decoder_sequence, self.compute_dtype)
        attentions = [self._self_attention]
        if encoder_sequence is not None:
            attentions.append(self._cross_attention)
        data, *cross_data = parts.mask_data(
            self,
            attentions,
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
        sublayers = [(self._attention_branch, attend)]
        if encoder_sequence is not None:
            attend_across = partial(
                run,
                self._cross_attention,
                value=encoder_sequence,
                padding_mask=combined_padding(
                    encoder_sequence_mask, encoder_padding_mask
                ),
                attention_mask=encoder_attention_mask,
                key_segment_ids=encoder_segment_ids,
                training=training,
                **cross_data[0],
            )
            sublayers.append((self._cross_branch, attend_across))
        transform = parts.feed_forward_call(
            self._feed_forward, padding_mask, training
        )
        sublayers.append((self._feed_forward_branch, transform))
        return parts.run_sublayers(stream, sublayers, self._norm, training)

    def init_cache(self, batch_size: int, length: int) -> dict:
        """An empty cache for `call_with_cache`; see `MultiHeadAttention`."""
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before `init_cache`: "
                "call it once, or `build(input_shape)`."
            )
        return self._self_attention.init_cache(batch_size, length)

    def call_with_cache(self, inputs, cache: dict, *, lengths=None, **kwargs):
        """Runs the block on the next tokens of each row.

        Args:
            inputs: (batch, length, model_dim): the next `length` tokens.
            cache: What `init_cache` or the previous call returned. It also
                keeps the projected encoder sequence of the first call.
            lengths: int32 (batch,), how many of the tokens each row really
                has, counted from the left; None: all.
            **kwargs: Further call arguments.

        Returns:
            The outputs (batch, length, model_dim) and the new cache.
        """
        return call_with_cache(self, inputs, cache, lengths, kwargs)

    def compute_output_shape(
        self, decoder_sequence_shape, encoder_sequence_shape=None
    ):
        if self.built:
            self._check_encoder_sequence(encoder_sequence_shape is not None)
        return decoder_sequence_shape

    def get_config(self):
        return {
            **super().get_config(),
            **parts.options_config(self),
            "cross_mask": serialize(self.cross_mask),
        }

    def _check_encoder_sequence(self, is_given):
        has_cross_attention = self._cross_attention is not None
        if has_cross_attention != is_given:
            built = "with" if has_cross_attention else "without"
            called = "without" if has_cross_attention else "with"
            raise ValueError(
                f"Decoder block {self.name!r} was built {built} "
                "`encoder_sequence` and must always be called so. Received: a "
                f"call {called} it. Make a second block for the other use."
            )

    def _check_no_encoder_data(self, **data):
        for name, value in data.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` of decoder block {self.name!r} needs "
                    "`encoder_sequence`. Received: no `encoder_sequence`."
                )
