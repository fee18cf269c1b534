"""Scaled dot-product attention: the one door to every executor."""

import math

import keras
import numpy as np
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.backends import backend
from keras_transformer._internal.sublayers import run
from keras_transformer.attention import choice as choices
from keras_transformer.attention.arguments import (
    check_broadcasts,
    check_heads,
    check_read,
    check_tensors,
    counted,
    slots_or_positions,
)
from keras_transformer.attention.blockwise import blockwise_attention
from keras_transformer.attention.dense import dense_attention
from keras_transformer.attention.recording import chosen, left_out
from keras_transformer.masks import Full, Mask, MaskData
from keras_transformer.masks.arrays import both
from keras_transformer.masks.pairs import Pairs
from keras_transformer.positions.alibi import ALiBi


def dot_product_attention(
    query,
    key,
    value,
    *,
    mask: Mask | None = None,
    attention_mask=None,
    padding_mask=None,
    segment_ids=None,
    key_segment_ids=None,
    prefix_length=None,
    query_slots=None,
    key_slots=None,
    bias=None,
    positions=None,
    key_positions=None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks=None,
    dropout: float = 0.0,
    seed=None,
    return_attention_scores: bool = False,
    implementation: str = "auto",
):
    """Computes `softmax(scale * query @ key + bias, where allowed) @ value`.

    A masked key has weight exactly 0. A query that may attend to no key gets
    exactly 0, with gradient exactly 0, in every dtype.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.2.1.

    Args:
        query: (batch, query_length, num_heads, key_dim).
        key: (batch, key_length, num_key_value_heads, key_dim), where
            num_key_value_heads divides num_heads; head `h` of the query reads
            head `h // (num_heads // num_key_value_heads)`.
        value: (batch, key_length, num_key_value_heads, value_dim).
        mask: Who may attend to whom; None is `Full()`.
        attention_mask: Booleans, True = may attend, that broadcast to
            (batch, num_heads, query_length, key_length); three axes are
            (batch, query_length, key_length). And-ed with `mask`.
        padding_mask: (batch, key_length) booleans, True for a real key.
        segment_ids: (batch, query_length) int32, read by `Documents()`.
        key_segment_ids: (batch, key_length) int32; None: `segment_ids`.
        prefix_length: int32, a number or (batch,), read by `Prefix()`.
        query_slots: int32 (query_length,) or (batch, query_length); None
            counts from 0.
        key_slots: int32 (key_length,) or (batch, key_length); -1 marks an
            empty place. None counts from 0.
        bias: Numbers that broadcast to (batch, num_heads, query, key), added
            to the scaled scores; or a position scheme that acts on scores
            (`ALiBi`, `RelativePositionBias`), which long sequences evaluate
            tile by tile.
        positions, key_positions: int32 (length,) or (batch, length), read by
            such a scheme; None counts from 0.
        scale: Factor on the scores; None is `1 / sqrt(key_dim)`.
        soft_cap: `c`: scores become `c * tanh(scores / c)` before the bias.
        sinks: (num_heads,), the score of an extra key without a value.
        dropout: Rate of attention weights set to zero; 0 at inference.
        seed: Integer or `keras.random.SeedGenerator` of the dropout.
        return_attention_scores: Whether to return the weights too.
        implementation: `"dense"`; `"blockwise"`, in memory that grows with
            the length, skipping what the mask forbids; `"fused"`, the
            backend's own kernel; or `"auto"`, the fastest of those that are
            exactly right. `explain` tells which one that is. `"blockwise"`
            and `"fused"` have first derivatives only.

    Returns:
        (batch, query_length, num_heads, value_dim), and with
        `return_attention_scores` also the weights before dropout, (batch,
        num_heads, query_length, key_length), in the dtype of the query.

    Raises:
        ValueError: If shapes disagree, if a rule of the mask misses its data
            or data is given that nothing reads, or if the `implementation`
            that is asked for cannot be honoured; the message says why.

    Example:

    ```python
    query = keras.random.normal((2, 5, 4, 8))
    outputs = dot_product_attention(query, query, query, mask=Causal())
    ```
    """
    checks.one_of(choices.IMPLEMENTATIONS, implementation=implementation)
    checks.positive(scale=scale, optional=True)
    checks.positive(soft_cap=soft_cap, optional=True)
    checks.rate(dropout=dropout)
    query, key, value = map(ops.convert_to_tensor, (query, key, value))
    scores_shape = check_tensors(query, key, value)
    mask = Full() if mask is None else mask
    if not isinstance(mask, Mask):
        checks.fail(
            "a Mask or None", "mask", mask, "For an array: attention_mask."
        )
    batch, num_heads, query_length, key_length = scores_shape
    check_heads(mask, num_heads)
    check_read(
        mask,
        "the mask",
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
        prefix_length=prefix_length,
    )
    if attention_mask is not None:
        attention_mask = _of_four_axes(attention_mask, scores_shape)
    bias, scheme = _bias(bias, positions, key_positions, scores_shape)
    query_slots, positions = (
        slots_or_positions(name, given, batch, query_length)
        for name, given in (
            ("query_slots", query_slots),
            ("positions", positions),
        )
    )
    key_slots, key_positions = (
        slots_or_positions(name, given, batch, key_length)
        for name, given in (
            ("key_slots", key_slots),
            ("key_positions", key_positions),
        )
    )
    if sinks is not None:
        sinks = ops.convert_to_tensor(sinks)
        if tuple(sinks.shape) != (num_heads,):
            checks.fail(
                f"{(num_heads,)}, one number a head",
                "sinks.shape",
                tuple(sinks.shape),
            )
    bias_kind = "scheme" if scheme is not None else None
    if bias is not None:
        bias_kind = "array"
    call = choices.Call(
        batch=batch,
        query_length=query_length,
        key_length=key_length,
        num_heads=num_heads,
        key_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=keras.backend.standardize_dtype(query.dtype),
        device=backend.device_of(query),
        mask=mask,
        has_padding=padding_mask is not None,
        has_slots=query_slots is not None or key_slots is not None,
        attention_mask=(
            None if attention_mask is None else tuple(attention_mask.shape)
        ),
        bias=bias_kind,
        alibi=type(scheme) is ALiBi,
        soft_cap=soft_cap is not None,
        sinks=sinks is not None,
        dropout=bool(dropout),
        scores=return_attention_scores,
    )
    data = MaskData(padding_mask, segment_ids, key_segment_ids, prefix_length)
    data.check_rows(batch)
    choice = chosen(call, implementation, data)
    nothing = left_out(call)
    if nothing is not None:
        return nothing
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    seed = dropout_seed(seed) if dropout else None
    if scheme is not None:
        positions = counted(query) if positions is None else positions
        key_positions = counted(key) if key_positions is None else key_positions
    if choice.executor == "blockwise":
        return blockwise_attention(
            query,
            key,
            value,
            mask=mask,
            data=data,
            scale=scale,
            bias=scheme,
            query_positions=positions,
            key_positions=key_positions,
            soft_cap=soft_cap,
            sinks=sinks,
            dropout=dropout,
            seed=seed,
        )
    if choice.kernel is not None and "alibi" in choice.kernel.options:
        if scheme is not None:
            unit = run(scheme, *np.array([[0], [1]], "int32"))
            bias = ops.reshape(unit, (-1,)), positions, key_positions
    elif scheme is not None:
        bias = run(scheme, positions, key_positions)
    remains = mask if choice.kernel is None else choice.lowering.residual
    allowed = None
    if choice.residual_shape is not None:
        allowed = _allowed(
            Full() if remains is None else remains,
            data,
            attention_mask,
            counted(query) if query_slots is None else query_slots,
            counted(key) if key_slots is None else key_slots,
        )
    if choice.executor == "fused":
        if choice.kernel.skips:
            allowed = Pairs(mask, data, query.shape[1], key.shape[1])
        return choice.kernel.run(
            query,
            key,
            value,
            choice.lowering,
            allowed=allowed,
            bias=bias,
            scale=scale,
            soft_cap=soft_cap,
        )
    if bias_kind == "array":
        # Minus infinity hides keys, from some queries perhaps all of them.
        visible = bias > -np.inf
        allowed = visible if allowed is None else both(allowed, visible)
    outputs, weights = dense_attention(
        query,
        key,
        value,
        scale=scale,
        allowed=allowed,
        bias=bias,
        soft_cap=soft_cap,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
    )
    if return_attention_scores:
        return outputs, ops.cast(weights, query.dtype)
    return outputs


def dropout_seed(seed):
    """Two int32 numbers from a seed: an integer, a generator or None."""
    return keras.random.randint((2,), 0, 2**31 - 1, dtype="int32", seed=seed)


def _bias(bias, positions, key_positions, scores_shape):
    """The bias as an array or as a bound scheme; the other one is None."""
    if isinstance(bias, keras.layers.Layer):
        if getattr(bias, "acts_on", None) != "scores":
            checks.fail(
                "an array, or a position scheme that acts on scores (`ALiBi`, "
                "`RelativePositionBias`)",
                "bias",
                bias,
            )
        bias.bind(scores_shape[1])
        return None, bias
    for name, given in (
        ("positions", positions),
        ("key_positions", key_positions),
    ):
        if given is not None:
            raise ValueError(
                f"`{name}` is read by a position scheme alone. Received: "
                f"bias={bias!r}. Pass a scheme, or leave it out: masks go by "
                "slots."
            )
    if bias is None:
        return None, None
    bias = ops.convert_to_tensor(bias)
    if keras.backend.standardize_dtype(bias.dtype) == "bool":
        raise ValueError(
            "`bias` must be numbers that are added to the scores. Received: "
            "booleans. Pass them as `attention_mask`."
        )
    check_broadcasts("bias", bias.shape, scores_shape)
    return bias, None


def _of_four_axes(attention_mask, scores_shape):
    """The attention mask as booleans of four axes."""
    attention_mask = ops.convert_to_tensor(attention_mask)
    if "float" in keras.backend.standardize_dtype(attention_mask.dtype):
        raise ValueError(
            "`attention_mask` must be boolean, True = may attend. Received: "
            f"dtype {attention_mask.dtype}. For numbers that are added to the "
            "scores, 0 where attention is allowed, pass `mask == 0`."
        )
    rank = len(attention_mask.shape)
    if rank not in (2, 3, 4):
        checks.fail(
            "(query_length, key_length), or that with a batch, or with a "
            "batch and heads before",
            "attention_mask.shape",
            tuple(attention_mask.shape),
        )
    attention_mask = ops.cast(attention_mask, "bool")
    if rank == 2:
        attention_mask = attention_mask[None]
    if rank < 4:
        attention_mask = attention_mask[:, None]
    check_broadcasts("attention_mask", attention_mask.shape, scores_shape)
    return attention_mask


def _allowed(mask, data, attention_mask, query_slots, key_slots):
    """Booleans for (batch, heads, query, key), or None when all is allowed."""
    allowed = mask.evaluate(query_slots, key_slots, data)
    if isinstance(allowed, np.ndarray) and allowed.all():
        allowed = None
    if attention_mask is None or allowed is None:
        return attention_mask if allowed is None else allowed
    return ops.logical_and(allowed, attention_mask)
