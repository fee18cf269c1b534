"""From a name, a configuration or an object to a position scheme."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import deserialize
from keras_transformer.positions.alibi import ALiBi
from keras_transformer.positions.learned import Learned
from keras_transformer.positions.relative import RelativePositionBias
from keras_transformer.positions.rotary import RoPE
from keras_transformer.positions.sinusoidal import Sinusoidal

# Counted names would differ from model to model, and with them weight paths.
_LAYER_NAME = "position"
_NAMES = ("sinusoidal", "learned", "rope", "alibi", "t5")


def get(identifier, *, causal: bool = False, max_length: int | None = None):
    """The position scheme that an argument `position` means.

    Args:
        identifier: None, a scheme, its configuration, or `"sinusoidal"`,
            `"learned"`, `"rope"`, `"alibi"`, `"t5"`.
        causal: Whether queries see only the past: `"t5"` then has no buckets
            for the future.
        max_length: Number of positions of `"learned"`.

    Returns:
        A layer with the attribute `acts_on`, or None.

    Raises:
        ValueError: an unknown name, or `"learned"` without `max_length`.
    """
    scheme = deserialize(identifier)
    if scheme is None:
        return None
    if isinstance(scheme, keras.layers.Layer) and hasattr(scheme, "acts_on"):
        return scheme
    if not isinstance(scheme, str) or scheme not in _NAMES:
        checks.fail(
            f"None, a position scheme or one of {list(_NAMES)}",
            "position",
            identifier,
        )
    if scheme == "learned":
        if max_length is None:
            checks.fail(
                'given for the position scheme "learned"',
                "max_length",
                None,
                "Pass `max_length`, or `position=Learned(max_length)`.",
            )
        return Learned(max_length, name=_LAYER_NAME)
    if scheme == "t5":
        return RelativePositionBias(bidirectional=not causal, name=_LAYER_NAME)
    schemes = {"sinusoidal": Sinusoidal, "rope": RoPE, "alibi": ALiBi}
    return schemes[scheme](name=_LAYER_NAME)
