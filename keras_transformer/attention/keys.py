"""The keys of a layer in decoding: which are cached, and with what."""

from keras import ops

from keras_transformer.attention import cache as caches


def acts_on(position, place: str) -> bool:
    """Whether a position scheme, or None, acts there."""
    return position is not None and position.acts_on == place


def grow_with(query, value, scope) -> bool:
    """Whether another sequence than the queries grows with the decoding."""
    return not scope.is_static(value) and value.shape[1] == query.shape[1]


def empty_cache(layer, batch_size: int, length: int) -> dict:
    """A cache without tokens for an attention layer.

    Args:
        layer: The built layer.
        batch_size: Number of rows.
        length: Number of tokens that a row can have in all.
    """
    mask, size = layer.mask, length
    if mask.lookback is not None:
        size = min(length, mask.lookback + 1)
    parts = {
        "key": (layer._head_shapes["key"], layer.compute_dtype),
        "value": (layer._head_shapes["value"], layer.compute_dtype),
        "slots": ((), "int32"),
    }
    if _keeps_positions(layer.position):
        parts["positions"] = ((), "int32")
    if "segment_ids" in mask.data_names:
        parts["segment_ids"] = ((), "int32")
    return caches.empty(batch_size, size, parts)


def extended(scope, layer, keys, rule, padding, positions, segment_ids):
    """The keys of this piece and, from the cache, those before it.

    Args:
        scope: The active `DecodingScope`.
        layer: The attention layer.
        keys: `"key"` and `"value"` of this piece.
        rule: The mask of the call.
        padding: None or (batch, length) booleans.
        positions: int32 (length,) or (batch, length).
        segment_ids: None or int32 (batch, length).
    """
    scope.watch(layer, rule)
    slots = scope.slots
    if padding is not None:
        slots = ops.where(padding, slots, -1)
    keys = {**keys, "slots": slots}
    if _keeps_positions(layer.position):
        keys["positions"] = ops.broadcast_to(positions, ops.shape(slots))
    if "segment_ids" in rule.data_names and segment_ids is not None:
        keys["segment_ids"] = ops.cast(segment_ids, "int32")
    return caches.extend(scope, layer, keys, rule.lookback)


def running_lengths(positions, padding, slots):
    """Length of each row: the last real position plus one; None: of all."""
    if slots is not None:
        padding = slots >= 0
    if padding is None:
        return None
    real = ops.where(padding, positions, -1)
    return ops.max(real, axis=1) + 1


def _keeps_positions(position):
    """Whether cached keys are read together with their positions."""
    return acts_on(position, "scores") or (
        acts_on(position, "query_key") and position.depends_on_length
    )
