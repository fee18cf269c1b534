"""Multi-head attention: grouped, multi-query, self and cross in one layer."""

import keras
from keras import ops

from keras_transformer import positions as position_schemes
from keras_transformer._internal import checks
from keras_transformer._internal.decoding_scope import current_scope
from keras_transformer._internal.padding import combined_padding
from keras_transformer._internal.serialization import (
    deserialize,
    deserialize_shared,
    dtype_config,
    register,
    serialize,
    serialize_shared,
)
from keras_transformer._internal.sublayers import built_dense, built_norm, run
from keras_transformer.attention import cache as caches
from keras_transformer.attention import stepwise
from keras_transformer.attention.arguments import (
    check_heads,
    check_read,
    counted,
)
from keras_transformer.attention.choice import IMPLEMENTATIONS
from keras_transformer.attention.dot_product import dot_product_attention
from keras_transformer.attention.keys import (
    acts_on,
    empty_cache,
    extended,
    grow_with,
    running_lengths,
)
from keras_transformer.attention.recording import note_caller
from keras_transformer.masks import Causal, Full, Mask


@register
class MultiHeadAttention(keras.layers.Layer):
    """Attends with several heads, over the queries or another sequence.

    `output(concat_h(attention(query_h, key_g(h), value_g(h))))`, where `g(h)`
    is the key head that query head `h` shares with its group. The number of
    key heads decides between multi-head (as many as query heads),
    grouped-query and multi-query (one) attention.

    References:
        [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2;
        [Ainslie et al., 2023](https://arxiv.org/abs/2305.13245) for groups.

    Args:
        num_heads: Number of query heads.
        key_dim: Width of each query and key head; None: model width divided
            by `num_heads`.
        num_key_value_heads: Number of key and value heads, a divisor of
            `num_heads`; None: `num_heads`.
        value_dim: Width of each value head; None: `key_dim`.
        output_dim: Width of the output; None: width of the query.
        mask: A `Mask`: who may attend to whom. None is `Full()`.
        position: None, a scheme that acts on queries and keys (`RoPE`) or on
            scores (`ALiBi`, `RelativePositionBias`), or `"rope"`, `"alibi"`,
            `"t5"`.
        dropout: Rate of attention weights set to zero in training.
        use_bias: Whether the projections have biases.
        scale: Factor on the scores; None: `1 / sqrt(key_dim)`.
        soft_cap: `c`: scores become `c * tanh(scores / c)`.
        query_key_norm: Normalises each query and key head: None,
            `"rms_norm"`, `"layer_norm"` or a layer.
        use_sinks: Whether each head learns the score of an extra key without
            a value, to which weight can go.
        use_gate: Whether `sigmoid(gate(query))` multiplies the heads' outputs.
        kernel_initializer: For the projections.
        bias_initializer: For the projections' biases.
        implementation: See `dot_product_attention`.
        seed: Seed of the dropout.

    Call arguments:
        query: (batch, query_length, query_width).
        value: (batch, key_length, value_width); None: `query`.
        key: (batch, key_length, key_width); None: `value`.
        query_mask, value_mask, key_mask, mask: Filled by Keras from the mask
            that a tensor carries; those of the keys are and-ed with
            `padding_mask`. Padded queries are computed like any other.
        padding_mask: (batch, key_length) booleans, True for a real key.
        attention_mask: Booleans, True = may attend, (batch, query_length,
            key_length) or with an axis of heads after the batch. And-ed.
        segment_ids: (batch, query_length) int32, read by `Documents()`.
        key_segment_ids: (batch, key_length) int32; None: `segment_ids`.
        prefix_length: int32 (batch,), read by `Prefix()`.
        positions: int32 (query_length,) or (batch, query_length), for the
            position scheme; None: slots, counted from 0.
        key_positions: The same for the keys of another sequence.
        use_causal_mask: Whether to and `Causal()`.
        return_attention_scores: Whether to return the weights too.
        training: Whether dropout is active.

    Returns:
        (batch, query_length, output_dim); with `return_attention_scores` a
        pair of it and (batch, num_heads, query_length, key_length).

    Raises:
        ValueError: If heads and widths do not fit, or for a mask whose data
            is not passed.

    Example:

    ```python
    layer = MultiHeadAttention(
        num_heads=8, num_key_value_heads=2, mask=Causal(), position="rope"
    )
    outputs = layer(keras.random.normal((2, 10, 64)))
    ```
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int | None = None,
        *,
        num_key_value_heads: int | None = None,
        value_dim: int | None = None,
        output_dim: int | None = None,
        mask: Mask | None = None,
        position=None,
        dropout: float = 0.0,
        use_bias: bool = True,
        scale: float | None = None,
        soft_cap: float | None = None,
        query_key_norm=None,
        use_sinks: bool = False,
        use_gate: bool = False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        implementation: str = "auto",
        seed: int | None = None,
        **kwargs,
    ):
        checks.positive_int(num_heads=num_heads)
        checks.positive_int(key_dim=key_dim, optional=True)
        checks.positive_int(value_dim=value_dim, optional=True)
        checks.positive_int(output_dim=output_dim, optional=True)
        checks.positive_int(
            num_key_value_heads=num_key_value_heads, optional=True
        )
        if num_key_value_heads and num_heads % num_key_value_heads:
            checks.fail(
                f"a divisor of num_heads={num_heads}",
                "num_key_value_heads",
                num_key_value_heads,
            )
        checks.rate(dropout=dropout)
        checks.positive(scale=scale, optional=True)
        checks.positive(soft_cap=soft_cap, optional=True)
        checks.one_of(IMPLEMENTATIONS, implementation=implementation)
        checks.boolean(use_bias=use_bias)
        checks.boolean(use_sinks=use_sinks)
        checks.boolean(use_gate=use_gate)
        # The layer casts its inputs itself, so that `layer(x, x)` still finds
        # the same tensor twice.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.num_key_value_heads = num_key_value_heads
        self.value_dim = value_dim
        self.output_dim = output_dim
        mask = deserialize(mask)
        if mask is not None and not isinstance(mask, Mask):
            checks.fail(
                "a Mask or None", "mask", mask, "For an array: Explicit."
            )
        self.mask = Full() if mask is None else mask
        check_heads(self.mask, num_heads)
        self.position = position_schemes.get(
            deserialize_shared(position, self.name),
            causal=self.mask.lookahead == 0,
        )
        if getattr(self.position, "acts_on", None) == "embeddings":
            raise ValueError(
                "`position` must act on queries and keys or on scores inside "
                f"attention. Received: position={self.position!r}, which is "
                "added to embeddings: give it to `PositionalEmbedding`."
            )
        self.dropout = dropout
        self.use_bias = use_bias
        self.scale = scale
        self.soft_cap = soft_cap
        self.query_key_norm = deserialize(query_key_norm)
        if not isinstance(self.query_key_norm, keras.layers.Layer) and (
            self.query_key_norm not in (None, "rms_norm", "layer_norm")
        ):
            checks.fail(
                'None, "rms_norm", "layer_norm" or a layer',
                "query_key_norm",
                query_key_norm,
            )
        self.use_sinks = use_sinks
        self.use_gate = use_gate
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.implementation = implementation
        self.seed = seed
        self._seed_generator = keras.random.SeedGenerator(seed)

    def build(self, query_shape, value_shape=None, key_shape=None):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        for name, shape in (
            ("query", query_shape),
            ("value", value_shape),
            ("key", key_shape),
        ):
            if len(shape) != 3 or shape[-1] is None:
                raise ValueError(
                    f"`{name}` must have shape (batch, length, width) with a "
                    f"known width. Received: {name}.shape={tuple(shape)}."
                )
        model_dim = query_shape[-1]
        key_dim = self.key_dim
        if key_dim is None:
            if model_dim % self.num_heads:
                checks.fail(
                    f"a divisor of the model width {model_dim}",
                    "num_heads",
                    self.num_heads,
                    "Or give `key_dim`.",
                )
            key_dim = model_dim // self.num_heads
        value_dim = self.value_dim or key_dim
        groups = self.num_key_value_heads or self.num_heads
        self._head_shapes = {
            "query": (self.num_heads, key_dim),
            "key": (groups, key_dim),
            "value": (groups, value_dim),
        }
        self._context_dim = self.num_heads * value_dim
        options = {
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            "bias_initializer": self.bias_initializer,
        }
        self._query, self._key, self._value = (
            built_dense(self, heads * dim, name, shape, **options)
            for (name, (heads, dim)), shape in zip(
                self._head_shapes.items(),
                (query_shape, key_shape, value_shape),
                strict=True,
            )
        )
        if self.use_gate:
            self._gate = built_dense(
                self, self._context_dim, "gate", query_shape, **options
            )
        self._output = built_dense(
            self,
            self.output_dim or model_dim,
            "output",
            (*query_shape[:-1], self._context_dim),
            **options,
        )
        if self.query_key_norm is not None:
            head_shape = (None, None, None, key_dim)
            self._query_norm, self._key_norm = (
                built_norm(self, self.query_key_norm, 1e-6, name, head_shape)
                for name in ("query_norm", "key_norm")
            )
        if self.use_sinks:
            self._sinks = self.add_weight(
                name="sinks", shape=(self.num_heads,), initializer="zeros"
            )
        if getattr(self.position, "acts_on", None) == "scores":
            self.position.bind(self.num_heads)
        self._scale = key_dim**-0.5 if self.scale is None else self.scale

    def call(
        self,
        query,
        value=None,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        mask=None,
        *,
        padding_mask=None,
        attention_mask=None,
        segment_ids=None,
        key_segment_ids=None,
        prefix_length=None,
        positions=None,
        key_positions=None,
        use_causal_mask=False,
        return_attention_scores=False,
        training=None,
    ):
        rule = self.mask & Causal() if use_causal_mask else self.mask
        check_read(
            rule,
            f"layer {self.name!r}",
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            prefix_length=prefix_length,
        )
        for name, given in (
            ("positions", positions),
            ("key_positions", key_positions),
        ):
            if given is not None and self.position is None:
                raise ValueError(
                    f"`{name}` is read by no position scheme of layer "
                    f"{self.name!r}. Received: position=None. Give it one, "
                    'such as `position="rope"`; masks go by slots.'
                )
        scope = current_scope()
        is_self = value is None or (
            value is query and (key is None or key is query)
        )
        padding = combined_padding(
            mask,
            query_mask if is_self else None,
            value_mask,
            key_mask,
            padding_mask,
        )
        value = query if value is None else value
        key = value if key is None else key
        is_growing = scope is not None and (
            is_self or grow_with(query, value, scope)
        )
        if positions is None:
            positions = counted(query) if scope is None else scope.slots
        if key_positions is None:
            key_positions = positions if is_self or is_growing else counted(key)

        queries = self._heads("query", query)
        if scope is not None and not is_self and scope.is_static(value):
            keys = caches.remember(
                scope,
                self,
                lambda: self._keys(key, value, key_positions),
            )
        else:
            keys = self._keys(key, value, key_positions)
        if is_growing:
            if attention_mask is not None:
                raise ValueError(
                    f"`attention_mask` of layer {self.path!r} covers the "
                    "current tokens only and cannot be used in cached "
                    "decoding. Express it by `mask=` or `padding_mask`."
                )
            if key_segment_ids is None:
                key_segment_ids = segment_ids
            keys = extended(
                scope,
                self,
                keys,
                rule,
                padding,
                key_positions,
                key_segment_ids,
            )
            padding = None
            key_positions = keys.get("positions")
            key_segment_ids = keys.get("segment_ids")
        keys_rotated = keys["key"]
        if acts_on(self.position, "query_key"):
            lengths = None
            if self.position.depends_on_length:
                lengths = running_lengths(
                    key_positions, padding, keys.get("slots")
                )
                keys_rotated = run(
                    self.position,
                    keys_rotated,
                    positions=key_positions,
                    lengths=lengths,
                )
            queries = run(
                self.position, queries, positions=positions, lengths=lengths
            )
        biased = acts_on(self.position, "scores")
        note_caller(self)
        outputs = dot_product_attention(
            queries,
            keys_rotated,
            keys["value"],
            mask=rule,
            attention_mask=attention_mask,
            padding_mask=padding,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            prefix_length=prefix_length,
            query_slots=None if scope is None else scope.slots,
            key_slots=keys.get("slots"),
            bias=self.position if biased else None,
            positions=positions if biased else None,
            key_positions=key_positions if biased else None,
            scale=self._scale,
            soft_cap=self.soft_cap,
            sinks=self._sinks if self.use_sinks else None,
            dropout=self.dropout if training else 0.0,
            seed=self._seed_generator,
            return_attention_scores=return_attention_scores,
            implementation=self.implementation,
        )
        scores = None
        if return_attention_scores:
            outputs, scores = outputs
        outputs = ops.reshape(
            outputs, (*ops.shape(query)[:2], self._context_dim)
        )
        if self.use_gate:
            outputs = outputs * ops.sigmoid(run(self._gate, query))
        outputs = run(self._output, outputs)
        return (outputs, scores) if return_attention_scores else outputs

    def init_cache(self, batch_size: int, length: int) -> dict:
        """An empty cache for `call_with_cache`.

        Args:
            batch_size: Number of rows.
            length: Number of tokens that a row can have in all. A layer that
                looks back a bounded number of slots keeps only those.

        Returns:
            A dictionary of tensors.
        """
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before `init_cache`: "
                "call it once, or `build(input_shape)`."
            )
        checks.positive_int(batch_size=batch_size)
        checks.positive_int(length=length)
        return stepwise.new_cache(
            batch_size,
            {f"{self.path}#0": empty_cache(self, batch_size, length)},
        )

    def call_with_cache(self, inputs, cache: dict, *, lengths=None, **kwargs):
        """Attends from the next tokens of each row to all of its tokens.

        Args:
            inputs: (batch, length, width): the next `length` tokens.
            cache: What `init_cache` or the previous call returned.
            lengths: int32 (batch,), how many of the tokens each row really
                has, counted from the left; None: all.
            **kwargs: Further call arguments.

        Returns:
            The outputs (batch, length, output_dim) and the new cache.

        Raises:
            ValueError: If the mask attends both ways, or the cache is full.
        """
        return stepwise.call_with_cache(self, inputs, cache, lengths, kwargs)

    def compute_output_shape(
        self, query_shape, value_shape=None, key_shape=None
    ):
        return (*query_shape[:-1], self.output_dim or query_shape[-1])

    def compute_output_spec(self, query, value=None, key=None, *_, **kwargs):
        outputs = keras.KerasTensor(
            self.compute_output_shape(query.shape), dtype=self.compute_dtype
        )
        if not kwargs.get("return_attention_scores"):
            return outputs
        value = query if value is None else value
        scores_shape = (
            query.shape[0], self.num_heads, query.shape[1], value.shape[1],
        )  # fmt: skip
        return outputs, keras.KerasTensor(
            scores_shape, dtype=self.compute_dtype
        )

    def get_config(self):
        initializer = keras.initializers.serialize
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "num_key_value_heads": self.num_key_value_heads,
            "value_dim": self.value_dim,
            "output_dim": self.output_dim,
            "mask": serialize(self.mask),
            "position": serialize_shared(self.position),
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "query_key_norm": serialize(self.query_key_norm),
            "use_sinks": self.use_sinks,
            "use_gate": self.use_gate,
            "kernel_initializer": initializer(self.kernel_initializer),
            "bias_initializer": initializer(self.bias_initializer),
            "implementation": self.implementation,
            "seed": self.seed,
            **dtype_config(self),
        }

    def _heads(self, name, inputs):
        """Projects and splits: (batch, length, heads, dim)."""
        inputs = ops.cast(inputs, self.compute_dtype)
        outputs = run(getattr(self, f"_{name}"), inputs)
        heads = ops.reshape(
            outputs, (*ops.shape(inputs)[:2], *self._head_shapes[name])
        )
        if self.query_key_norm is not None and name != "value":
            heads = run(getattr(self, f"_{name}_norm"), heads)
            # A given norm may have another policy.
            heads = ops.cast(heads, self.compute_dtype)
        return heads

    def _keys(self, key, value, positions):
        keys = self._heads("key", key)
        if (
            acts_on(self.position, "query_key")
            and not self.position.depends_on_length
        ):
            keys = run(self.position, keys, positions=positions)
        return {"key": keys, "value": self._heads("value", value)}
