"""A functional model as a list of operations that can be run in parts."""

import keras
from keras import ops

from keras_transformer.blocks import Unembedding
from keras_transformer.decoding.layers import (
    calls_of,
    layers_of,
    max_length_of,
    padding_name,
    readers_of,
    without_remat,
)

_TOKEN_NAMES = ("decoder_token_ids", "token_ids")


class _MaskCarrier(keras.layers.Layer):
    """Reads and attaches the mask that Keras carries on a tensor."""

    def __init__(self):
        super().__init__(name="mask_carrier", autocast=False)
        self.supports_masking = True
        self.built = True

    def call(self, inputs, mask=None):
        self._seen = [mask]
        return inputs

    def mask_of(self, tensor):
        """The mask on `tensor`, or None."""
        self(tensor)
        (mask,) = self._seen
        self._seen = None
        return mask


class ModelGraph:
    """The operations of a functional model, sorted by what they depend on.

    Args:
        model: A functional or sequential `keras.Model` with one output,
            (batch, length, vocabulary_size).

    Raises:
        ValueError: If the model is of another kind, or if it is not clear
            which input holds the generated tokens.
    """

    def __init__(self, model):
        self.name = model.name
        # Keras gives access to a graph by these private names only.
        functional = getattr(model, "_functional", None) or model
        if not hasattr(functional, "_nodes_by_depth"):
            raise ValueError(
                "`model` must be a functional or sequential keras.Model. "
                f"Received: {type(model).__name__} {model.name!r}. Compose it "
                "by `keras.Model(inputs, outputs)`; begin a `Sequential` with "
                "`keras.Input`."
            )
        self.nodes = calls_of(functional)
        self.inputs = _named_inputs(functional)
        self.token_input = _token_input(model, self.inputs)
        if len(functional.outputs) != 1:
            raise ValueError(
                "`model` must have one output, the logits. Received: "
                f"{model.name!r} with {len(functional.outputs)} outputs."
            )
        (self.output,) = functional.outputs
        if len(self.output.shape) != 3:
            raise ValueError(
                "`model` must map tokens to logits of shape (batch, length, "
                f"vocabulary_size). Received: {model.name!r} with output "
                f"shape {self.output.shape}."
            )
        self._split()
        self._cut = self._tail_input()
        self._carrier = _MaskCarrier()
        # Name of the operation that runs, and all tensors of the last run.
        self.running = self.last_tensors = None

    def _split(self):
        # Inputs with one value per generated token.
        growing = [
            self.token_input,
            padding_name(self.token_input),
            "segment_ids",
            "positions",
        ]
        grown = {
            id(tensor)
            for name, tensor in self.inputs.items()
            if name in growing
        }
        self.static_nodes, self.growing_nodes = [], []
        for node in self.nodes:
            if any(id(tensor) in grown for tensor in node.input_tensors):
                grown.update(id(tensor) for tensor in node.outputs)
                self.growing_nodes.append(node)
            else:
                self.static_nodes.append(node)
        if id(self.output) not in grown:
            raise ValueError(
                f"The output of {self.name!r} does not depend on its input "
                f"{self.token_input!r}."
            )
        self.growing_inputs = [
            name for name, tensor in self.inputs.items() if id(tensor) in grown
        ]
        self.static_inputs = [
            name for name in self.inputs if name not in self.growing_inputs
        ]
        # What the growing part reads of the static one.
        self.frontier = list(
            {
                id(tensor): tensor
                for node in self.growing_nodes
                for tensor in node.input_tensors
                if id(tensor) not in grown
            }.values()
        )

    def _tail_input(self):
        """The tensor from which on the model treats each position alone.

        Only its last position is needed in order to choose a token. None when
        the end of the model is not of a known form.
        """
        producers = {
            id(tensor): node for node in self.nodes for tensor in node.outputs
        }
        last = producers[id(self.output)]
        if not isinstance(last.operation, Unembedding | keras.layers.Dense):
            return None
        cut, tail = last.input_tensors[0], {id(last)}
        for node in self.nodes:
            is_read = any(
                node.outputs[0] is tensor for tensor in last.input_tensors
            )
            if is_read and node.arguments.kwargs.get("table"):
                tail.add(id(node))
        while True:
            readers = {
                id(node)
                for node in self.nodes
                if any(tensor is cut for tensor in node.input_tensors)
            }
            if not readers <= tail:
                return None
            node = producers.get(id(cut))
            if node is None or not _is_feature_norm(node.operation):
                return cut
            before = node.input_tensors[0]
            others = [
                other
                for other in self.nodes
                if other is not node
                and any(tensor is before for tensor in other.input_tensors)
            ]
            if others:
                return cut
            cut, tail = before, {id(node)}

    def is_padding(self, name: str) -> bool:
        """Whether an input says which generated tokens are real."""
        return name == padding_name(self.token_input)

    def readers(self, name: str) -> list:
        """The operations that read an input, also in nested models."""
        return list(readers_of(self.nodes, self.inputs[name]))

    def masks_zero(self, name: str) -> bool:
        """Whether an embedding treats token 0 of an input as padding."""
        return any(
            getattr(reader, "mask_zero", False) for reader in self.readers(name)
        )

    def vocabulary_size(self, name: str) -> int | None:
        """Number of tokens that an input admits, where it is known."""
        for reader in self.readers(name):
            for attribute in ("vocabulary_size", "input_dim"):
                if isinstance(getattr(reader, attribute, None), int):
                    return getattr(reader, attribute)
        return None

    @property
    def max_length(self) -> int | None:
        """The smallest number of positions for tokens, or None."""
        return max_length_of(self.growing_nodes)

    @property
    def static_max_length(self) -> int | None:
        """The same of what does not depend on the tokens."""
        return max_length_of(self.static_nodes)

    @property
    def layers(self) -> list:
        """All layers of the model, at any depth."""
        return layers_of(self.nodes)

    def run_static(self, inputs: dict):
        """Evaluates what does not depend on the generated tokens.

        Args:
            inputs: Name to tensor, for `static_inputs`.

        Returns:
            A list of (tensor, Keras mask or None) for the growing part.
        """
        tensors = {
            id(self.inputs[name]): inputs[name] for name in self.static_inputs
        }
        self._run(self.static_nodes, tensors)
        return [
            (tensor, self._carrier.mask_of(tensor))
            for tensor in (tensors[id(symbol)] for symbol in self.frontier)
        ]

    def run_growing(self, inputs: dict, static, scope, *, last=None):
        """Runs the rest of the model on a piece of the tokens.

        Args:
            inputs: Name to tensor, for the inputs that grow.
            static: What `run_static` returned.
            scope: The decoding scope, or None for an ordinary call.
            last: int32 (batch,), the position whose logits are wanted, or
                None for all.

        Returns:
            Logits (batch, length, vocabulary_size), where the length is 1
            with `last`.
        """
        tensors = {id(self.inputs[name]): inputs[name] for name in inputs}
        for symbol, (tensor, mask) in zip(self.frontier, static, strict=True):
            if mask is not None:
                tensor = self._carrier(tensor, mask=mask)
            tensors[id(symbol)] = tensor
            if scope is not None:
                scope.mark_static(tensor)
        cut = self._cut if last is not None else None
        lean = scope is not None and scope.lean
        with without_remat(self.layers):
            for node in self.growing_nodes:
                self._run([node], tensors, lean)
                if cut is not None and any(cut is out for out in node.outputs):
                    tensors[id(cut)] = _at(tensors[id(cut)], last)
        self.last_tensors = tensors
        logits = tensors[id(self.output)]
        if last is not None and cut is None:
            logits = _at(logits, last)
        return logits

    def _run(self, nodes, tensors, lean=False):
        for node in nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            operation = node.operation
            self.running = operation.name
            outputs = (operation.call if lean else operation)(*args, **kwargs)
            for symbol, tensor in zip(
                node.outputs, keras.tree.flatten(outputs), strict=True
            ):
                tensors[id(symbol)] = tensor


def _at(tensor, position):
    """`tensor[row, position[row]]`, keeping the axis."""
    index = ops.reshape(position, (-1, 1, 1))
    return ops.take_along_axis(tensor, index, axis=1)


def _is_feature_norm(operation):
    if isinstance(operation, keras.layers.RMSNormalization):
        return operation.axis in (-1, [-1], (-1,))
    if isinstance(operation, keras.layers.LayerNormalization):
        return operation.axis in (-1, [-1], (-1,), 2, [2])
    return False


def _named_inputs(functional):
    structure = functional._inputs_struct
    if isinstance(structure, dict):
        return dict(structure)
    return {tensor.name: tensor for tensor in functional.inputs}


def _token_input(model, inputs):
    if len(inputs) == 1:
        return next(iter(inputs))
    for name in _TOKEN_NAMES:
        if name in inputs:
            return name
    raise ValueError(
        f"One input of {model.name!r} must be called "
        f"{' or '.join(map(repr, _TOKEN_NAMES))}, to tell which holds the "
        f"generated tokens. Received: inputs {list(inputs)}."
    )
