"""The blockwise executor: time and memory that follow the mask."""

import functools

from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer.attention.tile_loops import attention_in_loops
from keras_transformer.attention.tiling import (
    BATCH_DATA,
    OF_QUERIES,
    Tiling,
)
from keras_transformer.masks import MaskData
from keras_transformer.masks.tiles import static_plan, tile_table


def blockwise_attention(
    query,
    key,
    value,
    *,
    mask,
    data,
    scale,
    bias=None,
    query_positions=None,
    key_positions=None,
    soft_cap=None,
    sinks=None,
    dropout=0.0,
    seed=None,
):
    """Attention that holds the scores of one tile at a time.

    Args:
        query: (batch, query_length, heads, key_dim), of known length.
        key: (batch, key_length, groups, key_dim).
        value: (batch, key_length, groups, value_dim).
        mask: The mask, in slots that count from 0.
        data: The batch's `MaskData`.
        scale: Factor on the scores.
        bias: None or a position scheme that acts on scores.
        query_positions, key_positions: Its int32 arguments, (length,) or
            (batch, length).
        soft_cap, sinks, dropout: As in `dense_attention`.
        seed: int32 (2,), where there is dropout.

    Returns:
        (batch, query_length, heads, value_dim).
    """
    query_length, key_length = query.shape[1], key.shape[1]
    data.check_lengths(query_length, key_length)
    sizes = block_sizes(mask, query_length, key_length)
    tiling = Tiling(
        mask,
        query_length,
        key_length,
        *sizes,
        float(scale),
        soft_cap,
        bias,
        dropout,
    )
    tensors = {"query": query, "key": key, "value": value}
    if dropout:
        tensors["seed"] = seed
    tensors["sinks"] = sinks
    tensors["padding_mask"] = data.padding_mask
    if "segment_ids" in mask.data_names:
        tensors["segment_ids"] = data.segment_ids
        tensors["key_segment_ids"] = data.key_segment_ids
    if "prefix_length" in mask.data_names:
        tensors["prefix_length"] = data.prefix_length
    if bias is not None:
        tensors["query_positions"] = query_positions
        tensors["key_positions"] = key_positions
        for index, weight in enumerate(bias.variables):
            # Keras takes variables for tensors, and a program does not.
            tensors[f"bias_{index}"] = weight[...]
    tensors = {
        name: ops.convert_to_tensor(tensor)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return _program(tiling, tuple(tensors))(*tensors.values())


@functools.lru_cache(maxsize=256)
def block_sizes(mask, query_length, key_length):
    """The sizes of tiles that cost least under the mask."""

    def cost(sizes):
        plan = static_plan(mask, query_length, key_length, *sizes)
        return plan.num_kept * sizes[0] * sizes[1]

    candidates = {}
    for (query_size, key_size), factor in backend.TILE_SIZES.items():
        sizes = (
            _even(query_length, query_size),
            _even(key_length, key_size),
        )
        candidates.setdefault(sizes, factor)
    return min(candidates, key=lambda sizes: cost(sizes) * candidates[sizes])


def _even(length, size):
    """A size near `size` that divides the length with little rest."""
    blocks = max(1, -(-length // size))
    return max(8, -(-length // (8 * blocks)) * 8)


@functools.lru_cache(maxsize=128)
def _program(tiling, names):
    """The attention as a function of tensors, compiled where that is usual."""

    def program(*tensors):
        return _attention(tiling, dict(zip(names, tensors, strict=True)))

    return backend.compiled(program)


def _attention(tiling, tensors):
    # A row's tiles fit into a CPU's cache; a GPU wants much to do at once.
    one_by_one = backend.device_of(tensors["query"]) == "cpu"
    table = tile_table(
        tiling.mask,
        tiling.query_length,
        tiling.key_length,
        tiling.block_size,
        tiling.key_block_size,
        _data_of(tensors),
        same_for_rows=not one_by_one,
    )
    if "segment_ids" in tensors:
        tensors.setdefault("key_segment_ids", tensors["segment_ids"])
    lengths = {"query": tiling.query_length, "key": tiling.key_length}
    walks_in_loops = not backend.RUNS_STEP_BY_STEP
    if walks_in_loops:
        lengths = {
            "query": tiling.num_query_blocks * tiling.block_size,
            "key": tiling.num_key_blocks * tiling.key_block_size,
        }
    batch = ops.shape(tensors["query"])[0]
    for name, tensor in tensors.items():
        length = lengths["query" if name in OF_QUERIES else "key"]
        if name in ("query", "key", "value"):
            tensor = ops.transpose(tensor, (0, 2, 1, 3))
            tensors[name] = _padded(tensor, 2, length)
        elif name in (*BATCH_DATA, "query_positions", "key_positions"):
            tensor = tensor if len(tensor.shape) == 2 else tensor[None]
            tensor = _padded(tensor, 1, length)
            tensors[name] = ops.broadcast_to(tensor, (batch, length))
        elif name == "prefix_length":
            tensors[name] = ops.broadcast_to(tensor, (batch,))
    if walks_in_loops:
        outputs = _in_loops(tiling, table, tensors, one_by_one)
    else:
        outputs = backend.attention_by_rows(tiling, table, tensors, one_by_one)
    return ops.transpose(outputs, (0, 2, 1, 3))


def _data_of(tensors):
    """The batch's data, on the host where the tiles are walked from there."""
    names = (*BATCH_DATA, "prefix_length")
    data = {name: tensors[name] for name in names if name in tensors}
    if backend.RUNS_STEP_BY_STEP:
        data = {name: ops.convert_to_numpy(x) for name, x in data.items()}
    return MaskData(**data)


def _in_loops(tiling, table, tensors, one_by_one):
    """Batch rows are either looped over, or all in one loop."""
    for name in ("query", "key", "value"):
        tensor = tensors[name]
        tensors[name] = tensor[:, None] if one_by_one else tensor[None]
    for name in ("columns", "num_full", "num_kept"):
        tensors[name] = ops.convert_to_tensor(getattr(table, name))
    outputs = attention_in_loops(tiling, table.starts, tensors)
    outputs = outputs[:, 0] if one_by_one else outputs[0]
    return outputs[:, :, : tiling.query_length]


def _padded(tensor, axis, length):
    short = length - tensor.shape[axis]
    if not short:
        return tensor
    widths = [(0, 0)] * len(tensor.shape)
    widths[axis] = (0, short)
    return ops.pad(tensor, widths)
