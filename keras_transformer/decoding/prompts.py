"""From what the caller passes to arrays: prompts of unequal lengths."""

import dataclasses

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.decoding.layers import padding_name


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts and the model's other inputs, as NumPy arrays.

    Attributes:
        tokens: int32 (batch, longest), padded on the right with 0.
        lengths: int32 (batch,), the true length of each row.
        growing: Name to int32 (batch, longest), other inputs per token.
        static: Name to array, inputs that do not depend on the tokens.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    growing: dict
    static: dict


def ragged_rows(name: str, value) -> list:
    """Rows of integers as a list of one-dimensional int32 arrays.

    Args:
        name: The argument's name, for errors.
        value: A list of rows, or an array (batch, length).

    Raises:
        ValueError: If a row is not one-dimensional or holds no integers.
    """
    if isinstance(value, str | bytes | dict):
        checks.fail("rows of token ids", name, value, "Tokenize it first.")
    try:
        rows = [np.asarray(row) for row in value]
    except TypeError:
        checks.fail("rows of token ids", name, value)
    if not rows:
        checks.fail("at least one row of token ids", name, value)
    for row in rows:
        if row.ndim != 1:
            checks.fail(
                "a list of rows of token ids, or an array (batch, length)",
                name,
                value,
                "For one prompt, pass [prompt].",
            )
        if row.size and row.dtype.kind not in "iu":
            checks.fail("rows of integers", name, value)
        if row.size and not -(2**31) <= row.min() <= row.max() < 2**31:
            checks.fail("rows of integers of 32 bits", name, value)
    return [row.astype("int32") for row in rows]


def padded(rows: list, length: int, fill: int = 0) -> np.ndarray:
    """An int32 array (batch, length) of rows, padded on the right."""
    array = np.full((len(rows), length), fill, "int32")
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array


def read_prompts(graph, prompts, start_token) -> Prompts:
    """Checks the caller's prompts against the model's inputs.

    Args:
        graph: The `ModelGraph`.
        prompts: Rows of token ids, or a dict from the names of the model's
            inputs to arrays or rows.
        start_token: The one token of each prompt of an encoder-decoder that
            is given none.
    """
    given = dict(prompts) if isinstance(prompts, dict) else None
    if given is None:
        given = {graph.token_input: prompts}
    unknown = sorted(set(given) - set(graph.inputs))
    if unknown:
        raise ValueError(
            f"`prompts` has names that are no inputs of {graph.name!r}: "
            f"{unknown}. Its inputs are {list(graph.inputs)}."
        )
    static = {
        name: given.pop(name) for name in graph.static_inputs if name in given
    }
    static = _static_arrays(graph, static)
    rows = _token_rows(graph, given, static, start_token)
    lengths = np.array([len(row) for row in rows], "int32")
    longest = int(lengths.max())
    growing = {}
    for name in graph.growing_inputs:
        if name == graph.token_input or graph.is_padding(name):
            if name in given:
                raise ValueError(
                    f"`prompts` must not hold {name!r}: the lengths of the "
                    "rows say which tokens are real. Pass rows without "
                    "padding."
                )
            continue
        if name in given:
            values = ragged_rows(name, given[name])
            if [len(row) for row in values] != lengths.tolist():
                raise ValueError(
                    f"`prompts[{name!r}]` must have the lengths of the "
                    f"prompts, {lengths.tolist()}. Received: "
                    f"{[len(row) for row in values]}."
                )
        else:
            values = [_default(name, length) for length in lengths]
        growing[name] = padded(values, longest)
    if "prefix_length" in graph.static_inputs:
        static.setdefault("prefix_length", lengths)
    missing = [name for name in graph.static_inputs if name not in static]
    if missing:
        raise ValueError(
            f"`prompts` must hold the inputs {missing} of {graph.name!r}. "
            f"Received: {sorted([*static, graph.token_input])}."
        )
    for name, array in static.items():
        if array.ndim == 0 or len(array) != len(rows):
            raise ValueError(
                f"`prompts[{name!r}]` must have as many rows as the prompts, "
                f"{len(rows)}. Received: shape {array.shape}."
            )
    return Prompts(padded(rows, longest), lengths, growing, static)


def _token_rows(graph, given, static, start_token):
    """Takes the rows of generated tokens, checked, out of `given`."""
    name = graph.token_input
    if name in given:
        if start_token is not None:
            raise ValueError(
                "`start_token` is the prompt of rows that have none. Received: "
                f"start_token={start_token!r} beside {name!r}. Put it at the "
                "head of each row."
            )
        rows = ragged_rows(name, given.pop(name))
    else:
        if start_token is None or not static:
            raise ValueError(
                f"`prompts` must hold {name!r}, or `start_token` must be "
                f"given. Received: {list(given) + list(static)}."
            )
        checks.non_negative_int(start_token=start_token)
        batch = len(next(iter(static.values())))
        rows = [np.array([start_token], "int32")] * batch
    shortest = min(rows, key=len)
    if not len(shortest):
        index = [len(row) for row in rows].index(0)
        raise ValueError(
            "Each prompt needs at least one token. Received: an empty prompt "
            f"in row {index}. Begin it with a start token."
        )
    _check_vocabulary(graph, name, rows)
    return rows


def _default(name, length):
    """Values of an input per token that the caller left out."""
    if name == "positions":
        return np.arange(length, dtype="int32")
    return np.zeros(length, "int32")


def _static_arrays(graph, given):
    """Inputs that do not depend on the tokens; rows of ids are padded."""
    arrays, implied = {}, {}
    for name, value in given.items():
        symbol = graph.inputs[name]
        if "int" not in str(symbol.dtype) or len(symbol.shape) != 2:
            arrays[name] = _array(name, value, symbol)
            continue
        rows = ragged_rows(name, value)
        _check_vocabulary(graph, name, rows)
        lengths = np.array([len(row) for row in rows])
        arrays[name] = padded(rows, int(lengths.max()))
        mask_name = padding_name(name)
        if mask_name in graph.static_inputs:
            implied[mask_name] = np.arange(lengths.max()) < lengths[:, None]
        elif len(set(lengths)) > 1 and not graph.masks_zero(name):
            raise ValueError(
                f"`prompts[{name!r}]` has rows of unequal lengths "
                f"{lengths.tolist()}, and {graph.name!r} has no input "
                f"{mask_name or 'encoder_padding_mask'!r} by which to hide the "
                "padding. Add that input, "
                "or pass rows of equal length."
            )
    for name, is_real in implied.items():
        if arrays.setdefault(name, is_real).shape != is_real.shape:
            raise ValueError(
                f"`prompts[{name!r}]` must have the shape of the tokens, "
                f"{is_real.shape}. Received: {arrays[name].shape}. Or leave "
                "it out: the lengths of the rows say which tokens are real."
            )
    return arrays


def _array(name, value, symbol):
    try:
        array = np.asarray(value)
    except ValueError:
        checks.fail("an array", name, value, "Its rows are of unequal lengths.")
    return array.astype(str(symbol.dtype))


def _check_vocabulary(graph, name, rows):
    size = graph.vocabulary_size(name)
    for index, row in enumerate(rows):
        low, high = int(row.min(initial=0)), int(row.max(initial=0))
        if low < 0 or (size is not None and high >= size):
            raise ValueError(
                f"Ids of {name!r} must be in [0, {size or 'vocabulary_size'}). "
                f"Received: {low if low < 0 else high} in row {index}."
            )
