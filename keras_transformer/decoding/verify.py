"""The check that a model's cached path equals an ordinary call."""

import keras
import numpy as np
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer._internal.decoding_scope import DecodingScope

# Tokens of the prompt that the check reads at once, and those that it adds: no
# more than any call of `generate` has.
_READ, _ADDED = 5, 1
# Relative to the norm of an operation's output.
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}


class CachedCheck:
    """The start of the first prompt, run with and without caches.

    A mask that looks ahead has the whole prompt read at once, since a prefix
    is prefilled in one piece.

    Args:
        model: The model.
        graph: Its `ModelGraph`.
        prompts: The caller's `Prompts`.

    Raises:
        ValueError: If an operation fails with caches; the message names it.
    """

    def __init__(self, model, graph, prompts):
        self._graph, self._variables = graph, model.variables
        length = int(prompts.lengths[0])
        read = min(length, _READ)
        others = [v.shape[1] for v in prompts.static.values() if v.ndim > 1]
        while read in others and read > 2:
            # Another length tells the tokens from another sequence.
            read -= 1
        self._take(prompts, read)
        self._pieces, self.watched = self._cached()
        if length > read and any(m.lookahead != 0 for _, m in self.watched):
            self._take(prompts, length)
            self._pieces, self.watched = self._cached()

    def _take(self, prompts, read):
        self._lengths = [read] + [1] * _ADDED
        prompt = prompts.tokens[0, :read]
        inputs = {}
        for name in self._graph.growing_inputs:
            if name == self._graph.token_input:
                value = np.resize(prompt, read + _ADDED)
            elif self._graph.is_padding(name):
                value = np.ones(read + _ADDED, bool)
            else:
                start = prompts.growing[name][0, :read]
                new = np.full(_ADDED, start[-1])
                if name == "positions":
                    new = new + 1 + np.arange(_ADDED, dtype="int32")
                value = np.concatenate([start, new])
            inputs[name] = value[None]
        self._inputs = inputs
        self._static_inputs = {k: v[:1] for k, v in prompts.static.items()}

    def _cached(self):
        """Outputs of a first piece and of single steps, and the masks."""
        watched = []

        def run(static_inputs, inputs):
            static = self._graph.run_static(static_inputs)
            caches, outputs, start = {}, [], 0
            for length in self._lengths:
                stop = start + length
                slots = np.arange(start, stop, dtype="int32")[None]
                scope = DecodingScope(
                    ops.convert_to_tensor(slots),
                    caches,
                    capacity=sum(self._lengths),
                )
                piece = {k: v[:, start:stop] for k, v in inputs.items()}
                with scope:
                    outputs.append(self._outputs(piece, static, scope))
                caches, start = scope.new_caches, stop
                watched[:] = scope.watched
            return outputs

        try:
            return self._run(run), watched
        except Exception as error:
            message = self._message("fails", reason=str(error))
            # A model that fails anyway speaks for itself.
            self._whole()
            raise ValueError(message) from error

    def _whole(self):
        """Outputs of one ordinary call."""

        def run(static_inputs, inputs):
            static = self._graph.run_static(static_inputs)
            return self._outputs(inputs, static, None)

        return self._run(run)

    def compare(self):
        """Compares cached steps with one call, operation by operation.

        Raises:
            ValueError: If an operation gives other results with caches; the
                message names the first.
        """
        nodes = self._graph.growing_nodes
        symbols = [(node, symbol) for node in nodes for symbol in node.outputs]
        length = sum(self._lengths)
        suspect = None
        for (node, symbol), expected, *pieces in zip(
            symbols, self._whole(), *self._pieces, strict=True
        ):
            name = node.operation.name
            varies = any(piece.shape != expected.shape for piece in pieces)
            is_per_token = (
                varies and expected.ndim > 1 and expected.shape[1] == length
            )
            if not is_per_token and symbol is not self._graph.output:
                # Such as the table of a tied de-embedding, which is one for
                # all tokens. Another shape that varies may come to its own.
                suspect = suspect or (name if varies else None)
                continue
            shapes = [
                (*expected.shape[:1], part, *expected.shape[2:])
                for part in self._lengths
            ]
            if not is_per_token or [piece.shape for piece in pieces] != shapes:
                raise ValueError(
                    self._message("has another shape", suspect or name)
                )
            if not _is_close(np.concatenate(pieces, axis=1), expected):
                raise ValueError(self._message("gives other results", name))

    def _outputs(self, inputs, static, scope):
        self._graph.run_growing(inputs, static, scope)
        tensors = self._graph.last_tensors
        return [
            tensors[id(symbol)]
            for node in self._graph.growing_nodes
            for symbol in node.outputs
        ]

    def _run(self, function):
        def with_weights(weights, *args):
            if not weights:
                return function(*args)
            mapping = list(zip(self._variables, weights, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*args)

        weights = []
        if backend.TAKES_WEIGHTS:
            weights = [variable.value for variable in self._variables]
        arguments = keras.tree.map_structure(
            ops.convert_to_tensor, (self._static_inputs, self._inputs)
        )
        with backend.no_gradients():
            outputs = backend.for_one_run(with_weights)(weights, *arguments)
        return keras.tree.map_structure(ops.convert_to_numpy, outputs)

    def _message(self, what, name=None, reason=None):
        name = name or self._graph.running
        message = (
            f"{self._graph.name!r} cannot be decoded with caches: its "
            f"operation {name!r} {what} when tokens come one by one. "
        )
        if reason is not None:
            message += f"The reason: {reason}\n"
        return message + (
            "An operation that mixes positions in a way that only the whole "
            "sequence allows (as a convolution, a pooling or another library's "
            "attention does) must be replaced by a layer of keras_transformer, "
            "or applied to each position alone."
        )


def _is_close(actual, expected):
    dtype = str(expected.dtype)
    if dtype not in _TOLERANCE:
        return np.array_equal(actual, expected)
    actual, expected = actual.astype("float64"), expected.astype("float64")
    # Infinite logits say what is never chosen; they must only be the same.
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    actual, expected = np.where(same, 0, actual), np.where(same, 0, expected)
    error = np.linalg.norm(actual - expected)
    return error <= _TOLERANCE[dtype] * max(np.linalg.norm(expected), 1e-6)
