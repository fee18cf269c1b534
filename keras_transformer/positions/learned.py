"""A trained vector for each position."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register, serialize
from keras_transformer.positions.arguments import (
    check_axes,
    integer_positions,
    result_dtype,
    slots,
    table_initializer,
)


@register
class Learned(keras.layers.Layer):
    """A table of position vectors to add to embeddings.

    Reference: [Devlin et al., 2018](https://arxiv.org/abs/1810.04805)

    Args:
        max_length: Number of positions.
        initializer: Of the table; normal with deviation 0.02 when None.

    Call arguments:
        inputs: `(batch, length, dim)`, of which only the shape is read.
        positions: `(length,)` or `(batch, length)` integers; 0, 1, 2, ...
            when left out.

    Returns:
        `(length, dim)` or `(batch, length, dim)`: the vectors alone, which
        the caller adds.

    Raises:
        ValueError: the length exceeds `max_length`, or a position lies
            outside `0 ... max_length - 1`. Compiled code cannot look at the
            values of `positions`: there a position outside gets a vector of
            zeros, and whoever makes the positions checks their range against
            `max_length`, as `generate` does.
    """

    acts_on = "embeddings"

    def __init__(self, max_length: int, *, initializer=None, **kwargs):
        checks.positive_int(max_length=max_length)
        super().__init__(autocast=False, **kwargs)
        self.max_length = max_length
        self.initializer = table_initializer(initializer)
        self.supports_masking = True

    def build(self, inputs_shape, positions_shape=None):
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.max_length, inputs_shape[-1]),
            initializer=self.initializer,
            # Read as float32 in half precision too, and rounded last.
            autocast=False,
        )

    def call(self, inputs, positions=None):
        check_axes(inputs, ("batch", "length", "dim"))
        dtype = result_dtype(self, inputs)
        table = ops.convert_to_tensor(self.embeddings)
        if positions is not None:
            positions = integer_positions(positions)
            self._check_values(positions)
        elif inputs.shape[1] is not None:
            self._check_length(inputs.shape[1])
            return ops.cast(table[: inputs.shape[1]], dtype)
        else:
            positions = slots(inputs)
        inside = (positions >= 0) & (positions < self.max_length)
        rows = ops.take(table, ops.where(inside, positions, 0), axis=0)
        rows = ops.where(inside[..., None], rows, 0.0)
        return ops.cast(rows, dtype)

    def _check_length(self, length):
        if length > self.max_length:
            checks.fail(
                f"at most `max_length`, {self.max_length}",
                "length",
                length,
                "Shorten the inputs, or make the layer with a larger "
                "`max_length`.",
            )

    def _check_values(self, positions):
        try:
            values = ops.convert_to_numpy(positions)
        except Exception:  # each backend has its own error for a tracer
            return
        if values.size and not 0 <= values.min() <= values.max() < (
            self.max_length
        ):
            checks.fail(
                f"in 0 ... {self.max_length - 1}, inside `max_length`",
                "positions",
                (int(values.min()), int(values.max())),
                "Received are the smallest and the largest.",
            )

    def compute_mask(self, inputs, mask=None):
        """The vectors themselves have none."""
        return None

    def get_config(self):
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "initializer": serialize(self.initializer),
        }
