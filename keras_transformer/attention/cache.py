"""Key-value caches: plain dictionaries of tensors.

A cache holds, for each place, a key, a value and the slot of the token that
wrote it (-1: empty, or a token that is padding). Masks are evaluated on those
slots, so the order of the places does not matter: a cache that is smaller
than the sequence is a ring in which slot `s` lives at place `s % size`.
"""

from keras import ops

from keras_transformer._internal.backends import backend


def empty(batch_size: int, size: int, parts: dict) -> dict:
    """A cache without tokens.

    Args:
        batch_size: Number of rows.
        size: Number of places.
        parts: Name to (trailing shape, dtype); `"slots"` is among them.
    """
    return {
        name: ops.full(
            (batch_size, size, *shape), -1 if name == "slots" else 0, dtype
        )
        for name, (shape, dtype) in parts.items()
    }


def extend(scope, layer, new: dict, lookback: int | None) -> dict:
    """Writes the new tokens of a layer into its cache.

    Args:
        scope: The active decoding scope.
        layer: The attention layer.
        new: Name to (batch, length, ...): keys, values, slots and whatever
            else the mask and the positions read of a key.
        lookback: How many slots back a query may look; None: any number.

    Returns:
        The same names, with all tokens that the queries may attend to.
    """
    name = scope.name_of(layer)
    old = scope.take(name)
    if old is None:
        size = scope.capacity
        if lookback is not None:
            size = min(size, lookback + 1)
        scope.put(name, _first(new, scope.slots, size))
        return new
    size, length = old["slots"].shape[1], new["slots"].shape[1]
    is_ring = lookback is not None and size > lookback
    if not is_ring:
        _check_room(scope, size, layer)
    if length == 1 and not scope.ragged:
        indices = scope.slots[:, 0] % size
        updated = {
            part: backend.write_token(
                old[part], value[:, 0], indices, scope.in_place
            )
            for part, value in new.items()
        }
    else:
        updated = _written(old, new, scope.slots)
    scope.put(name, updated)
    if is_ring and size < lookback + length:
        # Late tokens of the piece overwrite keys that early ones still need.
        return {
            part: ops.concatenate([old[part], value], axis=1)
            for part, value in new.items()
        }
    if scope.used is not None and scope.used < size:
        return {part: value[:, : scope.used] for part, value in updated.items()}
    return updated


def remember(scope, layer, make) -> dict:
    """The read-only cache of a cross-attention; `make()` fills it once."""
    name = scope.name_of(layer)
    cache = scope.take(name)
    if cache is None:
        cache = make()
    scope.put(name, cache)
    return cache


def _check_room(scope, size, layer):
    # Inside a compiled step the caller answers for the room.
    if scope.used is not None or not backend.is_concrete(scope.slots):
        return
    last = int(ops.max(scope.slots))
    if last >= size:
        raise ValueError(
            f"The cache of layer {layer.path!r} holds {size} tokens a row. "
            f"Received: a token at slot {last}. Make the cache longer by "
            "`init_cache(batch_size, length)`."
        )


def _first(new, slots, size):
    """A cache of `size` places after its first piece."""
    length = slots.shape[1]
    if length > size:
        parts = {
            part: (value.shape[2:], value.dtype) for part, value in new.items()
        }
        return _written(empty(ops.shape(slots)[0], size, parts), new, slots)
    # Slots count from 0, so places and tokens agree.
    return {
        part: ops.pad(
            value,
            ((0, 0), (0, size - length)) + ((0, 0),) * (value.ndim - 2),
            constant_values=-1 if part == "slots" else 0,
        )
        for part, value in new.items()
    }


def _written(old, new, slots):
    """`old` with a piece of consecutive tokens written into it.

    Each place finds the last token of the piece that belongs there.
    """
    size, length = old["slots"].shape[1], slots.shape[1]
    count = ops.sum(ops.cast(slots >= 0, "int32"), axis=1, keepdims=True)
    last = slots[:, :1] + count - 1
    places = ops.expand_dims(ops.arange(size, dtype="int32"), 0)
    token = last - (last - places) % size - slots[:, :1]
    is_written = ops.logical_and(token >= 0, count > 0)
    token = ops.clip(token, 0, length - 1)

    def write(old_part, new_part):
        trailing = (1,) * (new_part.ndim - 2)
        index = ops.reshape(token, (*ops.shape(token), *trailing))
        gathered = ops.take_along_axis(new_part, index, axis=1)
        keep = ops.reshape(is_written, (*ops.shape(token), *trailing))
        return ops.where(keep, ops.cast(gathered, old_part.dtype), old_part)

    return {part: write(old[part], value) for part, value in new.items()}
