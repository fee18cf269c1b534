"""Encoder and decoder blocks in NumPy, written from the formulas."""

import numpy as np

from tests.reference.attention import multi_head


def weights_of(layer):
    """Path below the layer to float64 array."""
    return {
        weight.path.split("/", 1)[1]: np.asarray(value, "float64")
        for weight, value in zip(
            layer.weights, layer.get_weights(), strict=True
        )
    }


def part_of(weights, name):
    """The weights of one part, by their paths below it."""
    prefix = f"{name}/"
    return {
        path.removeprefix(prefix): value
        for path, value in weights.items()
        if path.startswith(prefix)
    }


def norm(weights, name, inputs, epsilon=1e-5):
    """LayerNorm where there is a `beta`, else RMSNorm."""
    gains = part_of(weights, name)
    if "beta" in gains:
        mean = inputs.mean(-1, keepdims=True)
        variance = ((inputs - mean) ** 2).mean(-1, keepdims=True)
        outputs = (inputs - mean) / np.sqrt(variance + epsilon)
        return outputs * gains["gamma"] + gains["beta"]
    square = (inputs**2).mean(-1, keepdims=True)
    return inputs / np.sqrt(square + epsilon) * gains["scale"]


def feed_forward(weights, inputs):
    """ReLU, or SwiGLU where there is a gate."""

    def project(name, values):
        return values @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    hidden = project("up", inputs)
    if "gate/kernel" in weights:
        gate = project("gate", inputs)
        hidden = gate / (1 + np.exp(-gate)) * hidden
    else:
        hidden = np.maximum(hidden, 0)
    return project("down", hidden)


def block(weights, placement, stream, sublayers):
    """Passes the stream through sub-layers.

    Args:
        weights: As `weights_of` gives them.
        placement: Where the norms go.
        stream: (batch, length, model_dim).
        sublayers: Pairs of a branch name and a function.
    """
    if placement == "parallel":
        shared = norm(weights, "norm", stream)
        return stream + sum(
            scaled(weights, branch, function(shared))
            for branch, function in sublayers
        )
    for branch, function in sublayers:
        before, after = f"{branch}/norm", f"{branch}/output_norm"
        if placement == "pre":
            outputs = function(norm(weights, before, stream))
            stream = stream + scaled(weights, branch, outputs)
        elif placement == "post":
            outputs = scaled(weights, branch, function(stream))
            stream = norm(weights, before, stream + outputs)
        elif placement == "sandwich":
            outputs = function(norm(weights, before, stream))
            outputs = norm(weights, after, outputs)
            stream = stream + scaled(weights, branch, outputs)
    return stream


def scaled(weights, branch, outputs):
    return outputs * weights.get(f"{branch}/layer_scale", 1.0)


def encoder_block(weights, placement, inputs, *, num_heads, allowed=None):
    """The encoder block; `allowed` as in `attention`."""
    own, network = (
        part_of(weights, name) for name in ("self_attention", "feed_forward")
    )
    return block(
        weights,
        placement,
        inputs.astype("float64"),
        [
            (
                "attention_branch",
                lambda x: multi_head(
                    own, x, x, num_heads=num_heads, allowed=allowed
                )[0],
            ),
            ("feed_forward_branch", lambda x: feed_forward(network, x)),
        ],
    )


def decoder_block(
    weights,
    placement,
    inputs,
    encoded,
    *,
    num_heads,
    allowed=None,
    encoder_allowed=None,
):
    """The decoder block, causal whatever `allowed` adds."""
    length = inputs.shape[1]
    causal = np.tril(np.ones((length, length), bool))
    allowed = causal if allowed is None else causal & allowed
    own, cross, network = (
        part_of(weights, name)
        for name in ("self_attention", "cross_attention", "feed_forward")
    )

    def attend(x):
        return multi_head(own, x, x, num_heads=num_heads, allowed=allowed)[0]

    def attend_across(x):
        return multi_head(
            cross,
            x,
            encoded.astype("float64"),
            num_heads=num_heads,
            allowed=encoder_allowed,
        )[0]

    return block(
        weights,
        placement,
        inputs.astype("float64"),
        [
            ("attention_branch", attend),
            ("cross_attention_branch", attend_across),
            ("feed_forward_branch", lambda x: feed_forward(network, x)),
        ],
    )
