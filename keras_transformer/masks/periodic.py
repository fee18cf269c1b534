"""Rules that repeat along the sequence: chunks, strides, summary columns."""

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.masks.mask import Mask


@register
class Chunked(Mask):
    """A query may attend to the slots of its own chunk.

    Args:
        size: Length of a chunk; slots 0 to `size - 1` are the first.

    Example:

    >>> print(Chunked(2).show(4))
    ##..
    ##..
    ..##
    ..##
    """

    def __init__(self, size):
        checks.positive_int(size=size)
        self._set(size=int(size))
        object.__setattr__(self, "lookback", self.size - 1)
        object.__setattr__(self, "lookahead", self.size - 1)

    def allowed(self, query_slots, key_slots, data):
        return query_slots // self.size == key_slots // self.size

    def tile(self, q0, q1, k0, k1, data):
        first_query, last_query = q0 // self.size, (q1 - 1) // self.size
        first_key, last_key = k0 // self.size, (k1 - 1) // self.size
        may = (first_query <= last_key) & (first_key <= last_query)
        return may, (first_query == last_key) & (first_key == last_query)


@register
class Strided(Mask):
    """A query may attend to the slots whole strides away.

    Reference: [Child et al., 2019](https://arxiv.org/abs/1904.10509)

    Args:
        stride: The pair is allowed where `(q - k) mod stride` is 0.

    Example:

    >>> print(Strided(2).show(4))
    #.#.
    .#.#
    #.#.
    .#.#
    """

    def __init__(self, stride):
        checks.positive_int(stride=stride)
        self._set(stride=int(stride))

    def allowed(self, query_slots, key_slots, data):
        return (query_slots - key_slots) % self.stride == 0

    def tile(self, q0, q1, k0, k1, data):
        smallest, largest = q0 - (k1 - 1), (q1 - 1) - k0
        may = largest // self.stride * self.stride >= smallest
        return may, may & ((smallest == largest) | (self.stride == 1))


@register
class Fixed(Mask):
    """Every query may attend to the last slots of each block.

    The paper's merged fixed pattern is
    `Causal() & (Chunked(stride) | Fixed(stride, width))`.

    Reference: [Child et al., 2019](https://arxiv.org/abs/1904.10509)

    Args:
        stride: Length of a block.
        width: How many slots at its end: `k mod stride >= stride - width`.

    Example:

    >>> print(Fixed(3, 1).show(2, 6))
    ..#..#
    ..#..#
    """

    def __init__(self, stride, width):
        checks.positive_int(stride=stride)
        checks.positive_int(width=width)
        if width > stride:
            checks.fail(f"at most `stride`, {stride}", "width", width)
        self._set(stride=int(stride), width=int(width))

    def allowed(self, query_slots, key_slots, data):
        return key_slots % self.stride >= self.stride - self.width

    def tile(self, q0, q1, k0, k1, data):
        summary = self.stride - self.width
        offset = k0 % self.stride
        first = k0 + (summary - offset).clip(min=0)
        ends_in_summary = k1 - k0 + offset <= self.stride
        whole = (offset >= summary) & ends_in_summary | (summary == 0)
        everywhere = q0 == q0
        return (first < k1) & everywhere, whole & everywhere
