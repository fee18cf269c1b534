"""Feed-forward networks, forward and backward, beside plain layers.

    KERAS_BACKEND=jax python benchmarks/feed_forward.py [--quick]

The peers compute the same from Keras's `Dense` layers, and, on PyTorch, from
`torch.nn`'s. The peer of the mixture computes all experts for all tokens, as
is simplest. Ratios above 1 are in our favour.
"""

import execution
import keras
from keras import ops
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import FeedForward, GatedFeedForward, MixtureOfExperts

NUM_EXPERTS, TOP_K = 8, 2


class Gated(keras.layers.Layer):
    """A gated network of Keras's layers."""

    def __init__(self, intermediate, width):
        super().__init__()
        self.gate = keras.layers.Dense(intermediate, activation="silu")
        self.up = keras.layers.Dense(intermediate)
        self.down = keras.layers.Dense(width)

    def build(self, shape):
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.gate.units))

    def call(self, inputs):
        return self.down(self.gate(inputs) * self.up(inputs))


class AllExperts(keras.layers.Layer):
    """A mixture that computes every expert and weighs most by zero."""

    def __init__(self, intermediate, width):
        super().__init__()
        self.shapes = (width, intermediate), (intermediate, width)

    def build(self, shape):
        into, out = self.shapes
        self.router = self.add_weight(shape=(shape[-1], NUM_EXPERTS))
        self.gate = self.add_weight(shape=(NUM_EXPERTS, *into))
        self.up = self.add_weight(shape=(NUM_EXPERTS, *into))
        self.down = self.add_weight(shape=(NUM_EXPERTS, *out))

    def call(self, inputs):
        chances = ops.softmax(ops.matmul(inputs, self.router))
        best, ids = ops.top_k(chances, TOP_K)
        best /= ops.sum(best, axis=-1, keepdims=True)
        one_hot = ops.one_hot(ids, NUM_EXPERTS)
        weights = ops.einsum("blk,blke->ble", best, one_hot)
        gate = ops.silu(ops.einsum("bld,edf->blef", inputs, self.gate))
        hidden = gate * ops.einsum("bld,edf->blef", inputs, self.up)
        outputs = ops.einsum("blef,efd->bled", hidden, self.down)
        return ops.einsum("bled,ble->bld", outputs, weights)


def dense(intermediate, width):
    """A dense network of Keras's layers."""
    return keras.Sequential(
        [
            keras.layers.Dense(intermediate, activation="relu"),
            keras.layers.Dense(width),
        ]
    )


OURS = {
    "dense": lambda intermediate, _: FeedForward(intermediate),
    "gated": lambda intermediate, _: GatedFeedForward(intermediate),
    "mixture": lambda intermediate, _: MixtureOfExperts(
        NUM_EXPERTS, intermediate, top_k=TOP_K
    ),
}
PEERS = {"dense": dense, "gated": Gated, "mixture": AllExperts}


def network(layers, kind, shape, intermediate):
    """A step of one of the layers."""
    layer = {"ours": OURS, "peers": PEERS}[layers][kind](
        intermediate, shape[-1]
    )
    return execution.layer_gradient_runner(
        layer, execution.random_tensor(shape)
    )


def torchs(kind, shape, intermediate):
    """A step of `torch.nn`'s layers."""
    import torch
    from torch import nn

    class GatedModule(nn.Module):
        """A gated network."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(shape[-1], intermediate)
            self.up = nn.Linear(shape[-1], intermediate)
            self.down = nn.Linear(intermediate, shape[-1])

        def forward(self, inputs):
            hidden = nn.functional.silu(self.gate(inputs)) * self.up(inputs)
            return self.down(hidden)

    modules = {
        "gated": GatedModule,
        "dense": lambda: nn.Sequential(
            nn.Linear(shape[-1], intermediate),
            nn.ReLU(),
            nn.Linear(intermediate, shape[-1]),
        ),
    }
    inputs = execution.random_tensor(shape)
    module = modules[kind]().to(inputs.device)
    step = execution.gradient_runner(module, 1, None, inputs)

    def run():
        step()
        module.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def main(chosen):
    """Prints the table."""
    table = comparison_table()
    shape = (8, chosen.size(256, 8), chosen.size(512, 16))
    intermediate = chosen.size(2048, 32)
    for kind in OURS:
        arguments = kind, shape, intermediate
        peers = {
            "all experts" if kind == "mixture" else "keras.layers.Dense": Rival(
                network, "peers", *arguments
            )
        }
        if keras.backend.backend() == "torch" and kind != "mixture":
            peers["torch.nn.Linear"] = Rival(torchs, *arguments)
        for name, peer in peers.items():
            compare(
                table,
                chosen,
                f"{kind}, {intermediate}",
                Rival(network, "ours", *arguments),
                name,
                peer,
                shape=" x ".join(map(str, shape)),
            )


if __name__ == "__main__":
    main(options(__doc__))
