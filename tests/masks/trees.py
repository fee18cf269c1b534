"""Random masks, each with its meaning as plain Python, pair by pair."""

import numpy as np
from hypothesis import strategies as st

from keras_transformer.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Explicit,
    Fixed,
    Full,
    Global,
    MaskData,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from tests.sizes import BATCH, KEY_LENGTH, NUM_HEADS, QUERY_LENGTH


class Case:
    """Slots and data of one batch.

    A meaning is a function of a case and of the indices of batch row, head,
    query and key.
    """

    def __init__(
        self, seed, queries=QUERY_LENGTH, keys=KEY_LENGTH, plain=False
    ):
        random = np.random.default_rng(seed)
        if plain:
            self.q = np.tile(np.arange(queries), (BATCH, 1))
            self.k = np.tile(np.arange(keys), (BATCH, 1))
        else:
            self.q = random.integers(-1, 12, (BATCH, queries))
            self.k = random.integers(-1, 12, (BATCH, keys))
        # Sorted, as packed documents are, in all rows but the first.
        self.query_ids = random.integers(0, 3, (BATCH, queries))
        self.key_ids = random.integers(0, 3, (BATCH, keys))
        self.query_ids[1:].sort()
        self.key_ids[1:].sort()
        self.prefix = random.integers(0, 6, BATCH)
        self.padding = random.random((BATCH, keys)) < 0.7

    @property
    def arrays(self):
        return {
            "padding_mask": self.padding,
            "segment_ids": self.query_ids,
            "key_segment_ids": self.key_ids,
            "prefix_length": self.prefix,
        }

    def arrays_for(self, mask):
        """The arrays that the mask reads, and the padding."""
        names = {"padding_mask", *mask.data_names}
        if "segment_ids" in names:
            names.add("key_segment_ids")
        return {k: v for k, v in self.arrays.items() if k in names}

    @property
    def data(self):
        return MaskData(**self.arrays)

    def expected(self, meaning):
        """The mask by loops: (batch, heads, query, key)."""
        shape = (BATCH, NUM_HEADS, self.q.shape[1], self.k.shape[1])
        result = np.zeros(shape, bool)
        for b, h, i, j in np.ndindex(shape):
            exists = self.k[b, j] >= 0 and self.padding[b, j]
            result[b, h, i, j] = exists and meaning(self, b, h, i, j)
        return result


def on_slots(function):
    """A meaning that depends on the two slots alone."""
    return lambda case, b, h, i, j: bool(
        function(int(case.q[b, i]), int(case.k[b, j]))
    )


def in_table(table, block=1):
    def function(q, k):
        row, column = q // block, k // block
        inside = 0 <= row < len(table) and 0 <= column < len(table[0])
        return inside and table[row][column]

    return on_slots(function)


TABLE = [[(q * q + k) % 3 == 0 for k in range(8)] for q in range(7)]
LEAVES = {
    "full": (Full(), on_slots(lambda q, k: True)),
    "causal": (Causal(), on_slots(lambda q, k: k <= q)),
    "window": (SlidingWindow(3), on_slots(lambda q, k: abs(q - k) < 3)),
    "window pair": (
        SlidingWindow((4, 1)),
        on_slots(lambda q, k: -4 <= k - q <= 1),
    ),
    "prefix": (Prefix(3), on_slots(lambda q, k: k < 3)),
    "prefix of the batch": (
        Prefix(),
        lambda case, b, h, i, j: case.k[b, j] < case.prefix[b],
    ),
    "global": (Global(2), on_slots(lambda q, k: k < 2 or q < 2)),
    "chunked": (Chunked(4), on_slots(lambda q, k: q // 4 == k // 4)),
    "strided": (Strided(3), on_slots(lambda q, k: (q - k) % 3 == 0)),
    "fixed": (Fixed(4, 2), on_slots(lambda q, k: k % 4 >= 2)),
    "documents": (
        Documents(),
        lambda case, b, h, i, j: case.query_ids[b, i] == case.key_ids[b, j],
    ),
    "block sparse": (
        BlockSparse([[1, 0, 1], [0, 1, 1]], 3),
        in_table([[1, 0, 1], [0, 1, 1]], 3),
    ),
    "explicit": (
        Explicit(TABLE),
        in_table(TABLE),
    ),
}


def _and(left, right):
    return (
        left[0] & right[0],
        lambda *pair: left[1](*pair) and right[1](*pair),
    )


def _or(left, right):
    return (
        left[0] | right[0],
        lambda *pair: left[1](*pair) or right[1](*pair),
    )


def _not(inner):
    return ~inner[0], lambda *pair: not inner[1](*pair)


def _per_head(parts):
    return (
        PerHead([mask for mask, _ in parts]),
        lambda case, b, h, i, j: parts[h][1](case, b, h, i, j),
    )


def _grown(trees):
    return st.one_of(
        st.builds(_and, trees, trees),
        st.builds(_or, trees, trees),
        st.builds(_not, trees),
    )


leaves = st.sampled_from(list(LEAVES.values()))
headless_trees = st.recursive(leaves, _grown, max_leaves=4)
per_head = st.lists(headless_trees, min_size=NUM_HEADS, max_size=NUM_HEADS).map(
    _per_head
)
trees = st.recursive(st.one_of(leaves, leaves, per_head), _grown, max_leaves=5)
