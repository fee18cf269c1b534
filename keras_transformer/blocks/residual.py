"""Residual connections: where the norms go, and what may be dropped."""

import keras
from keras import ops

from keras_transformer._internal.seeds import part_seed
from keras_transformer._internal.sublayers import built_norm, run

PLACEMENTS = ("pre", "post", "sandwich", "parallel")


class ResidualBranch(keras.layers.Layer):
    """What surrounds a sub-layer: norms, dropout, scale and residual.

    With sub-layer `f`: `"pre"` gives `x + f(norm(x))`, `"post"` gives
    `norm(x + f(x))`, `"sandwich"` gives `x + norm(f(norm(x)))`. In a
    `"parallel"` block all sub-layers read one norm, which the block holds:
    `x + f(n) + g(n)`.

    References: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762) for
    post; [Xiong et al., 2020](https://arxiv.org/abs/2002.04745) for pre;
    [Ding et al., 2021](https://arxiv.org/abs/2105.13290), section 2.4, for
    sandwich; [Touvron et al., 2021](https://arxiv.org/abs/2103.17239) for
    the layer scale; [Huang et al., 2016](https://arxiv.org/abs/1603.09382)
    for stochastic depth.

    Args:
        placement: One of the names above.
        normalization: As `TransformerEncoder` takes it.
        epsilon: Added to the variance.
        dropout: Rate on the sub-layer's output.
        layer_scale: None, or the initial value of a trained factor on each
            feature of the sub-layer's output.
        stochastic_depth: Chance that a row skips the sub-layer in training.
        seed: Seed of both kinds of dropping.
    """

    def __init__(
        self,
        *,
        placement,
        normalization,
        epsilon,
        dropout,
        layer_scale,
        stochastic_depth,
        seed,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.placement = placement
        self.normalization = normalization
        self.epsilon = epsilon
        self.layer_scale = layer_scale
        self.stochastic_depth = stochastic_depth
        self._dropout = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )
        # Noise of shape (batch, 1, 1): a row is kept or skipped as a whole.
        self._skip = keras.layers.Dropout(
            stochastic_depth,
            noise_shape=(None, 1, 1),
            seed=part_seed(seed, "stochastic_depth"),
            dtype=self.dtype_policy,
            name="stochastic_depth",
        )

    def build(self, input_shape):
        if self.placement != "parallel":
            self._norm = built_norm(
                self, self.normalization, self.epsilon, "norm", input_shape
            )
        if self.placement == "sandwich":
            self._output_norm = built_norm(
                self,
                self.normalization,
                self.epsilon,
                "output_norm",
                input_shape,
            )
        if self.layer_scale is not None:
            self._scale = self.add_weight(
                name="layer_scale",
                shape=(input_shape[-1],),
                initializer=keras.initializers.Constant(self.layer_scale),
            )

    def enter(self, inputs):
        """What the sub-layer reads."""
        if self.placement in ("pre", "sandwich"):
            return run(self._norm, inputs)
        return inputs

    def leave(self, inputs, outputs, training):
        """The block's stream after the sub-layer."""
        if self.placement == "sandwich":
            outputs = run(self._output_norm, outputs)
        outputs = run(self._dropout, outputs, training=training)
        if self.layer_scale is not None:
            outputs = outputs * ops.cast(self._scale, outputs.dtype)
        if self.stochastic_depth:
            outputs = run(self._skip, outputs, training=training)
        outputs = inputs + outputs
        if self.placement == "post":
            outputs = run(self._norm, outputs)
        return outputs
