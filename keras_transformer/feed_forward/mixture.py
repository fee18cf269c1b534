"""Sparse mixture of experts in place of one feed-forward network."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.padding import combined_padding
from keras_transformer._internal.serialization import register
from keras_transformer._internal.sublayers import copy_of
from keras_transformer.feed_forward import routing
from keras_transformer.feed_forward.dense import model_dim_of


@register
class MixtureOfExperts(keras.layers.Layer):
    """Computes, per token, a weighted sum of its `top_k` experts' outputs.

    An expert is a `GatedFeedForward` or `FeedForward` without biases. A router,
    `softmax(x @ kernel)` in float32, chooses the experts of each token. Every
    token gets all its experts, however many choose the same one, so a token's
    output never depends on other tokens. The work is that of at most
    `1.5 * top_k` experts a token, whatever `num_experts` is.

    In training, the layer adds the loss
    `load_balancing * num_experts * sum_e(share_e * probability_e)`, from the
    share of tokens an expert gets and its mean probability. Padded tokens are
    not counted.

    Reference: [Fedus et al., 2021](https://arxiv.org/abs/2101.03961),
    [Jiang et al., 2024](https://arxiv.org/abs/2401.04088)

    Args:
        num_experts: Number of experts, at least 2.
        intermediate_dim: Width of each expert's hidden layer.
        top_k: Experts that a token uses.
        activation: Applied to the gate, or to the hidden layer if not `gated`.
        gated: Whether an expert is `down(activation(gate(x)) * up(x))` rather
            than `down(activation(up(x)))`.
        load_balancing: Coefficient of the loss; 0 for none.
        normalize_top_k: Whether the weights of a token's experts sum to 1.
            With one expert a token it must be False: the weight would always
            be 1, and the router would learn nothing from the task.
        dropout: Rate at which hidden units are dropped in training.
        kernel_initializer: Initializer of the router and of each expert.
        seed: Seed of the dropout.

    Call arguments:
        inputs: `(..., model_dim)`. Its mask passes through unchanged.
        padding_mask: `(...)`, True for tokens that count in the loss; and-ed
            with the mask of the inputs.
        training: Whether the loss is added and dropout active.

    Returns:
        `(..., model_dim)`.

    Raises:
        ValueError: If an argument is out of range, the last axis of the inputs
            has no fixed size, or `padding_mask` does not fit the inputs.

    Example:

    ```python
    inputs = keras.random.normal((2, 10, 64))
    outputs = MixtureOfExperts(8, 128, top_k=2)(inputs)
    # One expert a token, as in the Switch Transformer.
    switch = MixtureOfExperts(
        8, 256, top_k=1, normalize_top_k=False, activation="relu", gated=False
    )
    ```
    """

    def __init__(
        self,
        num_experts: int,
        intermediate_dim: int,
        *,
        top_k: int = 2,
        activation="silu",
        gated: bool = True,
        load_balancing: float = 0.01,
        normalize_top_k: bool = True,
        dropout: float = 0.0,
        kernel_initializer="glorot_uniform",
        seed: int | None = None,
        **kwargs,
    ):
        checks.positive_int(num_experts=num_experts)
        if num_experts == 1:
            checks.fail(
                "at least 2",
                "num_experts",
                num_experts,
                "One expert is a `GatedFeedForward` or a `FeedForward`.",
            )
        checks.positive_int(intermediate_dim=intermediate_dim)
        checks.positive_int(top_k=top_k)
        if top_k > num_experts:
            checks.fail(f"at most num_experts={num_experts}", "top_k", top_k)
        checks.boolean(gated=gated)
        checks.boolean(normalize_top_k=normalize_top_k)
        if top_k == 1 and normalize_top_k:
            checks.fail(
                "False when top_k=1",
                "normalize_top_k",
                normalize_top_k,
                "The weight of a single expert would always be 1.",
            )
        if load_balancing != 0:
            checks.positive(load_balancing=load_balancing)
        checks.rate(dropout=dropout)
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.intermediate_dim = intermediate_dim
        self.top_k = top_k
        self.activation = keras.activations.get(activation)
        self.gated = gated
        self.load_balancing = load_balancing
        self.normalize_top_k = normalize_top_k
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.seed = seed
        self.supports_masking = True

    def build(self, input_shape):
        model_dim = model_dim_of(input_shape)
        into = (self.num_experts, model_dim, self.intermediate_dim)
        out = (self.num_experts, self.intermediate_dim, model_dim)
        self._router = self.add_weight(
            shape=(model_dim, self.num_experts),
            initializer=copy_of(self.kernel_initializer, "router"),
            name="router",
            # Half precision would change which experts are chosen.
            autocast=False,
        )
        self._gate = self._expert_weight("gate", into) if self.gated else None
        self._up = self._expert_weight("up", into)
        self._down = self._expert_weight("down", out)
        self._dropout = keras.layers.Dropout(
            self.dropout,
            seed=self.seed,
            dtype=self.dtype_policy,
            name="dropout",
        )

    def call(
        self,
        inputs,
        padding_mask=None,
        training=None,
        mask=None,
        inputs_mask=None,
    ):
        padding_mask = combined_padding(mask, inputs_mask, padding_mask)
        self._check_padding_mask(inputs, padding_mask)
        tokens = ops.reshape(inputs, (-1, inputs.shape[-1]))
        router_dtype = keras.backend.result_type(self.compute_dtype, "float32")
        logits = ops.matmul(
            ops.cast(tokens, router_dtype),
            ops.cast(self._router, router_dtype),
        )
        weights, expert_ids, probabilities = routing.route(
            logits, self.top_k, self.normalize_top_k
        )
        if training and self.load_balancing:
            if padding_mask is not None:
                padding_mask = ops.reshape(padding_mask, (-1,))
            self.add_loss(
                self.load_balancing
                * routing.load_balancing_loss(
                    probabilities, expert_ids, padding_mask
                )
            )
        outputs = self._experts(tokens, expert_ids, training)
        outputs = ops.einsum(
            "nkd,nk->nd", outputs, ops.cast(weights, outputs.dtype)
        )
        return ops.reshape(outputs, ops.shape(inputs))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "num_experts": self.num_experts,
            "intermediate_dim": self.intermediate_dim,
            "top_k": self.top_k,
            "activation": keras.activations.serialize(self.activation),
            "gated": self.gated,
            "load_balancing": self.load_balancing,
            "normalize_top_k": self.normalize_top_k,
            "dropout": self.dropout,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "seed": self.seed,
        }

    def _experts(self, tokens, expert_ids, training):
        """Outputs `(n, k, d)` of each token's experts."""
        block_tokens, experts, rows = routing.group_by_expert(
            expert_ids, self.num_experts
        )
        # Row 0 is for empty places: zeros cannot overflow in an expert.
        padded = ops.pad(tokens, ((1, 0), (0, 0)))
        blocks = ops.take(padded, block_tokens, axis=0)
        hidden = ops.matmul(blocks, ops.take(self._up, experts, axis=0))
        if self.gated:
            gate = ops.matmul(blocks, ops.take(self._gate, experts, axis=0))
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = self._dropout(hidden, training=training)
        outputs = ops.matmul(hidden, ops.take(self._down, experts, axis=0))
        outputs = ops.reshape(outputs, (-1, tokens.shape[-1]))
        return ops.take(outputs, rows, axis=0)

    def _expert_weight(self, name, shape):
        """One kernel per expert, stacked, each initialised as a matrix."""

        def initializer(shape, dtype=None):
            return ops.stack(
                [
                    copy_of(self.kernel_initializer, f"{name}_{expert}")(
                        shape[1:], dtype=dtype
                    )
                    for expert in range(shape[0])
                ]
            )

        return self.add_weight(shape=shape, initializer=initializer, name=name)

    def _check_padding_mask(self, inputs, padding_mask):
        if padding_mask is None:
            return
        expected = tuple(inputs.shape[:-1])
        received = tuple(padding_mask.shape)
        if len(expected) != len(received) or any(
            None not in pair and pair[0] != pair[1]
            for pair in zip(expected, received, strict=True)
        ):
            checks.fail(
                f"of shape {expected}, one value a token",
                "padding_mask.shape",
                received,
            )
