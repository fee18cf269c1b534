"""Compiled decoding of one model: prefill, then one token after another."""

import keras
import numpy as np
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer._internal.decoding_scope import DecodingScope


class DecodingProgram:
    """Runs a model's graph with caches, one decoder and one cache capacity.

    The functions are compiled for shapes only: token counts, stop tokens,
    seeds and weights are arguments.

    Args:
        model: The model; its weights are read at each call.
        graph: Its `ModelGraph`.
        decoder: Chooses tokens from logits.
        capacity: Number of slots of a row.
        watched: Pairs of a path and a mask, as `CachedCheck` found them: the
            layers that attend over generated tokens.
    """

    def __init__(self, model, graph, decoder, capacity: int, watched: list):
        self._variables = model.variables
        self._graph = graph
        self._decoder = decoder
        self._capacity = capacity
        self._watched = watched
        self._lean = backend.RUNS_STEP_BY_STEP and _is_lean(graph)
        self._prepare = backend.compiled(self._with_weights(graph.run_static))
        self._prefill = backend.compiled(self._with_weights(self._first_token))
        self._loop = backend.compiled(
            self._with_weights(self._next_tokens), donated=2
        )

    def run(self, prompts, settings: dict, max_new_tokens: int) -> dict:
        """Generates.

        Args:
            prompts: `Prompts`, padded to a bucket.
            settings: `"seed"` and `"row_ids"` of the noise, and `"stop"`,
                int32 (any number,).
            max_new_tokens: At most this many tokens are added to each row.

        Returns:
            The state after the last step, as NumPy arrays.
        """
        weights = [variable.value for variable in self._variables]
        if not backend.TAKES_WEIGHTS:
            weights = []
        tensors = keras.tree.map_structure(ops.convert_to_tensor, settings)
        limit = ops.convert_to_tensor(np.int32(max_new_tokens))
        with backend.no_gradients():
            static = self._prepare(weights, _tensors(prompts.static))
            rows = {
                "tokens": prompts.tokens,
                "lengths": prompts.lengths,
                **{f"growing/{k}": v for k, v in prompts.growing.items()},
            }
            state = self._prefill(weights, static, _tensors(rows), tensors)
            state = self._loop(weights, static, state, tensors, limit)
        return {
            name: ops.convert_to_numpy(value)
            for name, value in state.items()
            if name != "caches"
        }

    def _with_weights(self, function):
        """The function with the weights as its first argument."""

        def run(weights, *args):
            if not weights:
                return function(*args)
            mapping = zip(self._variables, weights, strict=True)
            with keras.StatelessScope(state_mapping=list(mapping)):
                return function(*args)

        return run

    def _first_token(self, static, rows, settings):
        """Reads the prompts and chooses the first new token of each row."""
        tokens, lengths = rows["tokens"], rows["lengths"]
        batch, longest = tokens.shape
        counted = ops.arange(longest, dtype="int32")[None]
        is_real = counted < lengths[:, None]
        scope = DecodingScope(
            ops.where(is_real, counted, -1),
            {},
            capacity=self._capacity,
            ragged=True,
            in_place=backend.RUNS_STEP_BY_STEP,
            lean=self._lean,
        )
        inputs = {self._graph.token_input: tokens}
        ends = {}
        for name in self._graph.growing_inputs:
            if self._graph.is_padding(name):
                inputs[name] = is_real
            elif name != self._graph.token_input:
                inputs[name] = rows[f"growing/{name}"]
                index = (lengths - 1)[:, None]
                ends[name] = ops.take_along_axis(inputs[name], index, 1)[:, 0]
        with scope:
            logits = self._graph.run_growing(
                inputs, static, scope, last=lengths - 1
            )
        self._check_watched(scope)
        room = self._capacity - longest
        zeros = ops.zeros((batch, self._capacity), "float32")
        state = {
            "tokens": ops.pad(tokens, ((0, 0), (0, room))),
            "lengths": lengths,
            "prompt_lengths": lengths,
            "is_done": ops.zeros((batch,), "bool"),
            "is_stopped": ops.zeros((batch,), "bool"),
            "log_probs": zeros,
            "count": ops.zeros((), "int32"),
            "caches": scope.new_caches,
            **{f"end/{name}": value for name, value in ends.items()},
        }
        return self._accept(state, logits, settings)

    def _next_tokens(self, static, state, settings, limit):
        """Adds tokens until every row is done or the limit is reached."""

        def goes_on(state):
            return ops.logical_and(
                state["count"] < limit,
                ops.logical_not(ops.all(state["is_done"])),
            )

        def step(state):
            return self._accept(
                *self._one_step(static, state, settings), settings
            )

        return backend.while_loop(goes_on, step, state)

    def _one_step(self, static, state, settings):
        slots = state["lengths"] - 1
        inputs = {}
        for name in self._graph.growing_inputs:
            if name == self._graph.token_input:
                value = ops.take_along_axis(state["tokens"], slots[:, None], 1)
            elif self._graph.is_padding(name):
                value = ops.ones(ops.shape(slots)[:1], "bool")[:, None]
            else:
                value = state[f"end/{name}"][:, None]
                if name == "positions":
                    value = (
                        value + (slots - state["prompt_lengths"] + 1)[:, None]
                    )
            inputs[name] = value
        used = None
        if backend.RUNS_STEP_BY_STEP:
            used = int(ops.max(state["lengths"]))
        scope = DecodingScope(
            slots[:, None],
            state["caches"],
            capacity=self._capacity,
            in_place=backend.RUNS_STEP_BY_STEP,
            lean=self._lean,
            used=used,
        )
        with scope:
            logits = self._graph.run_growing(inputs, static, scope)
        self._check_watched(scope)
        return {**state, "caches": scope.new_caches}, logits

    def _check_watched(self, scope):
        """Raises if an attention takes another sequence for the tokens."""
        for path, mask in scope.watched:
            if (path, mask) not in self._watched:
                raise ValueError(
                    f"Layer {path!r} attends to a sequence of which it cannot "
                    "be told whether it grows with the tokens, because it is "
                    "as long as they are. Compute it outside of the layer that "
                    "holds the attention, as an operation of the model."
                )

    def _accept(self, state, logits, settings):
        """Chooses a token for each row and appends it to those not done."""
        lengths, is_done = state["lengths"], state["is_done"]
        token, log_prob = self._decoder.choose(
            ops.cast(logits[:, 0], "float32"),
            seed=settings["seed"],
            row_ids=settings["row_ids"],
            positions=lengths,
        )
        token = ops.cast(token, "int32")
        places = ops.arange(self._capacity, dtype="int32")[None]
        is_new = ops.logical_and(
            places == lengths[:, None], ops.logical_not(is_done)[:, None]
        )
        is_stop = ops.logical_and(
            ops.any(token[:, None] == settings["stop"][None], axis=1),
            ops.logical_not(is_done),
        )
        return {
            **state,
            "tokens": ops.where(is_new, token[:, None], state["tokens"]),
            "log_probs": ops.where(
                is_new, log_prob[:, None], state["log_probs"]
            ),
            "lengths": lengths + ops.cast(ops.logical_not(is_done), "int32"),
            "is_done": ops.logical_or(is_done, is_stop),
            "is_stopped": ops.logical_or(state["is_stopped"], is_stop),
            "count": state["count"] + 1,
        }


def _tensors(arrays):
    return {k: ops.convert_to_tensor(v) for k, v in arrays.items()}


def _is_lean(graph):
    """Whether `Layer.__call__` does nothing that a step needs.

    It carries implicit masks, casts under mixed precision, and runs another
    function where weights are quantised.
    """
    return not any(
        isinstance(layer, keras.Model | keras.layers.Masking)
        or getattr(layer, "mask_zero", False)
        or layer.compute_dtype != layer.variable_dtype
        or layer.quantization_mode is not None
        for layer in graph.layers
    )
