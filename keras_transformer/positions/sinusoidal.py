"""The fixed sine and cosine encoding of the first Transformer."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.positions import angles
from keras_transformer.positions.arguments import (
    check_axes,
    integer_positions,
    result_dtype,
    slots,
)


def sinusoidal_encoding(positions, dim: int, max_wavelength: float = 10000.0):
    """Encodes integer positions as sines and cosines.

    Feature `2i` is `sin(p / max_wavelength ** (2i / dim))`, feature `2i + 1`
    the cosine of the same angle. Accurate to 1e-6 at position 1,000,000.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)

    Args:
        positions: Integers of any shape.
        dim: Number of features, even.
        max_wavelength: Base of the wavelengths.

    Returns:
        Float32, `(..., dim)`.

    Raises:
        ValueError: `dim` is odd.

    Example:

    ```python
    sinusoidal_encoding([0, 1], 4)
    # [[0, 1, 0, 1], [0.8415, 0.5403, 0.0100, 0.9999]]
    ```
    """
    checks.positive_int(dim=dim)
    angles.check_wavelength(max_wavelength)
    if dim % 2:
        checks.fail(
            "even",
            "dim",
            dim,
            "Each frequency takes a sine and a cosine; choose an even width.",
        )
    positions = ops.cast(ops.convert_to_tensor(positions), "int32")
    frequencies = angles.wavelength_frequencies(max_wavelength, dim)
    sine, cosine = angles.sine_and_cosine(
        positions[..., None], *angles.turns(frequencies)
    )
    shape = (*ops.shape(positions), dim)
    return ops.reshape(ops.stack([sine, cosine], axis=-1), shape)


@register
class Sinusoidal(keras.layers.Layer):
    """The encoding to add to embeddings; it has no weights.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)

    Args:
        max_wavelength: Base of the wavelengths.

    Call arguments:
        inputs: `(batch, length, dim)`, of which only the shape is read.
        positions: `(length,)` or `(batch, length)` integers; 0, 1, 2, ...
            when left out.

    Returns:
        `(length, dim)` or `(batch, length, dim)`: the encoding alone, which
        the caller adds.

    Raises:
        ValueError: `dim` is odd.
    """

    acts_on = "embeddings"

    def __init__(self, max_wavelength: float = 10000.0, **kwargs):
        angles.check_wavelength(max_wavelength)
        super().__init__(autocast=False, **kwargs)
        self.max_wavelength = max_wavelength
        self.supports_masking = True

    def call(self, inputs, positions=None):
        check_axes(inputs, ("batch", "length", "dim"))
        if positions is None:
            positions = slots(inputs)
        else:
            positions = integer_positions(positions)
        encoding = sinusoidal_encoding(
            positions, inputs.shape[-1], self.max_wavelength
        )
        return ops.cast(encoding, result_dtype(self, inputs))

    def compute_mask(self, inputs, mask=None):
        """The encoding itself has none."""
        return None

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
        }
