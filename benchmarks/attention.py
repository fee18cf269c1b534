"""Attention, forward and backward, beside Keras core's.

    KERAS_BACKEND=jax python benchmarks/attention.py [--quick] [--only TEXT]

Each row is `dot_product_attention(..., implementation="auto")` beside
`keras.ops.dot_product_attention`, with `is_causal=True` or with a dense mask
made once, outside of the time. Ratios above 1 are in our favour: a target of
"at most 0.35 of the time" is a ratio of at least 2.86. In the rows of growth
the peer is our own run at the shortest length: 0.11 is a growth by 9.
"""

import dataclasses

import execution
import keras
import numpy as np
from keras import ops
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import (
    ALiBi,
    Causal,
    Documents,
    MultiHeadAttention,
    RelativePositionBias,
    SlidingWindow,
    dot_product_attention,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention. Rules: causal; a window and documents if not 0."""

    length: int
    window: int = 0
    documents: int = 0
    heads: int = 8
    key_value_heads: int = 8
    dim: int = 64
    dtype: str = "float32"

    @property
    def shape(self):
        """The shape of the query as text."""
        return f"1 x {self.length} x {self.heads} x {self.dim}"

    @property
    def mask(self):
        """Our mask."""
        mask = Causal()
        if self.window:
            mask &= SlidingWindow(self.window)
        if self.documents:
            mask &= Documents()
        return mask

    def segment_ids(self):
        """Documents of equal length, (1, length)."""
        slots = np.arange(self.length, dtype="int32")
        return (slots * self.documents // self.length)[None]

    def dense_mask(self):
        """The same mask as booleans, by definition and not by our code."""
        query, key = np.ogrid[: self.length, : self.length]
        allowed = key <= query
        if self.window:
            allowed &= query - key < self.window
        if self.documents:
            (ids,) = self.segment_ids()
            allowed &= ids[query] == ids[key]
        return allowed[None, None]

    def tensors(self):
        """Query, key, value and the gradient of the output."""
        return [
            execution.random_tensor(
                (1, self.length, heads, self.dim), self.dtype, seed
            )
            for seed, heads in enumerate(
                (
                    self.heads,
                    self.key_value_heads,
                    self.key_value_heads,
                    self.heads,
                )
            )
        ]


def ours(case, implementation="auto"):
    """Our attention, forward and backward."""
    *tensors, gradient = case.tensors()
    data = []
    if case.documents:
        data.append(ops.convert_to_tensor(case.segment_ids()))

    def attention(query, key, value, segment_ids=None):
        return dot_product_attention(
            query,
            key,
            value,
            mask=case.mask,
            segment_ids=segment_ids,
            implementation=implementation,
        )

    return execution.gradient_runner(attention, 3, gradient, *tensors, *data)


def kerass(case):
    """Keras core's attention, forward and backward."""
    *tensors, gradient = case.tensors()
    extra = []
    if case.window or case.documents:
        extra.append(ops.convert_to_tensor(case.dense_mask()))

    def attention(query, key, value, mask=None):
        return ops.dot_product_attention(
            query, key, value, mask=mask, is_causal=mask is None
        )

    return execution.gradient_runner(attention, 3, gradient, *tensors, *extra)


def layer_at_inference(length, dropout):
    """A layer of 8 heads of 64 that would drop weights in training only."""
    layer = MultiHeadAttention(8, mask=Causal(), dropout=dropout)
    inputs = execution.random_tensor((1, length, 512))
    return execution.layer_runner(layer, inputs)


class BiasedAttention(keras.layers.Layer):
    """A causal layer of 8 heads of 64 that makes its biases as one tensor."""

    def __init__(self, position):
        super().__init__()
        self.position = position

    def build(self, shape):
        self.position.bind(8)
        self.projections = [keras.layers.Dense(512) for _ in range(4)]
        for projection in self.projections:
            projection.build(shape)

    def call(self, inputs):
        length = inputs.shape[1]
        query, key, value = (
            ops.reshape(projection(inputs), (-1, length, 8, 64))
            for projection in self.projections[:3]
        )
        slots = np.arange(length, dtype="int32")
        bias = self.position(slots, slots)
        # PyTorch takes no bias beside a mask.
        bias = ops.where(slots <= slots[:, None], bias, -1e9)
        outputs = ops.dot_product_attention(query, key, value, bias=bias)
        outputs = ops.reshape(outputs, (-1, length, 512))
        return self.projections[3](outputs)


POSITIONS = {
    "ALiBi": ALiBi,
    "T5 bias": lambda: RelativePositionBias(bidirectional=False),
}


def biased(length, position, is_ours):
    """A layer with biases in training."""
    position = POSITIONS[position]()
    if is_ours:
        layer = MultiHeadAttention(8, mask=Causal(), position=position)
    else:
        layer = BiasedAttention(position)
    inputs = execution.random_tensor((1, length, 512))
    return execution.layer_gradient_runner(layer, inputs)


def main(chosen):
    """Prints the table."""
    size, table = chosen.size, comparison_table()
    window = size(512, 8)

    def beside_keras(name, case, peer="keras.ops"):
        compare(
            table,
            chosen,
            name,
            Rival(ours, case),
            peer,
            Rival(kerass, case),
            shape=case.shape,
            dtype=case.dtype,
        )

    causal = Case(size(4096, 64))
    beside_keras("causal", causal, "keras.ops is_causal")
    beside_keras("causal", Case(size(8192, 128)), "keras.ops is_causal")
    beside_keras(
        f"causal, window {window}",
        Case(size(8192, 128), window=window),
        "keras.ops dense mask",
    )
    beside_keras(
        "causal, 8 documents",
        dataclasses.replace(causal, documents=8),
        "keras.ops dense mask",
    )
    beside_keras(
        "causal, 8 heads on 2",
        dataclasses.replace(causal, key_value_heads=2),
        "keras.ops is_causal",
    )
    beside_keras(
        "causal, bfloat16",
        dataclasses.replace(causal, dtype="bfloat16"),
        "keras.ops is_causal",
    )
    for position in POSITIONS:
        compare(
            table,
            chosen,
            f"layer, causal, {position}",
            Rival(biased, causal.length, position, True),
            "keras.ops, bias as a tensor",
            Rival(biased, causal.length, position, False),
            shape=f"1 x {causal.length} x 512",
        )
    length = size(2048, 64)
    compare(
        table,
        chosen,
        "layer at inference, dropout 0.1",
        Rival(layer_at_inference, length, 0.1),
        "ours, dropout 0",
        Rival(layer_at_inference, length, 0.0),
        shape=f"1 x {length} x 512",
    )
    shortest = size(8192, 128)
    for times in (2, 4, 8):
        long = Case(times * shortest, window=window)
        short = Case(shortest, window=window)
        compare(
            table,
            chosen,
            f"growth, causal, window {window}",
            Rival(ours, long),
            f"ours, {shortest}",
            Rival(ours, short),
            shape=long.shape,
        )


if __name__ == "__main__":
    main(options(__doc__))
