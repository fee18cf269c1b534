"""Inputs and targets for teacher forcing."""

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.training.arrays import mask_array, token_array


def shift_right(token_ids, start_token: int):
    """The decoder's inputs when `token_ids` are its targets.

    Each row moves one place to the right, `start_token` comes first, and the
    last token drops out: at every place the decoder has seen the tokens before
    the one it must predict. Generation starts from the same token.

    Args:
        token_ids: `(batch_size, length)` integers.
        start_token: Token that begins every sequence.

    Returns:
        `(batch_size, length)`, int32.

    Raises:
        ValueError: If `token_ids` is not a matrix of integers, or
            `start_token` not an integer of at least 0.

    Example:

    ```python
    x = {
        "encoder_token_ids": sources,
        "decoder_token_ids": shift_right(targets, start_token=1),
    }
    model.fit(x, targets, sample_weight=(targets != 0).astype("float32"))
    generate(
        model, {"encoder_token_ids": rows}, start_token=1, max_new_tokens=20
    )  # rows without padding: each entry counts as real
    ```
    """
    token_ids = token_array(ndim=2, token_ids=token_ids)
    checks.non_negative_int(start_token=start_token)
    start = np.full((len(token_ids), 1), start_token, "int32")
    return np.concatenate([start, token_ids], axis=1)[:, : token_ids.shape[1]]


def next_token_pairs(token_ids, *, padding_mask=None):
    """Inputs and targets of a language model, from whole sequences.

    Args:
        token_ids: `(batch_size, length)` integers, two tokens or more a row.
        padding_mask: `(batch_size, length)`, True for real tokens.

    Returns:
        A tuple of the inputs, the targets (both int32) and the sample weights
        (float32: 1 where input and target are real tokens, else 0), each of
        shape `(batch_size, length - 1)`.

    Raises:
        ValueError: If `token_ids` is not a matrix of integers with at least
            two columns, or `padding_mask` has another shape.

    Example:

    ```python
    inputs, targets, weights = next_token_pairs(
        token_ids, padding_mask=token_ids != 0
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
    )
    model.fit(inputs, targets, sample_weight=weights)
    ```
    """
    token_ids = token_array(ndim=2, token_ids=token_ids)
    if token_ids.shape[1] < 2:
        checks.fail(
            "a matrix of at least two columns",
            "token_ids.shape",
            token_ids.shape,
            "A pair takes a token and the one after it.",
        )
    is_real = mask_array(token_ids.shape, padding_mask)
    weights = (is_real[:, :-1] & is_real[:, 1:]).astype("float32")
    return token_ids[:, :-1], token_ids[:, 1:], weights
