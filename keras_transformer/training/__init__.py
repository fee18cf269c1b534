"""What training needs beside a model: targets, packing, schedules, losses.

Whatever acts on data takes and returns NumPy arrays.
"""

from keras_transformer.training.corruption import corrupt_spans, mask_tokens
from keras_transformer.training.linear_crossentropy import linear_crossentropy
from keras_transformer.training.linear_crossentropy_model import (
    LinearCrossentropyModel,
)
from keras_transformer.training.losses import LabelSmoothedCrossentropy
from keras_transformer.training.packing import PackedRows, pack_documents
from keras_transformer.training.schedules import InverseSquareRootDecay
from keras_transformer.training.targets import next_token_pairs, shift_right

__all__ = [
    "InverseSquareRootDecay",
    "LabelSmoothedCrossentropy",
    "LinearCrossentropyModel",
    "PackedRows",
    "corrupt_spans",
    "linear_crossentropy",
    "mask_tokens",
    "next_token_pairs",
    "pack_documents",
    "shift_right",
]
