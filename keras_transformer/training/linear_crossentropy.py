"""A de-embedding and its cross-entropy in one, without the logits."""

from keras import ops
from keras.backend import (
    is_float_dtype,
    is_int_dtype,
    result_type,
    standardize_dtype,
)

from keras_transformer._internal import checks
from keras_transformer._internal.backends import backend
from keras_transformer.training.chunked_head import ChunkedHead, weighted

# Logits that are held at a time: few, so that they stay in the cache, but a
# chunk must have rows enough for a fast product.
_CHUNK_LOGITS = 2**21
_CHUNK_SIZES = (128, 1024)


def linear_crossentropy(
    inputs,
    kernel,
    targets,
    sample_weight=None,
    *,
    bias=None,
    transposed: bool = False,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    reduction: str | None = None,
    training: bool = True,
    chunk_size: int | None = None,
):
    """Cross-entropy of `inputs @ kernel + bias`, never held as a whole.

    Logits of a chunk of tokens at a time are made and forgotten, in the
    forward and in the backward pass, so that the memory does not grow with
    tokens times vocabulary. The values are those of `Unembedding` followed by
    `LabelSmoothedCrossentropy`; from the logits on they are computed in
    float32 or better.

    Without a reduction the backward pass makes the logits again. With one, the
    gradients can be taken in the forward pass, which spares that product.
    Only first derivatives exist.

    Reference: [Wijmans et al., 2024](https://arxiv.org/abs/2411.09009), whose
    kernel this follows in chunks.

    A token with a negative target does not count, as if its weight were 0. A
    target beyond the vocabulary gives NaN, unless the weight is 0.

    Args:
        inputs: (..., model_dim), what enters the de-embedding.
        kernel: (model_dim, vocabulary_size); it is cast to the dtype of the
            inputs.
        targets: (...) integers.
        sample_weight: (...), factors of the losses; None: 1.
        bias: (vocabulary_size,) or None.
        transposed: Whether the kernel is (vocabulary_size, model_dim), as
            the table of an embedding is.
        soft_cap: `c`: logits become `c * tanh(logits / c)`.
        label_smoothing: Share of the probability that is spread evenly.
        reduction: None, or `"mean_with_sample_weight"`: the sum of the
            weighted losses over the sum of the weights (0 if that is 0).
        training: Whether to take the gradients in the forward pass if there
            is a reduction; a waste where none are needed.
        chunk_size: Number of tokens in a chunk; None: such that its logits
            are a few megabytes, and at least 128.

    Returns:
        Losses (...), or a scalar if there is a reduction.

    Raises:
        ValueError: If shapes do not fit, the inputs are no floats, or the
            targets no integers.

    Example:

    ```python
    losses = linear_crossentropy(hidden, table, targets, transposed=True)
    ```
    """
    checks.boolean(transposed=transposed)
    checks.positive(soft_cap=soft_cap, optional=True)
    checks.rate(label_smoothing=label_smoothing)
    checks.one_of((None, "mean_with_sample_weight"), reduction=reduction)
    checks.boolean(training=training)
    checks.positive_int(chunk_size=chunk_size, optional=True)
    inputs, kernel, targets, sample_weight, bias = (
        value if value is None else ops.convert_to_tensor(value)
        for value in (inputs, kernel, targets, sample_weight, bias)
    )
    _check_kernel(inputs, kernel, bias, transposed)
    _check_tokens(inputs, targets, sample_weight)
    dtype = standardize_dtype(inputs.dtype)
    exact = result_type(dtype, "float32")
    parameters = (ops.cast(kernel, dtype),)
    if bias is not None:
        parameters += (ops.cast(bias, exact),)
    head = ChunkedHead(transposed, soft_cap, label_smoothing, exact)

    ids = ops.cast(ops.reshape(targets, (-1,)), "int32")
    weights = ops.cast(ids >= 0, exact)
    if sample_weight is not None:
        weights *= ops.reshape(ops.cast(sample_weight, exact), (-1,))
    vectors = ops.reshape(inputs, (-1, inputs.shape[-1]))
    num_tokens = ops.shape(ids)[0]
    if chunk_size is None:
        vocabulary_size = kernel.shape[0 if transposed else 1]
        chunk_size = _chunk_size(num_tokens, vocabulary_size)
    vectors, chunked_ids, chunked_weights = (
        _in_chunks(rows, num_tokens, chunk_size)
        for rows in (vectors, ids, weights)
    )
    if reduction is None or not training:
        losses = backend.with_gradient(
            head.losses, head.gradients, vectors, chunked_ids, *parameters
        )
        losses = ops.reshape(losses, (-1,))[:num_tokens]
        losses = weighted(losses, weights)
        if reduction is None:
            return ops.reshape(losses, ops.shape(targets))
        total = ops.sum(losses)
    else:
        total = backend.with_gradient(
            head.total_and_gradients,
            head.scaled_gradients,
            vectors,
            chunked_ids,
            chunked_weights,
            *parameters,
        )
    return ops.divide_no_nan(total, ops.sum(weights))


def _chunk_size(num_tokens, vocabulary_size):
    smallest, largest = _CHUNK_SIZES
    size = max(smallest, min(largest, _CHUNK_LOGITS // vocabulary_size))
    if not isinstance(num_tokens, int):
        return size
    # Chunks of one size, with few rows of padding in the last.
    num_chunks = max(1, -(-num_tokens // size))
    return 8 * max(1, -(-num_tokens // (8 * num_chunks)))


def _in_chunks(rows, num_tokens, chunk_size):
    """(tokens, ...) as (chunks, chunk, ...), the last one filled with zeros."""
    shape = tuple(rows.shape[1:])
    missing = -num_tokens % chunk_size
    if not isinstance(missing, int) or missing:
        filling = ops.zeros((missing, *shape), rows.dtype)
        rows = ops.concatenate([rows, filling], axis=0)
    return ops.reshape(rows, (-1, chunk_size, *shape))


def _check_kernel(inputs, kernel, bias, transposed):
    model_dim = inputs.shape[-1]
    wanted = "(vocabulary_size, model_dim)"
    if not transposed:
        wanted = "(model_dim, vocabulary_size)"
    if len(kernel.shape) != 2 or kernel.shape[int(transposed)] != model_dim:
        checks.fail(
            f"{wanted} with model_dim={model_dim}, the width of the inputs",
            "kernel.shape",
            tuple(kernel.shape),
            f"It was read with transposed={transposed}.",
        )
    vocabulary_size = kernel.shape[0 if transposed else 1]
    if bias is not None and tuple(bias.shape) != (vocabulary_size,):
        checks.fail(
            f"{(vocabulary_size,)}, one number a token of the kernel",
            "bias.shape",
            tuple(bias.shape),
        )


def _check_tokens(inputs, targets, sample_weight):
    if not is_float_dtype(inputs.dtype):
        checks.fail("floats", "inputs.dtype", standardize_dtype(inputs.dtype))
    if not is_int_dtype(targets.dtype):
        checks.fail(
            "integers, the tokens' ids",
            "targets.dtype",
            standardize_dtype(targets.dtype),
        )
    expected = tuple(inputs.shape[:-1])
    for name, value in (
        ("targets", targets),
        ("sample_weight", sample_weight),
    ):
        if value is not None and not _may_equal(value.shape, expected):
            checks.fail(
                f"{expected}, that of the inputs without the last axis",
                f"{name}.shape",
                tuple(value.shape),
            )


def _may_equal(shape, expected):
    return len(shape) == len(expected) and all(
        None in sizes or sizes[0] == sizes[1]
        for sizes in zip(shape, expected, strict=True)
    )
