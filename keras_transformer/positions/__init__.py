"""Where a token is: position schemes for embeddings, queries and scores."""

from keras_transformer.positions.alibi import ALiBi
from keras_transformer.positions.learned import Learned
from keras_transformer.positions.registry import get
from keras_transformer.positions.relative import RelativePositionBias
from keras_transformer.positions.rotary import RoPE
from keras_transformer.positions.rotary_scaling import RoPEScaling
from keras_transformer.positions.sinusoidal import (
    Sinusoidal,
    sinusoidal_encoding,
)

__all__ = [
    "ALiBi",
    "Learned",
    "RelativePositionBias",
    "RoPE",
    "RoPEScaling",
    "Sinusoidal",
    "get",
    "sinusoidal_encoding",
]
