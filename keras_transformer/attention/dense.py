"""The dense executor: all scores at once, exact in every dtype."""

import numpy as np
from keras import ops

from keras_transformer.attention.tiling import (
    dropout_factors,
    dropout_streams,
)


def dense_attention(
    query,
    key,
    value,
    *,
    scale,
    allowed=None,
    bias=None,
    soft_cap=None,
    sinks=None,
    dropout=0.0,
    seed=None,
):
    """Attention from the whole (batch, heads, query, key) score tensor.

    Scores and softmax are float32 whatever the inputs are. Query heads are
    grouped over the key heads without repeating keys or values.

    Args:
        query: (batch, query_length, heads, key_dim).
        key: (batch, key_length, key_value_heads, key_dim).
        value: (batch, key_length, key_value_heads, value_dim).
        scale: Factor on the scores.
        allowed: None or booleans that broadcast to (batch, heads, query, key).
        bias: None or numbers that broadcast likewise, added to the scores.
        soft_cap: None or `c`: scores become `c * tanh(scores / c)`.
        sinks: None or (heads,), the score of a key without a value.
        dropout: Rate of attention weights set to zero.
        seed: int32 (2,), the seed of the dropout.

    Returns:
        The outputs (batch, query_length, heads, value_dim), and the weights
        (batch, heads, query, key) before dropout, float32.
    """
    num_heads, groups = query.shape[2], key.shape[2]
    scores = _scores(query, key, scale)
    if soft_cap is not None:
        scores = soft_cap * ops.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + ops.cast(bias, "float32")
    sees_a_key = None
    if allowed is not None:
        masked = -np.inf
        if not _every_row_sees_a_key(allowed):
            sees_a_key = ops.any(allowed, axis=-1, keepdims=True)
            # Finite where all is masked, so that the softmax is.
            masked = ops.where(sees_a_key, masked, 0.0)
        scores = ops.where(allowed, scores, masked)
    if sinks is None:
        weights = _softmax(scores)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    if sees_a_key is not None:
        weights = ops.where(sees_a_key, weights, 0.0)
    kept = _dropped(weights, dropout, seed) if dropout else weights
    outputs = _weighted_values(
        ops.cast(kept, value.dtype), value, num_heads, groups
    )
    return outputs, weights


def _dropped(weights, rate, seed):
    batch, num_heads, queries, keys = ops.shape(weights)
    streams = dropout_streams(
        seed,
        ops.arange(batch, dtype="int32"),
        num_heads,
        ops.arange(queries, dtype="int32"),
    )
    key_slots = ops.arange(keys, dtype="int32")
    return weights * dropout_factors(rate, streams, key_slots)


def _scores(query, key, scale):
    batch, query_length, num_heads, key_dim = ops.shape(query)
    groups = key.shape[2]
    # Half-precision products would round the scores, and float16 overflow.
    query = ops.cast(query, "float32") * scale
    key = ops.transpose(ops.cast(key, "float32"), (0, 2, 3, 1))
    query = ops.transpose(query, (0, 2, 1, 3))
    if groups == num_heads:
        return ops.matmul(query, key)
    query = ops.reshape(
        query, (batch, groups, num_heads // groups * query_length, key_dim)
    )
    scores = ops.matmul(query, key)
    return ops.reshape(
        scores, (batch, num_heads, query_length, ops.shape(key)[3])
    )


def _weighted_values(weights, value, num_heads, groups):
    batch, _, query_length, key_length = ops.shape(weights)
    value = ops.transpose(value, (0, 2, 1, 3))
    if groups != num_heads:
        weights = ops.reshape(
            weights,
            (batch, groups, num_heads // groups * query_length, key_length),
        )
    outputs = ops.matmul(weights, value)
    if groups != num_heads:
        outputs = ops.reshape(
            outputs, (batch, num_heads, query_length, value.shape[3])
        )
    return ops.transpose(outputs, (0, 2, 1, 3))


def _softmax(scores):
    if scores.shape[-1] != 1:
        return ops.softmax(scores, axis=-1)
    # Keras warns of a single key, which the first step of decoding has.
    return ops.exp(scores - scores)


def _softmax_with_sinks(scores, sinks):
    sinks = ops.reshape(ops.cast(sinks, "float32"), (1, -1, 1, 1))
    column = ops.broadcast_to(sinks, (*ops.shape(scores)[:-1], 1))
    weights = ops.softmax(ops.concatenate([scores, column], axis=-1), axis=-1)
    return weights[..., :-1]


def _every_row_sees_a_key(allowed):
    return isinstance(allowed, np.ndarray) and allowed.any(axis=-1).all()
