"""JAX's fused kernels: cuDNN on NVIDIA's GPUs, splash attention on TPUs."""

import jax
import jax.extend
from jax import numpy as jnp

from keras_transformer._internal.kernels import Kernel

# Lengths that splash attention takes are multiples of its smallest block.
_LANES = 128
_LARGEST_BLOCK = 512


def compute_capability():
    """That of the first CUDA GPU, as in (9, 0), or None without one."""
    if "cuda" not in jax.extend.backend.get_backend().platform_version.lower():
        return None
    capability = jax.local_devices()[0].compute_capability
    return tuple(int(part) for part in str(capability).split("."))


def cudnn_refusal(call, lowering):
    """Why cuDNN cannot take the call exactly, or None."""
    capability = compute_capability() if call.device == "gpu" else None
    if capability is None:
        return "it needs a CUDA GPU"
    if not call.is_half:
        return "it needs float16 or bfloat16"
    if call.bias:
        return "score biases are left to the other executors"
    if call.key_dim != call.value_dim:
        return "values must be as wide as keys"
    widest = 256 if capability >= (9, 0) else 128
    if call.key_dim % 8 or call.key_dim > widest:
        return f"the width of a head must be a multiple of 8, up to {widest}"
    if lowering.window and lowering.window[1] and not lowering.is_causal:
        return "it takes a window of earlier keys only"
    has_array = (
        call.has_padding
        or call.has_attention_mask
        or call.has_slots
        or lowering.residual is not None
    )
    if not has_array:
        return None
    if lowering.window:
        return "it takes a window only without a mask array"
    if call.dtype == "float16":
        return "in float16 a masked key could outweigh the others"
    if (call.query_length or 1) % 2 or (call.key_length or 1) % 2:
        return "with a mask array the lengths must be known and even"
    return None


def cudnn(
    query,
    key,
    value,
    lowering,
    *,
    allowed,
    bias,
    scale,
    soft_cap,
    implementation="cudnn",
):
    """Attention by `jax.nn.dot_product_attention`.

    The kernel adds to the scores of masked keys, so that a query which sees
    no key would see all: its output is replaced by zero.
    """
    del bias, soft_cap
    is_causal, window, rows = lowering.is_causal, None, None
    if lowering.window is not None:
        # The kernel knows windows of causal attention alone.
        is_causal, window = True, (lowering.window[0], 0)
    if allowed is not None:
        queries, keys = query.shape[1], key.shape[1]
        allowed = jnp.asarray(allowed)
        allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], queries, keys))
        seen = jnp.tri(queries, keys, dtype=bool) if is_causal else True
        rows = jnp.any(allowed & seen, axis=-1, keepdims=True)
        rows = jnp.swapaxes(rows, 1, 2)
    outputs = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=allowed,
        scale=scale,
        is_causal=is_causal,
        local_window_size=window,
        implementation=implementation,
    )
    return outputs if rows is None else jnp.where(rows, outputs, 0)


def splash_refusal(call, lowering):
    """Why splash attention cannot take the call exactly, or None."""
    if call.device != "tpu":
        return "it needs a TPU"
    if call.dtype != "bfloat16":
        return "it needs bfloat16: other types might be rounded"
    if call.has_slots:
        return "slots are given, and blocks are planned for slots from 0"
    if call.has_attention_mask:
        return "`attention_mask` is an array, which has no plan"
    if call.bias:
        return "score biases are left to the other executors"
    if lowering.residual is not None:
        return f"it cannot say {lowering.residual!r}"
    if lowering.window and lowering.window[1] and not lowering.is_causal:
        return "it is given windows of earlier keys only"
    for length in (call.query_length, call.key_length):
        if not length or length % _LANES:
            return f"lengths must be known and multiples of {_LANES}"
    if max(call.key_dim, call.value_dim) > 256:
        return "it is given heads at most 256 wide"
    return None


def splash(
    query,
    key,
    value,
    lowering,
    *,
    allowed,
    bias,
    scale,
    soft_cap,
    interpret=False,
):
    """Attention by the splash kernel of `jax.experimental.pallas`.

    Documents and padding are its segment ids. A query that sees no key would
    see all keys of some block: its output is replaced by zero.
    """
    del bias
    num_heads, value_dim = query.shape[2], value.shape[3]
    kernel = _splash_kernel(
        lowering, num_heads, query.shape[1], key.shape[1], soft_cap, interpret
    )
    ids = _segment_ids(allowed.batch, *query.shape[:2], key.shape[1])
    width = -(-max(query.shape[3], value_dim) // _LANES) * _LANES
    outputs = jax.vmap(kernel)(
        _heads_first((query * scale).astype(query.dtype), width),
        _heads_first(key, width),
        _heads_first(value, width),
        ids,
    )
    outputs = jnp.swapaxes(outputs, 1, 2)[..., :value_dim]
    # Without padding, a query is a key of its own document.
    is_self = allowed.data.key_segment_ids is None
    if ids is None or (allowed.data.padding_mask is None and is_self):
        return outputs
    rows = _rows_that_see(lowering, ids, query.shape[1], key.shape[1])
    return jnp.where(rows[..., None, None], outputs, 0)


def _splash_kernel(
    lowering, num_heads, query_length, key_length, soft_cap, interpret
):
    # Its import takes time, which only its callers should spend.
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    shape = (query_length, key_length)
    if lowering.window is not None:
        mask = library.LocalMask(shape, (lowering.window[0], 0), 0)
    elif lowering.is_causal:
        mask = library.CausalMask(shape)
    else:
        mask = library.FullMask(shape)
    queries, keys = _block_size(query_length), _block_size(key_length)
    return library.make_splash_mha(
        library.MultiHeadMask([mask] * num_heads),
        block_sizes=library.BlockSizes(
            block_q=queries,
            block_kv=keys,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_q_dq=queries,
            block_kv_dq=keys,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def _block_size(length):
    """The largest block that divides the length."""
    sizes = range(_LARGEST_BLOCK, 0, -_LANES)
    return next(size for size in sizes if length % size == 0)


def _heads_first(tensor, width):
    """(batch, heads, length, width), with features that are zero added."""
    tensor = jnp.swapaxes(tensor, 1, 2)
    short = width - tensor.shape[-1]
    return jnp.pad(tensor, ((0, 0), (0, 0), (0, 0), (0, short)))


def _segment_ids(arrays, batch, query_length, key_length):
    """Documents and padding as the ids of queries and keys, or None.

    Args:
        arrays: What a `Pairs` reads of the batch.
        batch, query_length, key_length: Sizes.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    if not arrays:
        return None
    ids, key_ids = (
        jnp.broadcast_to(
            jnp.asarray(arrays.get(name, 0), "int32"), (batch, length)
        )
        for name, length in (
            ("segment_ids", query_length),
            ("key_segment_ids", key_length),
        )
    )
    if "padding_mask" in arrays:
        unused = jax.vmap(_unused_id)(ids)[:, None]
        real = jnp.asarray(arrays["padding_mask"])
        key_ids = jnp.where(real, key_ids, unused)
    return library.SegmentIds(ids, key_ids)


def _unused_id(ids):
    """A number that is none of the ids: one of n + 1 is never among n."""
    used = jnp.zeros(ids.shape[0] + 1, bool).at[ids].set(True, mode="drop")
    return jnp.argmin(used).astype("int32")


def _rows_that_see(lowering, ids, query_length, key_length):
    """Which queries see a key, (batch, query_length).

    The comparisons become one fused reduction, not an array of all pairs.
    """
    query, key = jnp.arange(query_length)[:, None], jnp.arange(key_length)
    seen = ids.q[:, :, None] == ids.kv[:, None, :]
    if lowering.is_causal or lowering.window:
        seen &= key <= query
    if lowering.window:
        seen &= key >= query - lowering.window[0]
    return jnp.any(seen, axis=-1)


KERNELS = (
    Kernel("cudnn", frozenset({"is_causal", "window"}), cudnn_refusal, cudnn),
    Kernel(
        "splash_attention",
        frozenset({"is_causal", "window", "documents", "padding"}),
        splash_refusal,
        splash,
        skips=True,
        options=frozenset({"soft_cap"}),
    ),
)
