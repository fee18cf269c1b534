"""One mask a head."""

import functools

import numpy as np

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.masks.algebra import (
    Operator,
    checked_masks,
    largest,
    reject_padding,
)
from keras_transformer.masks.arrays import both, either


@register
class PerHead(Operator):
    """Gives each attention head its own mask.

    It may stand anywhere in a mask, but not inside another `PerHead`, and not
    over `Padding()`, which is the same for all heads.

    Args:
        masks: A list with one mask for each query head.

    Example:

    >>> mask = Causal() & PerHead([SlidingWindow(64), Strided(64)])
    """

    def __init__(self, masks):
        masks = checked_masks(masks)
        if any(mask.num_heads is not None for mask in masks):
            checks.fail("masks without `PerHead` inside", "masks", masks)
        reject_padding(masks, "`PerHead`")
        self._set_masks(masks)
        object.__setattr__(self, "num_heads", len(masks))

    @property
    def is_full(self):
        return all(mask.is_full for mask in self.masks)

    @property
    def is_causal_only(self):
        return all(mask.is_causal_only for mask in self.masks)

    @property
    def lookback(self):
        return largest(mask.lookback for mask in self.masks)

    @property
    def lookahead(self):
        return largest(mask.lookahead for mask in self.masks)

    def allowed(self, query_slots, key_slots, data):
        result = None
        for mask in dict.fromkeys(self.masks):
            heads = np.array([other == mask for other in self.masks])
            allowed = mask.allowed(query_slots, key_slots, data)
            allowed = both(heads[:, None, None], allowed)
            result = allowed if result is None else either(result, allowed)
        return result

    def tile(self, q0, q1, k0, k1, data):
        tiles = [
            mask.tile(q0, q1, k0, k1, data)
            for mask in dict.fromkeys(self.masks)
        ]
        may, must = zip(*tiles, strict=True)
        return functools.reduce(either, may), functools.reduce(both, must)

    def for_head(self, head):
        super().for_head(head)
        if head >= self.num_heads:
            checks.fail(f"below {self.num_heads}", "head", head)
        return self.masks[head]

    def __repr__(self):
        return f"PerHead([{', '.join(map(repr, self.masks))}])"
