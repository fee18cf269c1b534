"""PyTorch's `flex_attention`, on blocks from the mask's own plan."""

import functools
import importlib.util
import types

import torch

# The kernel's own size of a block, of queries and of keys.
BLOCK_SIZE = 128
# The kernel takes no narrower heads.
_NARROWEST = 16


@functools.cache
def has_cuda():
    """Whether there is a GPU for which kernels can be compiled."""
    triton = importlib.util.find_spec("triton")
    return torch.cuda.is_available() and triton is not None


def refusal(call, lowering):
    """Why the kernel cannot or should not take the call, or None."""
    if call.device != "gpu" or not has_cuda():
        return "it needs a CUDA GPU and Triton"
    if call.has_slots:
        return "slots are given, and blocks are planned for slots from 0"
    if call.has_attention_mask:
        return "`attention_mask` is an array, which has no plan"
    if call.bias == "array":
        return "`bias` is an array as large as the scores"
    if call.bias == "scheme" and not call.alibi:
        return "the gradient of a trained table is left to other executors"
    if min(call.key_dim, call.value_dim) < _NARROWEST:
        return f"it needs heads at least {_NARROWEST} wide"
    if (call.query_length or 0) < BLOCK_SIZE or not call.key_length:
        return f"it needs a known length of at least {BLOCK_SIZE} queries"
    plain = lowering.residual is None and not call.has_padding
    if plain and not (call.bias or call.soft_cap):
        return "there is nothing to plan: the other kernel is faster"
    return None


def attention(query, key, value, lowering, *, allowed, bias, scale, soft_cap):
    """Attention by `flex_attention`, compiled on a GPU.

    It gives a query that sees no key exactly 0, with gradient 0.

    Args:
        query: (batch, query_length, heads, key_dim).
        key: (batch, key_length, groups, key_dim).
        value: (batch, key_length, groups, value_dim).
        lowering: Not read: `allowed` says everything.
        allowed: The `Pairs` of the whole mask.
        bias: None, or the bias of distance 1, (heads,), with the positions of
            queries and keys, (length,) or (batch, length).
        scale: Factor on the scores.
        soft_cap: None or `c`: scores become `c * tanh(scores / c)`.

    Returns:
        (batch, query_length, heads, value_dim).
    """
    del lowering
    batch, device = query.shape[0], query.device
    arrays = {
        # Copied: PyTorch shares no array that must not be written.
        name: torch.tensor(array, device=device)
        for name, array in allowed.constants.items()
    }
    of_batch = dict(allowed.batch)
    if bias is not None:
        arrays["slopes"] = torch.as_tensor(bias[0], device=device)
        for name, positions in zip(
            ("query_positions", "key_positions"), bias[1:], strict=True
        ):
            rank = len(positions.shape)
            of_batch[name] = positions if rank == 2 else positions[None]
    for name, array in of_batch.items():
        array = torch.as_tensor(array, device=device)
        arrays[name] = array.expand(batch, *array.shape[1:]).contiguous()
    static = allowed.rule, float(scale), soft_cap, bias is not None
    # Inside of a function that is being compiled it is compiled with it.
    if device.type == "cpu" or torch.compiler.is_compiling():
        kernel = program(*static)
    else:
        kernel = _compiled(tuple(query.shape), tuple(key.shape), *static)
    outputs = kernel(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        arrays,
        *block_lists(
            allowed.table(BLOCK_SIZE),
            -(-allowed.key_length // BLOCK_SIZE),
            device,
        ),
    )
    return outputs.transpose(1, 2)


def program(rule, scale, soft_cap, has_alibi):
    """The kernel as a function of tensors, not compiled.

    Args:
        rule: The rule of a `Pairs`.
        scale: Factor on the scores.
        soft_cap: None or `c`.
        has_alibi: Whether the arrays hold slopes and positions.
    """

    # Its import takes time, which only its callers should spend.
    from torch.nn.attention import flex_attention as flex

    def run(query, key, value, arrays, *lists):
        def mask_mod(row, head, i, j):
            return rule(arrays, row, head, i, j)

        def score_mod(score, row, head, i, j):
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            if has_alibi:
                here = arrays["query_positions"][row, i]
                there = arrays["key_positions"][row, j]
                distance = torch.abs(there - here).to(torch.float32)
                score = score + distance * arrays["slopes"][head]
            return score

        blocks = flex.BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(query.shape[2], key.shape[2]),
        )
        changes = soft_cap is not None or has_alibi
        return flex.flex_attention(
            query,
            key,
            value,
            score_mod=score_mod if changes else None,
            block_mask=blocks,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    return run


@functools.lru_cache(maxsize=256)
def _compiled(query_shape, key_shape, *static):
    """The program compiled, once for each structure and each shape."""
    del query_shape, key_shape
    return compiled(program(*static))


def compiled(function, **options):
    """The function compiled, with the numbers in its closure as constants.

    The kernel takes no numbers that vary, and PyTorch counts recompilations
    by code object, which closures share: each function gets its own.
    """
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        closure=function.__closure__,
    )
    return torch.compile(own, dynamic=False, **options)


def block_lists(table, num_key_blocks, device):
    """The tiles of a `TileTable` as `BlockMask` lists them.

    Args:
        table: The table.
        num_key_blocks: How many blocks of keys there are.
        device: Where the lists are made.

    Returns:
        For the blocks that need the mask, how many there are, int32 (rows, 1,
        query blocks), and which, int32 (rows, 1, query blocks, key blocks),
        where only so many entries count; then the same for full blocks.
    """
    columns = torch.as_tensor(table.columns, device=device)
    starts = torch.as_tensor(table.starts, device=device)
    num_full = torch.as_tensor(table.num_full, device=device)
    num_kept = torch.as_tensor(table.num_kept, device=device)
    if not columns.shape[1]:
        columns = columns.new_zeros(columns.shape[0], 1)
    steps = torch.arange(num_key_blocks, device=device)

    def listed(first):
        places = (first[..., None] + steps).clamp(max=columns.shape[1] - 1)
        found = columns.gather(1, places.flatten(1).long())
        return found.reshape(places.shape)[:, None].to(torch.int32)

    starts = starts.expand(num_full.shape)
    return (
        (num_kept - num_full)[:, None].to(torch.int32),
        listed(starts + num_full),
        num_full[:, None].to(torch.int32),
        listed(starts),
    )
