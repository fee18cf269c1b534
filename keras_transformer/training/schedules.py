"""Learning-rate schedules."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register


@register
class InverseSquareRootDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then decay with the inverse square root of the step.

    `scale * model_dim**-0.5 * min(n**-0.5, n * warmup_steps**-1.5)` for the
    n-th update, n = 1, 2, ... Keras counts steps from 0, so n is `step + 1`:
    the first update is not lost. The peak, after `warmup_steps` updates, is
    `scale * (model_dim * warmup_steps)**-0.5`.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 5.3.

    Args:
        model_dim: Width of the model.
        warmup_steps: Updates until the peak.
        scale: Factor of the whole.
        name: Optional name.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    optimizer = keras.optimizers.Adam(
        InverseSquareRootDecay(512), beta_2=0.98, epsilon=1e-9
    )
    ```
    """

    def __init__(
        self,
        model_dim: int,
        warmup_steps: int = 4000,
        *,
        scale: float = 1.0,
        name: str = "inverse_square_root_decay",
    ):
        checks.positive_int(model_dim=model_dim)
        checks.positive_int(warmup_steps=warmup_steps)
        checks.positive(scale=scale)
        super().__init__()
        self.model_dim = model_dim
        self.warmup_steps = warmup_steps
        self.scale = scale
        self.name = name

    def __call__(self, step):
        update = ops.cast(step, "float32") + 1.0
        rate = ops.minimum(ops.rsqrt(update), update * self.warmup_steps**-1.5)
        return self.scale * self.model_dim**-0.5 * rate

    def get_config(self):
        return {
            "model_dim": self.model_dim,
            "warmup_steps": self.warmup_steps,
            "scale": self.scale,
            "name": self.name,
        }
