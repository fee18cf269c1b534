"""Multi-head attention in NumPy, written from the formula with plain loops.

Everything is analytic in its inputs, so that `slope` can differentiate it by a
complex step: exact to the last digits of float64, unlike a difference.
"""

import numpy as np

STEP = 1e-30


def attention(
    query,
    key,
    value,
    *,
    allowed=None,
    bias=None,
    scale=None,
    soft_cap=None,
    sinks=None,
):
    """`softmax(scale * query @ key + bias, where allowed) @ value`.

    Args:
        query: (batch, query length, heads, key dim).
        key: (batch, key length, groups, key dim).
        value: (batch, key length, groups, value dim).
        allowed: None or booleans that broadcast to (batch, heads, query, key).
        bias: None or numbers that broadcast likewise.
        scale: None is `1 / sqrt(key dim)`.
        soft_cap: None or `c`: `c * tanh(score / c)`, before the bias.
        sinks: None or (heads,), scores of a key without a value.

    Returns:
        The outputs (batch, query length, heads, value dim) and the weights
        (batch, heads, query length, key length).
    """
    rows, query_length, heads, key_dim = query.shape
    key_length, groups, value_dim = value.shape[1:]
    shape = (rows, heads, query_length, key_length)
    allowed = np.broadcast_to(True if allowed is None else allowed, shape)
    bias = np.broadcast_to(0.0 if bias is None else bias, shape)
    scale = 1 / np.sqrt(key_dim) if scale is None else scale
    dtype = np.result_type(query, key, value, bias, "float64")
    dtype = dtype if sinks is None else np.result_type(dtype, sinks)
    outputs = np.zeros((rows, query_length, heads, value_dim), dtype)
    weights = np.zeros(shape, dtype)
    for row, head, q in np.ndindex(rows, heads, query_length):
        group = head // (heads // groups)
        seen = np.flatnonzero(allowed[row, head, q])
        if not seen.size:
            continue
        scores = scale * (key[row, seen, group] @ query[row, q, head])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = scores + bias[row, head, q, seen]
        largest = scores.real.max()
        powers = np.exp(scores - largest)
        total = powers.sum()
        if sinks is not None:
            total = total + np.exp(sinks[head] - largest)
        weights[row, head, q, seen] = powers / total
        outputs[row, q, head] = (
            weights[row, head, q, seen] @ (value[row, seen, group])
        )
    return outputs, weights


def multi_head(
    weights,
    query,
    value,
    key=None,
    *,
    num_heads,
    groups=None,
    norm=None,
    rotate=None,
    **options,
):
    """The layer: projections, heads, attention, gate and output projection.

    Args:
        weights: Name to array: `query/kernel`, `query/bias`, and so on for
            key, value, output and, where there are, gate, query_norm and
            key_norm; `sinks`.
        query: (batch, query length, width).
        value: (batch, key length, width).
        key: Likewise; None: `value`.
        num_heads: Number of query heads.
        groups: Number of key heads; None: `num_heads`.
        norm: None, "rms_norm" or "layer_norm", of query and key heads.
        rotate: None or a function of (batch, length, heads, dim).
        **options: Arguments of `attention`.
    """

    def project(name, inputs):
        outputs = inputs @ weights[f"{name}/kernel"]
        return outputs + weights.get(f"{name}/bias", 0.0)

    def heads(name, inputs, count):
        outputs = project(name, inputs)
        outputs = outputs.reshape(*inputs.shape[:2], count, -1)
        if norm is not None and name != "value":
            outputs = normalized(outputs, norm, weights, f"{name}_norm")
        if rotate is not None and name != "value":
            outputs = rotate(outputs)
        return outputs

    groups = groups or num_heads
    outputs, scores = attention(
        heads("query", query, num_heads),
        heads("key", value if key is None else key, groups),
        heads("value", value, groups),
        sinks=weights.get("sinks"),
        **options,
    )
    outputs = outputs.reshape(*query.shape[:2], -1)
    if "gate/kernel" in weights:
        outputs = outputs / (1 + np.exp(-project("gate", query)))
    return project("output", outputs), scores


def normalized(inputs, norm, weights, name):
    if norm == "layer_norm":
        inputs = inputs - inputs.mean(-1, keepdims=True)
    outputs = inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + 1e-6)
    gain = weights.get(f"{name}/scale", weights.get(f"{name}/gamma"))
    return outputs * gain + weights.get(f"{name}/beta", 0.0)


def rotated(inputs, positions, wavelength=10000.0):
    """Pairs `(i, i + dim / 2)` turned by `position * wavelength^(-2i/dim)`."""
    dim = inputs.shape[-1]
    outputs = np.zeros(inputs.shape, np.result_type(inputs, "float64"))
    for t, i in np.ndindex(inputs.shape[1], dim // 2):
        angle = positions[t] * wavelength ** (-2 * i / dim)
        first, second = inputs[:, t, :, i], inputs[:, t, :, i + dim // 2]
        outputs[:, t, :, i] = first * np.cos(angle) - second * np.sin(angle)
        outputs[:, t, :, i + dim // 2] = second * np.cos(angle) + (
            first * np.sin(angle)
        )
    return outputs


def slope(function, arrays, name, direction):
    """How fast `function(arrays)` grows as one array moves in a direction."""
    moved = dict(arrays)
    moved[name] = arrays[name].astype("complex128") + 1j * STEP * direction
    return function(moved).imag / STEP
