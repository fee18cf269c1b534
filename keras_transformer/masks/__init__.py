"""Who may attend to whom: masks as expressions.

Rules are joined by `&`, `|` and `~`, and read slots, the places of tokens in
their sequence. `dense` gives a mask's meaning as a tensor, `plan` says which
blocks of a long attention matrix hold work, `show` draws it.
"""

from keras_transformer.masks.algebra import And, Not, Or
from keras_transformer.masks.batch import Documents, Padding
from keras_transformer.masks.data import MaskData
from keras_transformer.masks.mask import Mask
from keras_transformer.masks.order import (
    Causal,
    Full,
    Global,
    Prefix,
    SlidingWindow,
)
from keras_transformer.masks.per_head import PerHead
from keras_transformer.masks.periodic import Chunked, Fixed, Strided
from keras_transformer.masks.plan import BlockPlan
from keras_transformer.masks.tables import BlockSparse, Explicit

__all__ = [
    "And",
    "BlockPlan",
    "BlockSparse",
    "Causal",
    "Chunked",
    "Documents",
    "Explicit",
    "Fixed",
    "Full",
    "Global",
    "Mask",
    "MaskData",
    "Not",
    "Or",
    "Padding",
    "PerHead",
    "Prefix",
    "SlidingWindow",
    "Strided",
]
