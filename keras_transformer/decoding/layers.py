"""What the layers of a model tell about it.

Keras gives access to a graph and to sub-layers by private names only.
"""

import contextlib

import keras


def padding_name(name: str) -> str | None:
    """The name of the padding mask that belongs to an input of tokens."""
    if "token_ids" not in name:
        return None
    return name.replace("token_ids", "padding_mask")


def calls_of(functional):
    """The calls of a functional model, in an order in which they can run."""
    return [
        node
        for _, nodes in sorted(functional._nodes_by_depth.items(), reverse=True)
        for node in nodes
        if not node.is_input
    ]


def readers_of(nodes, tensor):
    """The operations that read a tensor, in nested models those inside."""
    for node in nodes:
        if not any(read is tensor for read in node.input_tensors):
            continue
        inner = getattr(node.operation, "_functional", node.operation)
        if not hasattr(inner, "_nodes_by_depth"):
            yield node.operation
            continue
        for outside, inside in zip(
            node.input_tensors, inner.inputs, strict=False
        ):
            if outside is tensor:
                yield from readers_of(calls_of(inner), inside)


def layers_of(nodes) -> list:
    """All layers that the calls run, at any depth."""
    layers = {}
    for node in nodes:
        if isinstance(node.operation, keras.layers.Layer):
            for layer in node.operation._flatten_layers():
                layers[id(layer)] = layer
    return list(layers.values())


def max_length_of(nodes) -> int | None:
    """The smallest number of positions that the layers take, or None."""
    limits = [getattr(layer, "max_length", None) for layer in layers_of(nodes)]
    return min((n for n in limits if isinstance(n, int)), default=None)


@contextlib.contextmanager
def without_remat(layers):
    """Runs layers without rematerialisation.

    It would serve no gradient here, and caches cannot leave its trace.
    """
    modes = [
        (layer, layer._remat_mode)
        for layer in layers
        if getattr(layer, "_remat_mode", None) is not None
    ]
    try:
        for layer, _ in modes:
            layer._remat_mode = None
        yield
    finally:
        for layer, mode in modes:
            layer._remat_mode = mode
