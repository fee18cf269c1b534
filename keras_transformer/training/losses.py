"""Losses that Keras lacks. For the others, use Keras's own.

A loss over real tokens only is any loss of Keras with a `sample_weight` that
is 0 for padding and `reduction="mean_with_sample_weight"`, which divides by
the sum of the weights; Keras's default reduction divides by all tokens, so
that the loss would depend on the amount of padding.
"""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register


@register
class LabelSmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy with label smoothing, from integer targets and logits.

    The target distribution gives `1 - label_smoothing` to the target and
    spreads the rest evenly over all classes. It equals Keras's
    `CategoricalCrossentropy(from_logits=True, label_smoothing=...)` on one-hot
    targets, which need not be made; Keras's sparse loss has no smoothing. It is
    computed in float32 or better.

    Reference: [Szegedy et al., 2015](https://arxiv.org/abs/1512.00567),
    section 7.

    Args:
        label_smoothing: Share of the probability that is spread.
        reduction: As in Keras. The default divides by the sum of the sample
            weights.
        name: Optional name.

    Call arguments:
        y_true: `(...)` integers, the targets.
        y_pred: `(..., num_classes)` logits.
        sample_weight: `(...)`, 0 for tokens that do not count.

    Returns:
        A scalar, or `(...)` if `reduction` is None.

    Raises:
        ValueError: If `label_smoothing` is not in [0, 1), or the targets do
            not have one axis less than the logits.

    Example:

    ```python
    model.compile("adam", LabelSmoothedCrossentropy(0.1))
    weights = (targets != pad_id).astype("float32")
    model.fit(inputs, targets, sample_weight=weights)
    ```
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        *,
        reduction: str | None = "mean_with_sample_weight",
        name: str = "label_smoothed_crossentropy",
    ):
        checks.rate(label_smoothing=label_smoothing)
        # Keras casts the targets to the loss's dtype too, and half precision
        # does not hold token ids.
        dtype = keras.backend.result_type(keras.config.floatx(), "float32")
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        if len(y_true.shape) != len(y_pred.shape) - 1:
            checks.fail(
                f"of one axis less than the logits, {tuple(y_pred.shape)}",
                "y_true.shape",
                tuple(y_true.shape),
            )
        targets = ops.cast(y_true, "int32")
        target_logits = ops.squeeze(
            ops.take_along_axis(y_pred, targets[..., None], axis=-1), -1
        )
        normalizer = ops.logsumexp(y_pred, axis=-1)
        # Without smoothing the mean must not act: it may be infinite.
        if not self.label_smoothing:
            return normalizer - target_logits
        return (
            normalizer
            - (1 - self.label_smoothing) * target_logits
            - self.label_smoothing * ops.mean(y_pred, axis=-1)
        )

    def get_config(self):
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
        }
