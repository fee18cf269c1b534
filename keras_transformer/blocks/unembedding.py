"""The de-embedding: vectors to logits over the vocabulary."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register, serialize
from keras_transformer._internal.sublayers import copy_of
from keras_transformer.blocks.embedding import PositionalEmbedding

_TIED = "tied"


@register
class Unembedding(keras.layers.Layer):
    """Projects to logits, with the embedding's own table or another one.

    `inputs @ table.T + bias`. When it is tied, the table enters the model's
    graph as a second input of this layer, so that saved, cloned and rebuilt
    models keep the tie.

    `keras.ops.softmax(logits)` gives probabilities and `keras.ops.argmax`
    the most likely token; losses take the logits (`from_logits=True`).

    References: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.4; [Press and Wolf, 2017](https://arxiv.org/abs/1608.05859).

    Args:
        embedding: The `PositionalEmbedding` whose table to use, or None for
            a kernel of its own. (A configuration holds `"tied"`: the table
            then comes as a call argument.)
        vocabulary_size: Number of tokens; only for a kernel of its own.
        use_bias: Whether to add a bias per token.
        soft_cap: `c`: logits become `c * tanh(logits / c)`.
        kernel_initializer: For a kernel of its own; None: Glorot uniform.

    Call arguments:
        inputs: (batch, length, model_dim).
        table: (vocabulary_size, model_dim); a tied layer fills it in.

    Returns:
        (batch, length, vocabulary_size).

    Raises:
        ValueError: If not exactly one of `embedding` and `vocabulary_size`
            is given.

    Example:

    ```python
    embedding = PositionalEmbedding(1000, 64)
    logits = Unembedding(embedding)(embedding(np.array([[1, 5, 7]])))
    ```
    """

    def __init__(
        self,
        embedding=None,
        vocabulary_size: int | None = None,
        *,
        use_bias: bool = False,
        soft_cap: float | None = None,
        kernel_initializer=None,
        **kwargs,
    ):
        is_layer = isinstance(embedding, PositionalEmbedding)
        if embedding is not None and not is_layer and embedding != _TIED:
            checks.fail(
                "a PositionalEmbedding or None",
                "embedding",
                embedding,
                "For a kernel of its own: Unembedding(vocabulary_size=...).",
            )
        if (embedding is None) == (vocabulary_size is None):
            raise ValueError(
                "Exactly one of `embedding` (to share its table) and "
                "`vocabulary_size` (for an own kernel) must be given. "
                f"Received: embedding={embedding!r}, "
                f"vocabulary_size={vocabulary_size!r}."
            )
        checks.positive_int(vocabulary_size=vocabulary_size, optional=True)
        checks.boolean(use_bias=use_bias)
        checks.positive(soft_cap=soft_cap, optional=True)
        if embedding is not None and kernel_initializer is not None:
            checks.fail(
                "None for a tied layer",
                "kernel_initializer",
                kernel_initializer,
                "Its table is that of the embedding: set "
                "`embeddings_initializer` there.",
            )
        super().__init__(**kwargs)
        # In a closure: the embedding's weights are not this layer's.
        self._table_of = (
            (lambda inputs: embedding(inputs, table=True)) if is_layer else None
        )
        self._table_shape = (
            (embedding.vocabulary_size, embedding.model_dim)
            if is_layer
            else None
        )
        self.embedding = None if embedding is None else _TIED
        self.vocabulary_size = vocabulary_size
        self.use_bias = use_bias
        self.soft_cap = soft_cap
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def __call__(self, inputs, table=None, **kwargs):
        if self.embedding is not None and table is None:
            if self._table_of is None:
                raise ValueError(
                    f"Layer {self.name!r} was rebuilt from the configuration "
                    "of a tied Unembedding and has no table. Call it as "
                    "`layer(inputs, table)`, or make `Unembedding(embedding)`."
                )
            table = self._table_of(inputs)
        if table is None:
            return super().__call__(inputs, **kwargs)
        return super().__call__(inputs, table, **kwargs)

    def build(self, inputs_shape, table_shape=None):
        model_dim = inputs_shape[-1]
        size = self.vocabulary_size
        if self.embedding is not None:
            size, table_dim = table_shape
            if table_dim != model_dim:
                raise ValueError(
                    f"`inputs` must be as wide as the tied table, {table_dim}."
                    f" Received: inputs.shape={tuple(inputs_shape)}."
                )
        else:
            self._kernel = self.add_weight(
                name="kernel",
                shape=(model_dim, size),
                initializer=copy_of(
                    self.kernel_initializer or "glorot_uniform", "kernel"
                ),
            )
        if self.use_bias:
            self._bias = self.add_weight(
                name="bias", shape=(size,), initializer="zeros"
            )

    def call(self, inputs, table=None):
        if table is not None:
            kernel = ops.transpose(table)
        else:
            kernel = ops.convert_to_tensor(self._kernel)
        logits = ops.matmul(inputs, kernel)
        if self.use_bias:
            logits = logits + ops.convert_to_tensor(self._bias)
        if self.soft_cap is not None:
            logits = self.soft_cap * ops.tanh(logits / self.soft_cap)
        return logits

    def compute_mask(self, inputs, previous_mask=None):
        return previous_mask

    def compute_output_shape(self, inputs_shape, table_shape=None):
        size = table_shape[0] if table_shape else self.vocabulary_size
        return (*inputs_shape[:-1], size)

    def get_config(self):
        return {
            **super().get_config(),
            "embedding": self.embedding,
            "vocabulary_size": self.vocabulary_size,
            "use_bias": self.use_bias,
            "soft_cap": self.soft_cap,
            "kernel_initializer": serialize(self.kernel_initializer),
        }
