"""The base class of all masks: expressions over slots."""

import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer.masks.arrays import aligned, both, is_static
from keras_transformer.masks.data import (
    MaskData,
    padding_of_keys,
    padding_tile,
)
from keras_transformer.masks.plan import plan_blocks
from keras_transformer.masks.show import as_figure, as_text
from keras_transformer.masks.slots import expanded, slots_of


class Mask:
    """Who may attend to whom: an immutable expression over slots.

    A slot is the index of a token in its sequence, pads and packed neighbours
    counted. Rules are joined by `&`, `|` and `~`; what joins is a mask too.
    Masks compare and hash by structure, print as the expression that makes
    them, and are saved with the layer that holds them.

    A new rule defines `allowed`, may define `tile`, `lookback`, `lookahead`
    and `data_names`, and calls `_set` with its constructor's arguments.

    Example:

    >>> mask = Causal() & (SlidingWindow(512) | Global(4))
    >>> mask.dense(6)
    """

    # NumPy must not spread `array & mask` over the array's elements.
    __array_ufunc__ = None

    data_names = frozenset()
    num_heads = None
    is_full = False
    is_causal_only = False
    lookback = None
    lookahead = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        parents = [
            base.__name__
            for base in cls.__mro__[1:]
            if base is not Mask and "allowed" in vars(base)
        ]
        if "allowed" in vars(cls) and parents:
            # It would keep the parent's tiles, reach and flags.
            raise TypeError(
                f"{cls.__name__} must derive from Mask in order to define "
                f"`allowed`. Received: a class derived from {parents[0]}."
            )

    def _set(self, **arguments):
        object.__setattr__(self, "_arguments", tuple(arguments.items()))
        for name, value in arguments.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name, value):
        raise AttributeError(
            f"`{name}` cannot be set: a mask is immutable. Make another one."
        )

    def __delattr__(self, name):
        self.__setattr__(name, None)

    # Meaning.

    def allowed(self, query_slots, key_slots, data):
        """The rule alone, without empty slots and padding.

        Args:
            query_slots: `(T, 1)` or `(B, 1, T, 1)`, NumPy or tensor.
            key_slots: `(1, S)` or `(B, 1, 1, S)`, of the same kind.
            data: A `MaskData`.

        Returns:
            Booleans that broadcast to `(B, H, T, S)`, of the smallest rank;
            NumPy where everything read is NumPy.
        """
        raise NotImplementedError

    def evaluate(self, query_slots, key_slots, data=None):
        """Who may attend to whom, empty slots and padding left out.

        Args:
            query_slots: `(T,)` or `(B, T)` integers.
            key_slots: `(S,)` or `(B, S)` integers; -1 marks an empty slot.
            data: A `MaskData`.

        Returns:
            Booleans that broadcast to `(B, H, T, S)`, of the smallest rank;
            NumPy where everything read is NumPy.
        """
        data = MaskData() if data is None else data
        query_slots = expanded("query_slots", query_slots, -1)
        key_slots = expanded("key_slots", key_slots, -2)
        none_empty = is_static(key_slots) and bool((key_slots >= 0).all())
        query_slots, key_slots = aligned(query_slots, key_slots)
        result = self.allowed(query_slots, key_slots, data)
        if not none_empty:
            result = both(result, key_slots >= 0)
        # A tree with `Padding()` has and-ed it: it stands only under `&`.
        if data.padding_mask is not None and (
            "padding_mask" not in self.data_names
        ):
            result = both(result, padding_of_keys(data, key_slots))
        return result

    def dense(
        self,
        query_length=None,
        key_length=None,
        *,
        query_slots=None,
        key_slots=None,
        padding_mask=None,
        segment_ids=None,
        key_segment_ids=None,
        prefix_length=None,
    ):
        """The mask as one boolean tensor: the meaning, for short inputs.

        Args:
            query_length: Queries stand in slots 0, 1, ... up to this length.
            key_length: Likewise for keys. None takes the queries' slots.
            query_slots: `(T,)` or `(B, T)` instead of `query_length`.
            key_slots: `(S,)` or `(B, S)` instead of `key_length`.
            padding_mask, segment_ids, key_segment_ids, prefix_length: The
                batch's data, as in `MaskData`.

        Returns:
            A boolean tensor of the smallest rank that broadcasts to `(batch,
            heads, query, key)`; its last two axes have their full length.
        """
        data = MaskData(
            padding_mask, segment_ids, key_segment_ids, prefix_length
        )
        query_slots = slots_of("query", query_length, query_slots)
        if key_length is None and key_slots is None:
            key_slots = query_slots
        else:
            key_slots = slots_of("key", key_length, key_slots)
        result = self.evaluate(query_slots, key_slots, data)
        # True everywhere: it only lends its shape, which may be unknown.
        query_slots, key_slots = aligned(
            expanded("query_slots", query_slots, -1),
            expanded("key_slots", key_slots, -2),
        )
        everywhere = (query_slots == query_slots) & (key_slots == key_slots)
        return ops.convert_to_tensor(both(result, everywhere))

    def tile(self, q0, q1, k0, k1, data):
        """What is certain of tiles of slots, without looking inside.

        Args:
            q0, q1: First query slot of each tile, and the one past the last;
                NumPy integers that broadcast with `k0` and `k1`.
            k0, k1: Likewise for keys.
            data: A `MaskData`; only what is NumPy is read, with one entry a
                slot.

        Returns:
            Two NumPy boolean arrays: whether any pair of the tile may be
            allowed, and whether all of them must be, over all batch rows and
            heads.
        """
        shape = np.broadcast_shapes(np.shape(q0), np.shape(k0))
        return np.ones(shape, bool), np.zeros(shape, bool)

    def plan(
        self,
        query_length,
        key_length=None,
        block_size=128,
        *,
        key_block_size=None,
        query_start=0,
        head=None,
        padding_mask=None,
        segment_ids=None,
        key_segment_ids=None,
        prefix_length=None,
    ):
        """Which blocks hold work, without ever making a dense mask.

        The plan holds for all batch rows and heads at once. Batch data that
        is not on the host, or not given, is taken to be anything.

        Args:
            query_length: How many queries.
            key_length: How many keys, in slots 0, 1, ... None takes the
                queries' number.
            block_size: Queries in a block.
            key_block_size: Keys in a block. None takes `block_size`.
            query_start: Slot of the first query.
            head: Plans for this head alone.
            padding_mask, segment_ids, key_segment_ids, prefix_length: The
                batch's data, as in `MaskData`, in NumPy.

        Returns:
            A `BlockPlan`.
        """
        key_length = query_length if key_length is None else key_length
        checks.non_negative_int(query_length=query_length)
        checks.non_negative_int(key_length=key_length)
        checks.non_negative_int(query_start=query_start)
        checks.positive_int(block_size=block_size)
        checks.positive_int(optional=True, key_block_size=key_block_size)
        mask = self if head is None else self.for_head(head)
        data = MaskData(
            padding_mask, segment_ids, key_segment_ids, prefix_length
        ).for_plan(query_length, key_length, query_start)

        def tile(q0, q1, k0, k1):
            may, must = mask.tile(q0, q1, k0, k1, data)
            if data.padding_mask is not None:
                some, every = padding_tile(data, k0, k1)
                may, must = may & some, must & every
            return may, must

        return plan_blocks(
            tile,
            query_length,
            key_length,
            block_size,
            key_block_size or block_size,
            query_start,
        )

    def show(self, query_length, key_length=None, *, picture=False, **data):
        """Draws the mask.

        Args:
            query_length: How many queries.
            key_length: How many keys. None takes `query_length`.
            picture: Whether to return a matplotlib figure instead of text.
            **data: The other arguments of `dense`.

        Returns:
            Text with one character a pair, `#` where allowed, a row for each
            query; or a figure.
        """
        dense = ops.convert_to_numpy(
            self.dense(query_length, key_length, **data)
        )
        return as_figure(dense, repr(self)) if picture else as_text(dense)

    def for_head(self, head: int):
        """The mask of one head: `PerHead` is replaced by its part."""
        checks.non_negative_int(head=head)
        return self

    # Algebra. Imported late: the operators are masks themselves.

    def __and__(self, other):
        if not isinstance(other, Mask):
            return NotImplemented
        from keras_transformer.masks.algebra import And

        return And([self, other])

    def __or__(self, other):
        if not isinstance(other, Mask):
            return NotImplemented
        from keras_transformer.masks.algebra import Or

        return Or([self, other])

    def __invert__(self):
        from keras_transformer.masks.algebra import Not

        return Not(self)

    def __bool__(self):
        raise TypeError(
            "a mask is neither true nor false. Join masks with `&`, `|` and "
            "`~` instead of `and`, `or` and `not`; compare with `is None`."
        )

    # Identity.

    def __eq__(self, other):
        return type(self) is type(other) and self._arguments == other._arguments

    def __hash__(self):
        return hash((type(self), self._arguments))

    def __repr__(self):
        values = [value for _, value in self._arguments]
        while values and values[-1] is None:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"

    def get_config(self):
        # Lists are the form of tuples that JSON keeps.
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._arguments
        }

    @classmethod
    def from_config(cls, config):
        return cls(**config)
