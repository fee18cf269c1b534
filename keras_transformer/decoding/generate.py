"""Generation from any functional model made of our layers."""

import dataclasses
import math
import weakref

import keras
import numpy as np

from keras_transformer._internal import checks
from keras_transformer._internal.backends import backend
from keras_transformer.attention.stepwise import both_ways, looks_ahead
from keras_transformer.decoding.decoders import Greedy
from keras_transformer.decoding.graph import ModelGraph
from keras_transformer.decoding.layers import padding_name
from keras_transformer.decoding.program import DecodingProgram
from keras_transformer.decoding.prompts import read_prompts
from keras_transformer.decoding.verify import CachedCheck
from keras_transformer.masks import MaskData

# Compiled programs live as long as their model, and are made anew when its
# weights change in number, shape or type (quantisation, adapters).
_programs = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns, as NumPy arrays.

    Attributes:
        tokens: int32 (batch, longest), prompt and new tokens, padded on the
            right with `pad_id`.
        lengths: int32 (batch,), tokens of each row, the prompt and the stop
            token counted.
        finish_reasons: A list with `"stop"` or `"length"` for each row.
        log_probs: float32 (batch, longest), the log-probability of each new
            token under the model's own distribution, 0 elsewhere; None
            unless asked for.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish_reasons: list
    log_probs: np.ndarray | None = None


def generate(
    model,
    prompts,
    *,
    max_new_tokens: int,
    decoder=None,
    stop=(),
    seed: int = 0,
    row_ids=None,
    start_token: int | None = None,
    pad_id: int = 0,
    return_log_probs: bool = False,
) -> GenerationResult:
    """Continues prompts token by token, cached and compiled.

    The model needs no cache code: each attention layer of this library keeps
    its keys and values, and applies the mask it trains with. A row's text
    depends neither on the other rows nor on padding.

    JAX and TensorFlow compile once for each bucket of lengths; PyTorch runs
    step by step. Before the first use of a model its cached path is compared
    with an ordinary call, so that a layer which mixes positions in a way that
    cannot be cached is found.

    Args:
        model: A functional or sequential `keras.Model` from int32 tokens
            (batch, length) to logits (batch, length, vocabulary_size). With
            several inputs, one is called `"token_ids"` or
            `"decoder_token_ids"`; what does not depend on it (an encoder) is
            evaluated once.
        prompts: Rows of token ids of any lengths, or a dict from the names of
            the model's inputs to rows. Every entry is real, also a 0 at the
            end of a row of an array: pass rows without padding, or the
            encoder's padding mask. Padding masks follow from the lengths;
            `"positions"` count on from the last one, `"segment_ids"` repeat
            it, and `"prefix_length"` is the prompt's length by default.
        max_new_tokens: At most this many tokens are added to each row.
        decoder: `Greedy()`, the default, or `Sample(...)`.
        stop: Token ids that end a row; never looked for in the prompt.
        seed: Seed of the noise.
        row_ids: Integers (batch,), the rows' part of the noise; None: 0, 1,
            2, ... Whoever generates a row alone passes its id.
        start_token: The prompt of each row of an encoder-decoder that is
            given none.
        pad_id: Fills `tokens` to the right of each row.
        return_log_probs: Whether to return log-probabilities.

    Returns:
        A `GenerationResult`.

    Raises:
        ValueError: If inputs do not fit the model, prompt and new tokens
            exceed its `max_length`, or a layer cannot be decoded step by
            step; the message names the layer.

    Example:

    ```python
    result = generate(
        model, [[1, 5, 7], [2, 2]], max_new_tokens=20, decoder=Sample(top_p=0.9)
    )
    ```
    """
    checks.positive_int(max_new_tokens=max_new_tokens)
    decoder = Greedy() if decoder is None else decoder
    if isinstance(decoder, type) or not hasattr(decoder, "choose"):
        checks.fail("a decoder such as `Greedy()`", "decoder", decoder)
    if not checks.is_integer(seed) or not -(2**31) <= seed < 2**31:
        checks.fail("an integer of 32 bits", "seed", seed)
    if not checks.is_integer(pad_id):
        checks.fail("an integer", "pad_id", pad_id)
    checks.boolean(return_log_probs=return_log_probs)
    if not isinstance(model, keras.Model):
        checks.fail("a keras.Model", "model", model)
    if hasattr(model, "jax_state_sync"):
        # Inside `fit` the JAX trainer holds the newest weights.
        model.jax_state_sync()
    programs = _programs_of(model)
    graph = programs["graph"]
    prompts = read_prompts(graph, prompts, start_token)
    batch, longest = prompts.tokens.shape
    total = longest + max_new_tokens
    if graph.max_length is not None and total > graph.max_length:
        raise ValueError(
            f"Prompt and new tokens must fit the {graph.max_length} positions "
            f"of {graph.name!r}. Received: a prompt of {longest} tokens and "
            f"max_new_tokens={max_new_tokens}."
        )
    settings = {
        "seed": np.int32(seed),
        "row_ids": _row_ids(row_ids, batch),
        "stop": _stop_tokens(stop),
    }
    watched = programs["watched"]
    if watched is None:
        check = CachedCheck(model, graph, prompts)
        watched = check.watched
    for path, mask in watched:
        _check_mask(path, mask, prompts, total)
    if programs["watched"] is None:
        check.compare()
        programs["watched"] = watched
    program = _program(programs, model, decoder, total)
    state = program.run(_bucketed(prompts, graph), settings, max_new_tokens)
    return _result(state, pad_id, return_log_probs)


def _programs_of(model):
    signature = [(id(v), tuple(v.shape), str(v.dtype)) for v in model.variables]
    programs = _programs.get(model)
    if programs is None or programs["signature"] != signature:
        programs = {
            "signature": signature,
            "graph": ModelGraph(model),
            "watched": None,
            "compiled": {},
        }
        _programs[model] = programs
    return programs


def _program(programs, model, decoder, total):
    key = (decoder, _bucket(total))
    if key not in programs["compiled"]:
        programs["compiled"][key] = DecodingProgram(
            weakref.proxy(model),
            programs["graph"],
            decoder,
            key[1],
            programs["watched"],
        )
    return programs["compiled"][key]


def _bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ...: one program serves them all."""
    size = 16
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def _bucketed(prompts, graph):
    """The prompts, padded so that few lengths are compiled."""
    if backend.RUNS_STEP_BY_STEP:
        return prompts

    def widened(array, limit):
        length = array.shape[1]
        wanted = min(_bucket(length), limit or math.inf)
        return np.pad(array, ((0, 0), (0, max(wanted, length) - length)))

    static = dict(prompts.static)
    for name, array in prompts.static.items():
        mask_name = padding_name(name)
        is_hidden = mask_name in static or graph.masks_zero(name)
        if mask_name is not None and is_hidden and array.ndim == 2:
            for part in {name, mask_name} & set(static):
                static[part] = widened(static[part], graph.static_max_length)
    limit = graph.max_length
    return dataclasses.replace(
        prompts,
        tokens=widened(prompts.tokens, limit),
        growing={k: widened(v, limit) for k, v in prompts.growing.items()},
        static=static,
    )


def _check_mask(path, mask, prompts, total):
    """Raises if a new token would be seen by one before it."""
    lengths = prompts.lengths
    prefixes = prompts.static.get("prefix_length")
    if "prefix_length" not in mask.data_names or prefixes is None:
        cases = [(int(lengths.min()), MaskData())]
    else:
        cases = [
            (int(length), MaskData(prefix_length=np.int32(prefix)))
            for length, prefix in zip(lengths, prefixes, strict=True)
        ]
    for length, data in cases:
        if looks_ahead(mask, length, total, data):
            raise ValueError(both_ways(path, mask))
        queries = np.arange(length)
        may_any, _ = mask.tile(queries, queries + 1, length, total, data)
        if np.any(may_any):
            raise ValueError(
                f"The mask {mask!r} of layer {path!r} lets tokens of the "
                f"prompt see new tokens: its prefix is longer than the prompt "
                f"of {length} tokens. Pass a prompt as long as the prefix, or "
                "a shorter `prefix_length`."
            )


def _row_ids(row_ids, batch):
    row_ids = np.arange(batch) if row_ids is None else np.asarray(row_ids)
    if (
        row_ids.shape != (batch,)
        or row_ids.dtype.kind not in "iu"
        or not -(2**31) <= row_ids.min() <= row_ids.max() < 2**31
    ):
        checks.fail(
            f"integers of 32 bits of shape ({batch},), one for each row",
            "row_ids",
            row_ids,
        )
    return row_ids.astype("int32")


def _stop_tokens(stop):
    try:
        tokens = [stop] if checks.is_integer(stop) else list(stop)
    except TypeError:
        tokens = [stop]
    if not all(checks.is_integer(t) and 0 <= t < 2**31 for t in tokens):
        checks.fail("a token id or a sequence of token ids", "stop", stop)
    # No token is -1: programs are compiled for few numbers of stop tokens.
    return np.array(tokens + [-1] * (8 - len(tokens) % 8), "int32")


def _result(state, pad_id, return_log_probs):
    lengths = state["lengths"]
    longest = int(lengths.max())
    is_token = np.arange(longest)[None] < lengths[:, None]
    return GenerationResult(
        tokens=np.where(is_token, state["tokens"][:, :longest], pad_id).astype(
            "int32"
        ),
        lengths=lengths,
        finish_reasons=[
            "stop" if is_stopped else "length"
            for is_stopped in state["is_stopped"]
        ],
        log_probs=state["log_probs"][:, :longest] if return_log_probs else None,
    )
