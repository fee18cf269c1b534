"""Rotary position embedding of queries and keys."""

import functools

import keras
import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import (
    deserialize,
    register,
    serialize,
)
from keras_transformer.positions import angles
from keras_transformer.positions.arguments import (
    check_axes,
    integer_positions,
    result_dtype,
    slots,
)
from keras_transformer.positions.length_dependent import row_turns
from keras_transformer.positions.rotary_scaling import RoPEScaling


@register
class RoPE(keras.layers.Layer):
    """Rotates pairs of features by angles proportional to the position.

    The score of a rotated query and a rotated key then depends on their
    distance alone. Pair `i` turns by `max_wavelength ** (-2i / rotary_dim)`
    a step. The rotation is computed in float32 and rounded last.

    Reference: [Su et al., 2021](https://arxiv.org/abs/2104.09864)

    Args:
        max_wavelength: Base of the wavelengths.
        scaling: A `RoPEScaling`, or None.
        rotary_dim: Number of features to rotate, even; the rest pass
            unchanged. All when None.
        layout: Which features make a pair. `"half"`: `i` and
            `i + rotary_dim / 2` (Llama, GPT-NeoX in Hugging Face's form);
            `"interleaved"`: `2i` and `2i + 1` (the paper, GPT-J).
        sections: Number of pairs that follow each position axis, in order,
            as in multimodal RoPE; their sum is `rotary_dim / 2`.

    Call arguments:
        inputs: `(batch, length, heads, head_dim)`.
        positions: `(length,)` or `(batch, length)` integers; 0, 1, 2, ...
            when left out. With `sections` also `(batch, length, axes)`;
            otherwise all axes share the one position.
        lengths: `(batch,)` running lengths, which choose the frequencies
            where `depends_on_length`; the largest position of the row plus 1
            when left out.

    Returns:
        The shape of `inputs`.

    Raises:
        ValueError: features that cannot be paired, sections that do not add
            up, or positions of another rank.
    """

    acts_on = "query_key"

    def __init__(
        self,
        max_wavelength: float = 10000.0,
        *,
        scaling=None,
        rotary_dim: int | None = None,
        layout: str = "half",
        sections=None,
        **kwargs,
    ):
        angles.check_wavelength(max_wavelength)
        checks.positive_int(optional=True, rotary_dim=rotary_dim)
        checks.one_of(("half", "interleaved"), layout=layout)
        scaling = deserialize(scaling)
        if scaling is not None and not isinstance(scaling, RoPEScaling):
            checks.fail(
                "a RoPEScaling or None",
                "scaling",
                scaling,
                "Make one by its kind, as in `RoPEScaling.linear(4.0)`.",
            )
        if sections is not None:
            if not isinstance(sections, list | tuple):
                checks.fail("a list of integers or None", "sections", sections)
            for section in sections:
                checks.positive_int(sections=section)
            sections = tuple(sections)
        super().__init__(autocast=False, **kwargs)
        self.max_wavelength = max_wavelength
        self.scaling = scaling
        self.rotary_dim = rotary_dim
        self.layout = layout
        self.sections = sections
        self.supports_masking = True
        if rotary_dim is not None:
            self._check_dim(rotary_dim, rotary_dim)

    @property
    def depends_on_length(self) -> bool:
        """Whether a row's frequencies change with its running length.

        A cache then keeps the keys unrotated and rotates them when read.
        """
        return self.scaling is not None and self.scaling.depends_on_length

    def call(self, inputs, positions=None, lengths=None):
        check_axes(inputs, ("batch", "length", "heads", "head_dim"))
        head_dim = inputs.shape[-1]
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        self._check_dim(dim, head_dim)
        if positions is None:
            positions = slots(inputs)
        else:
            num_axes = None if self.sections is None else len(self.sections)
            positions = integer_positions(positions, num_axes=num_axes)
        sine, cosine = self._sine_and_cosine(positions, lengths, dim)
        rotated = self._rotate(inputs, sine, cosine, dim)
        return ops.cast(rotated, result_dtype(self, inputs))

    def _check_dim(self, dim, head_dim):
        if dim % 2 or dim > head_dim:
            checks.fail(
                f"even and at most the head dimension, {head_dim}",
                "rotary_dim",
                dim,
                "Features rotate in pairs; choose an even `rotary_dim`.",
            )
        if self.sections is not None and sum(self.sections) != dim // 2:
            checks.fail(
                f"pairs that add up to rotary_dim / 2, {dim // 2}",
                "sections",
                self.sections,
            )

    def _sine_and_cosine(self, positions, lengths, dim):
        """Float32, both `(1 or batch, length, 1, dim // 2)`."""
        if len(positions.shape) == 1:
            positions = positions[None]
        if self.depends_on_length:
            if lengths is None:
                axes = tuple(range(1, len(positions.shape)))
                lengths = ops.max(positions, axis=axes) + 1
            lengths = ops.cast(lengths, "int32")
            if len(lengths.shape) != 1:
                shape = tuple(lengths.shape)
                checks.fail("of shape (batch,)", "lengths", shape)
            words = row_turns(self.scaling, self.max_wavelength, dim, lengths)
            words = [word[:, None, :] for word in words]
        else:
            words = _fixed_turns(self.scaling, self.max_wavelength, dim)
        if len(positions.shape) == 2:
            positions = positions[..., None]
        else:
            axes = np.repeat(np.arange(len(self.sections)), self.sections)
            positions = ops.take(positions, axes.astype("int32"), axis=-1)
        sine, cosine = angles.sine_and_cosine(positions, *words)
        if self.scaling is not None:
            multiplier = self.scaling.attention_multiplier
            if multiplier != 1:
                sine, cosine = sine * multiplier, cosine * multiplier
        return sine[:, :, None], cosine[:, :, None]

    def _rotate(self, inputs, sine, cosine, dim):
        # Half precision is widened, float64 stays.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        inputs = ops.cast(inputs, dtype)
        sine, cosine = ops.cast(sine, dtype), ops.cast(cosine, dtype)
        half = dim // 2
        if self.layout == "half":
            first, second = inputs[..., :half], inputs[..., half:dim]
        else:
            first, second = inputs[..., 0:dim:2], inputs[..., 1:dim:2]
        pair = [first * cosine - second * sine, second * cosine + first * sine]
        if self.layout == "half":
            parts = pair
        else:
            shape = (*ops.shape(inputs)[:-1], dim)
            parts = [ops.reshape(ops.stack(pair, axis=-1), shape)]
        if dim < inputs.shape[-1]:
            parts.append(inputs[..., dim:])
        return ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "scaling": serialize(self.scaling),
            "rotary_dim": self.rotary_dim,
            "layout": self.layout,
            "sections": self.sections,
        }


@functools.lru_cache(maxsize=64)
def _fixed_turns(scaling, max_wavelength, dim):
    if scaling is None:
        frequencies = angles.wavelength_frequencies(max_wavelength, dim)
    else:
        frequencies = scaling.frequencies(max_wavelength, dim)
    return angles.turns(frequencies)
