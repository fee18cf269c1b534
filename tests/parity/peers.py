"""Copies the weights of other libraries, and compares what comes out.

Weights are told apart by the ends of their paths, such as `query/kernel`.
"""

import numpy as np

from tests.numerics import assert_close, to_numpy

# KerasHub's names of the parts of a block, and ours.
_KERAS_HUB_PARTS = {
    "self_attention_layer": "self_attention",
    "attention_output": "output",
    "self_attention_layer_norm": "attention_branch/norm",
    "cross_attention_layer_norm": "cross_attention_branch/norm",
    "feedforward_layer_norm": "feed_forward_branch/norm",
    "feedforward_intermediate_dense": "feed_forward/up",
    "feedforward_output_dense": "feed_forward/down",
}


def assert_same(ours, theirs):
    """Asserts that the outputs of two layers of this backend agree."""
    assert_close(ours, to_numpy(theirs))


def assign(layer, values):
    """Gives each weight of `layer` its value, and uses each value once.

    Args:
        layer: A built layer.
        values: The end of a weight's path to an array with as many elements:
            kernels that have an axis of heads are flattened.
    """
    values = dict(values)
    for weight in layer.weights:
        (name,) = [n for n in values if weight.path.endswith("/" + n)]
        weight.assign(np.reshape(values.pop(name), weight.shape))
    assert not values, f"weights without a place: {list(values)}"


def copy_from_keras(ours, theirs):
    """Copies an attention layer or a block of Keras or KerasHub."""
    values = {}
    for weight, value in zip(theirs.weights, theirs.get_weights(), strict=True):
        parts = weight.path[weight.path.index(theirs.name + "/") :]
        parts = parts.split("/")[1:]
        name = "/".join(_KERAS_HUB_PARTS.get(part, part) for part in parts)
        values[name] = value
    assign(ours, values)


def copy_from_torch(ours, theirs):
    """Copies a Transformer layer of PyTorch."""
    state = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    attentions = {"self_attn": "self_attention"}
    norms = ["attention_branch", "feed_forward_branch"]
    if "multihead_attn.in_proj_weight" in state:
        attentions["multihead_attn"] = "cross_attention"
        norms.insert(1, "cross_attention_branch")
    values = {}
    for source, target in attentions.items():
        # One matrix holds queries, keys and values, one after another.
        kernels = np.split(state[f"{source}.in_proj_weight"], 3)
        biases = np.split(state[f"{source}.in_proj_bias"], 3)
        for part, kernel, bias in zip(
            ("query", "key", "value"), kernels, biases, strict=True
        ):
            values[f"{target}/{part}/kernel"] = kernel.T
            values[f"{target}/{part}/bias"] = bias
        values |= _dense(state, f"{source}.out_proj", f"{target}/output")
    values |= _dense(state, "linear1", "feed_forward/up")
    values |= _dense(state, "linear2", "feed_forward/down")
    for index, target in enumerate(norms, start=1):
        values[f"{target}/norm/gamma"] = state[f"norm{index}.weight"]
        values[f"{target}/norm/beta"] = state[f"norm{index}.bias"]
    assign(ours, values)


def _dense(state, source, target):
    return {
        f"{target}/kernel": state[f"{source}.weight"].T,
        f"{target}/bias": state[f"{source}.bias"],
    }
