"""Cached calls by hand: `init_cache` and `call_with_cache` of the layers."""

import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.backends import backend
from keras_transformer._internal.decoding_scope import DecodingScope
from keras_transformer.masks import MaskData

# Beyond any prefix or table: what a mask allows from here on it always does.
FAR = 1 << 24


def new_cache(batch_size: int, caches: dict) -> dict:
    """The cache of a layer: the rows' lengths, and a cache per attention."""
    return {
        "length": ops.zeros((batch_size,), "int32"),
        "caches": caches,
    }


def call_with_cache(layer, inputs, cache: dict, lengths, kwargs):
    """Runs `layer` on the next tokens of each row.

    Args:
        layer: A layer whose attention layers use the decoding scope.
        inputs: (batch, length, ...), the next tokens.
        cache: As made by `new_cache` or returned from here.
        lengths: None, or int32 (batch,): the real tokens of each row.
        kwargs: Further call arguments of the layer.

    Returns:
        What the layer returns, and the new cache.
    """
    inputs = ops.convert_to_tensor(inputs)
    if not isinstance(cache, dict) or set(cache) != {"length", "caches"}:
        raise ValueError(
            "`cache` must come from `init_cache` or the call before. Received: "
            f"{type(cache).__name__}."
        )
    start = cache["length"]
    if start.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"`cache` must be made for the batch of the inputs, "
            f"{inputs.shape[0]}. Received: a cache for {start.shape[0]} rows. "
            "Use `init_cache(batch_size, length)`."
        )
    counted = ops.arange(inputs.shape[1], dtype="int32")[None, :]
    slots = start[:, None] + counted
    if lengths is None:
        lengths = inputs.shape[1]
    else:
        lengths = ops.convert_to_tensor(lengths, "int32")
        _check_lengths(lengths, start.shape[0], inputs.shape[1])
        slots = ops.where(counted < lengths[:, None], slots, -1)
    scope = DecodingScope(
        slots, cache["caches"], ragged=not isinstance(lengths, int)
    )
    with scope:
        outputs = layer(inputs, **kwargs)
    for path, mask in scope.watched:
        if attends_both_ways(mask):
            raise ValueError(both_ways(path, mask))
        if _sees_beyond(mask, start, lengths, kwargs.get("prefix_length")):
            raise ValueError(
                f"Layer {path!r} cannot be called with this piece: its mask "
                f"{mask!r} lets tokens of this piece see tokens that come "
                "after it. Pass all that they see in one call, as a prefix is "
                "read whole, or and the mask with `Causal()`."
            )
    return outputs, {"length": start + lengths, "caches": scope.new_caches}


def _check_lengths(lengths, batch_size, longest):
    fits = tuple(lengths.shape) == (batch_size,)
    if fits and backend.is_concrete(lengths):
        values = ops.convert_to_numpy(lengths)
        fits = bool(((values >= 0) & (values <= longest)).all())
    if not fits:
        checks.fail(
            f"{batch_size} numbers from 0 to {longest}, the tokens of each row",
            "lengths",
            lengths,
        )


def _sees_beyond(mask, start, lengths, prefix_length) -> bool:
    """Whether a token of the piece may see a slot past its row's end.

    Traced slots are not known here: then the caller answers for the piece.
    """
    if mask.lookahead == 0 or not backend.is_concrete(start):
        return False
    prefix_length = 0 if prefix_length is None else prefix_length
    bounds = ops.convert_to_numpy(
        ops.stack(
            [
                start,
                start + lengths,
                ops.broadcast_to(ops.cast(prefix_length, "int32"), start.shape),
            ],
            axis=1,
        )
    )
    # Rows mostly agree.
    for first, stop, prefix in np.unique(bounds, axis=0):
        queries, keys = np.array([[first, stop]]), np.array([[stop, FAR]])
        may_any, _ = mask.tile(
            *queries.T, *keys.T, MaskData(prefix_length=prefix)
        )
        if first < stop and may_any.any():
            return True
    return False


def attends_both_ways(mask) -> bool:
    """Whether tokens see later ones however far the sequence has come."""
    # Of two neighbours, one at most is the last of a chunk.
    return looks_ahead(mask, FAR, FAR + 2, MaskData(prefix_length=np.int32(0)))


def looks_ahead(mask, first: int, last: int, data) -> bool:
    """Whether a query in slots `[first, last)` may see a key after it."""
    queries = np.arange(first, last)
    may_any, _ = mask.tile(
        queries, queries + 1, queries + 1, queries + FAR, data
    )
    return bool(np.any(may_any))


def both_ways(path: str, mask) -> str:
    """The message for a mask that cannot be decoded step by step."""
    return (
        f"Layer {path!r} cannot be decoded step by step: its mask {mask!r} "
        "lets a token see tokens that come after it. Join it: `Causal() & ...`."
    )
