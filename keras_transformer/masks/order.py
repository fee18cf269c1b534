"""Rules about order and distance: full, causal, prefix, window, global."""

import numpy as np

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.masks.arrays import aligned, is_static
from keras_transformer.masks.mask import Mask


@register
class Full(Mask):
    """Every query may attend to every key.

    Example:

    >>> print(Full().show(2))
    ##
    ##
    """

    is_full = True

    def __init__(self):
        self._set()

    def allowed(self, query_slots, key_slots, data):
        return np.ones((1, 1), bool)

    def tile(self, q0, q1, k0, k1, data):
        everything = np.ones(np.broadcast_shapes(q0.shape, k0.shape), bool)
        return everything, everything


@register
class Causal(Mask):
    """A query may attend to its own slot and earlier ones: `k <= q`.

    Example:

    >>> print(Causal().show(3))
    #..
    ##.
    ###
    """

    is_causal_only = True
    lookahead = 0

    def __init__(self):
        self._set()

    def allowed(self, query_slots, key_slots, data):
        return key_slots <= query_slots

    def tile(self, q0, q1, k0, k1, data):
        return k0 < q1, k1 - 1 <= q0


@register
class SlidingWindow(Mask):
    """A query may attend to the slots near its own.

    Reference: [Beltagy et al., 2020](https://arxiv.org/abs/2004.05150)

    Args:
        window: A number `w` allows `|q - k| < w`; a pair `(left, right)`
            allows `-left <= k - q <= right`.

    Example:

    >>> print(SlidingWindow((1, 0)).show(3))
    #..
    ##.
    .##
    """

    def __init__(self, window):
        if isinstance(window, (list, tuple)):
            window = tuple(window)
            if len(window) != 2 or not all(
                checks.is_integer(side) and side >= 0 for side in window
            ):
                _fail_window(window)
            window = (int(window[0]), int(window[1]))
            left, right = window
        else:
            if not checks.is_integer(window) or window < 1:
                _fail_window(window)
            window = int(window)
            left = right = window - 1
        self._set(window=window)
        object.__setattr__(self, "lookback", left)
        object.__setattr__(self, "lookahead", right)

    def allowed(self, query_slots, key_slots, data):
        distance = key_slots - query_slots
        return (distance >= -self.lookback) & (distance <= self.lookahead)

    def tile(self, q0, q1, k0, k1, data):
        left, right = self.lookback, self.lookahead
        nearest, farthest = k0 - (q1 - 1), (k1 - 1) - q0
        may = (nearest <= right) & (farthest >= -left)
        return may, (nearest >= -left) & (farthest <= right)


def _fail_window(window):
    checks.fail(
        "a positive integer or a pair (left, right) of integers of at least 0",
        "window",
        window,
    )


@register
class Prefix(Mask):
    """Every query may attend to the first slots: `k < length`.

    Args:
        length: How many. None reads `prefix_length` with every batch.

    Example:

    >>> print((Causal() | Prefix(2)).show(3))
    ##.
    ##.
    ###
    """

    def __init__(self, length=None):
        if length is not None:
            checks.non_negative_int(length=length)
            length = int(length)
        self._set(length=length)

    @property
    def data_names(self):
        return frozenset(["prefix_length"] if self.length is None else [])

    def allowed(self, query_slots, key_slots, data):
        if self.length is not None:
            return key_slots < self.length
        length = data.required("prefix_length", "`Prefix()`")
        if len(length.shape) == 1:
            length = length[:, None, None, None]
        key_slots, length = aligned(key_slots, length)
        return key_slots < length

    def tile(self, q0, q1, k0, k1, data):
        shortest = longest = self.length
        if self.length is None:
            if data.bounds is not None:
                return data.bounds.prefix(k0, k1)
            if not is_static(data.prefix_length):
                return super().tile(q0, q1, k0, k1, data)
            shortest = np.min(data.prefix_length)
            longest = np.max(data.prefix_length)
        everywhere = np.ones_like(q0, bool)
        return (k0 < longest) & everywhere, (k1 <= shortest) & everywhere


@register
class Global(Mask):
    """The first slots see all and are seen by all: `k < n or q < n`.

    Args:
        count: How many slots, `n`.

    Example:

    >>> print(Global(1).show(3))
    ###
    #..
    #..
    """

    def __init__(self, count):
        checks.non_negative_int(count=count)
        self._set(count=int(count))

    def allowed(self, query_slots, key_slots, data):
        return (key_slots < self.count) | (query_slots < self.count)

    def tile(self, q0, q1, k0, k1, data):
        may = (k0 < self.count) | (q0 < self.count)
        return may, (k1 <= self.count) | (q1 <= self.count)
