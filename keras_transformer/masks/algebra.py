"""The algebra of masks: `&`, `|` and `~`."""

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import (
    deserialize,
    register,
    serialize,
)
from keras_transformer.masks.arrays import both, either
from keras_transformer.masks.mask import Mask


class Operator(Mask):
    """A mask made of masks."""

    def _set_masks(self, masks):
        heads = {mask.num_heads for mask in masks} - {None}
        if len(heads) > 1:
            raise ValueError(
                "`PerHead` must have the same number of heads everywhere in "
                f"one mask. Received: {sorted(heads)} heads in {masks}."
            )
        self._set(masks=tuple(masks))
        object.__setattr__(self, "num_heads", max(heads, default=None))

    @property
    def data_names(self):
        return frozenset().union(*(mask.data_names for mask in self.masks))

    def get_config(self):
        return {"masks": [serialize(mask) for mask in self.masks]}


class _Join(Operator):
    """Several masks joined by one operator, nested ones flattened."""

    def __init__(self, masks):
        flat = []
        for mask in checked_masks(masks, at_least=2):
            flat += mask.masks if type(mask) is type(self) else [mask]
        self._set_masks(flat)

    def allowed(self, query_slots, key_slots, data):
        first, *rest = self.masks
        result = first.allowed(query_slots, key_slots, data)
        for mask in rest:
            other = mask.allowed(query_slots, key_slots, data)
            result = self._combine(result, other)
        return result

    def tile(self, q0, q1, k0, k1, data):
        first, *rest = self.masks
        may, must = first.tile(q0, q1, k0, k1, data)
        for mask in rest:
            other_may, other_must = mask.tile(q0, q1, k0, k1, data)
            may = self._combine(may, other_may)
            must = self._combine(must, other_must)
        return may, must

    def for_head(self, head):
        return type(self)([mask.for_head(head) for mask in self.masks])

    def __repr__(self):
        return self._symbol.join(
            f"({mask!r})" if isinstance(mask, Or) else repr(mask)
            for mask in self.masks
        )


@register
class And(_Join):
    """Allows what every one of `masks` allows; written `a & b`."""

    _symbol = " & "
    _combine = staticmethod(both)

    @property
    def is_full(self):
        return all(mask.is_full for mask in self.masks)

    @property
    def is_causal_only(self):
        rest = [mask for mask in self.masks if not mask.is_full]
        return bool(rest) and all(mask.is_causal_only for mask in rest)

    @property
    def lookback(self):
        return _smallest(mask.lookback for mask in self.masks)

    @property
    def lookahead(self):
        return _smallest(mask.lookahead for mask in self.masks)


@register
class Or(_Join):
    """Allows what at least one of `masks` allows; written `a | b`."""

    _symbol = " | "
    _combine = staticmethod(either)

    def __init__(self, masks):
        super().__init__(masks)
        reject_padding(self.masks, "`|`")

    @property
    def is_full(self):
        return any(mask.is_full for mask in self.masks)

    @property
    def is_causal_only(self):
        return all(mask.is_causal_only for mask in self.masks)

    @property
    def lookback(self):
        return largest(mask.lookback for mask in self.masks)

    @property
    def lookahead(self):
        return largest(mask.lookahead for mask in self.masks)


@register
class Not(Operator):
    """Allows what `mask` does not; written `~a`. `~~a` is `a`."""

    def __init__(self, mask):
        checked_masks([mask])
        if isinstance(mask, Not):
            checks.fail("a mask other than `~a`", "mask", mask, "Use `a`.")
        reject_padding([mask], "`~`")
        self._set_masks([mask])

    @property
    def mask(self):
        """The mask that is turned round."""
        return self.masks[0]

    def allowed(self, query_slots, key_slots, data):
        return ~self.mask.allowed(query_slots, key_slots, data)

    def tile(self, q0, q1, k0, k1, data):
        may, must = self.mask.tile(q0, q1, k0, k1, data)
        return ~must, ~may

    def for_head(self, head):
        return ~self.mask.for_head(head)

    def __invert__(self):
        return self.mask

    def __repr__(self):
        inner = repr(self.mask)
        return f"~({inner})" if isinstance(self.mask, _Join) else f"~{inner}"

    def get_config(self):
        return {"mask": serialize(self.mask)}

    @classmethod
    def from_config(cls, config):
        return cls(deserialize(config["mask"]))


def checked_masks(masks, at_least=1):
    """The masks as a list, deserialised where they come from a config."""
    if not isinstance(masks, (list, tuple)):
        checks.fail("a list of masks", "masks", masks)
    masks = [deserialize(mask) for mask in masks]
    if len(masks) < at_least or not all(isinstance(m, Mask) for m in masks):
        checks.fail(f"a list of at least {at_least} masks", "masks", masks)
    return masks


def reject_padding(masks, place):
    """Requires that no `Padding()` stands in `masks`."""
    if any("padding_mask" in mask.data_names for mask in masks):
        raise ValueError(
            f"`Padding()` must stand only under `&`. Received: {place} over "
            f"{list(masks)}. Padding is and-ed to every mask: leave it out."
        )


def _smallest(reaches):
    return min((reach for reach in reaches if reach is not None), default=None)


def largest(reaches):
    """The largest of some reaches; None, unbounded, exceeds them all."""
    reaches = list(reaches)
    return None if None in reaches else max(reaches)
