"""The embedder: tokens to vectors, with their positions."""

import keras
from keras import ops

from keras_transformer import positions as position_schemes
from keras_transformer._internal import checks
from keras_transformer._internal.decoding_scope import current_scope
from keras_transformer._internal.serialization import (
    deserialize_shared,
    dtype_config,
    part_policy,
    register,
    serialize_shared,
)
from keras_transformer._internal.sublayers import copy_of, run


@register
class PositionalEmbedding(keras.layers.Layer):
    """Embeds tokens and adds their positions.

    `dropout(embedding[token] * scale + position)`.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    sections 3.4 and 3.5.

    Args:
        vocabulary_size: Number of tokens.
        model_dim: Width of the embedding.
        max_length: Largest number of positions; a longer call raises. None
            sets no limit, which `position="learned"` does not allow.
        position: A scheme that acts on embeddings (`Sinusoidal`, `Learned`),
            `"sinusoidal"`, `"learned"`, or None where the positions act
            inside attention.
        scale: Whether to multiply embeddings by `sqrt(model_dim)`.
        mask_zero: Whether token 0 is padding, of which the outputs then carry
            the Keras mask.
        dropout: Rate on the sum.
        embeddings_initializer: For the token table.
        seed: Seed of the dropout.

    Call arguments:
        inputs: int32 (batch, length).
        positions: int32 (length,) or (batch, length); None: slots, counted
            from 0.
        table: Whether to return the token table in place of embeddings; this
            is how a tied `Unembedding` shares it.
        training: Whether dropout is active.

    Returns:
        (batch, length, model_dim), or with `table` (vocabulary_size,
        model_dim).

    Raises:
        ValueError: If the call is longer than `max_length`. (A compiled
            TensorFlow function with an unknown length cannot tell.)

    Example:

    ```python
    embedding = PositionalEmbedding(1000, 64, scale=True)
    outputs = embedding(np.array([[1, 5, 7]]))
    ```
    """

    def __init__(
        self,
        vocabulary_size: int,
        model_dim: int,
        max_length: int | None = None,
        *,
        position="sinusoidal",
        scale: bool = False,
        mask_zero: bool = False,
        dropout: float = 0.0,
        embeddings_initializer="uniform",
        seed: int | None = None,
        **kwargs,
    ):
        checks.positive_int(vocabulary_size=vocabulary_size)
        checks.positive_int(model_dim=model_dim)
        checks.positive_int(max_length=max_length, optional=True)
        checks.boolean(scale=scale)
        checks.boolean(mask_zero=mask_zero)
        checks.rate(dropout=dropout)
        super().__init__(**kwargs)
        position = position_schemes.get(
            deserialize_shared(position, self.name), max_length=max_length
        )
        if position is not None and position.acts_on != "embeddings":
            raise ValueError(
                "`position` must act on embeddings here. Received: "
                f"position={position!r}, which acts inside attention: give it "
                "to the blocks, and `position=None` here."
            )
        self.vocabulary_size = vocabulary_size
        self.model_dim = model_dim
        self.max_length = max_length
        self.position = position
        self.scale = scale
        self.mask_zero = mask_zero
        self.dropout = dropout
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.seed = seed
        self.supports_masking = True

    def build(self, inputs_shape):
        self._embedding = keras.layers.Embedding(
            self.vocabulary_size,
            self.model_dim,
            embeddings_initializer=copy_of(
                self.embeddings_initializer, self.name
            ),
            dtype=part_policy(self, "embedding"),
            name="embedding",
        )
        self._embedding.build(inputs_shape)
        self._dropout = keras.layers.Dropout(
            self.dropout,
            seed=self.seed,
            dtype=self.dtype_policy,
            name="dropout",
        )
        if self.position is not None and not self.position.built:
            self.position.build((*inputs_shape, self.model_dim))

    def call(self, inputs, positions=None, *, table=False, training=None):
        if table:
            return self._table()
        self._check_inputs(inputs)
        outputs = run(self._embedding, inputs)
        if self.scale:
            outputs = outputs * ops.cast(self.model_dim**0.5, outputs.dtype)
        if self.position is not None:
            scope = current_scope()
            if positions is None and scope is not None:
                positions = ops.maximum(scope.slots, 0)
            outputs = outputs + run(self.position, outputs, positions=positions)
        return run(self._dropout, outputs, training=training)

    def compute_mask(self, inputs, previous_mask=None):
        if not self.mask_zero or len(inputs.shape) != 2:
            return None
        return ops.not_equal(inputs, 0)

    def compute_output_spec(
        self, inputs, positions=None, *, table=False, training=None
    ):
        if table:
            shape = (self.vocabulary_size, self.model_dim)
        else:
            self._check_inputs(inputs)
            shape = (*inputs.shape, self.model_dim)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def _table(self):
        if self._embedding.quantization_mode is not None:
            # What a quantised layer stores is no table of numbers: look up.
            return self._embedding(ops.arange(self.vocabulary_size))
        return ops.convert_to_tensor(self._embedding.embeddings)

    def _check_inputs(self, inputs):
        shape = tuple(inputs.shape)
        if len(shape) != 2:
            raise ValueError(
                "`inputs` must have shape (batch, length). Received: "
                f"inputs.shape={shape}."
            )
        length = shape[1]
        limits = (self.max_length, getattr(self.position, "max_length", None))
        limit = min((limit for limit in limits if limit), default=None)
        if limit and length and length > limit:
            raise ValueError(
                f"`inputs` must have at most max_length={limit} tokens a row. "
                f"Received: inputs.shape={shape}. Shorten the rows, or build "
                "the layer with a larger `max_length`."
            )

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "model_dim": self.model_dim,
            "max_length": self.max_length,
            "position": serialize_shared(self.position),
            "scale": self.scale,
            "mask_zero": self.mask_zero,
            "dropout": self.dropout,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "seed": self.seed,
            **dtype_config(self),
        }
