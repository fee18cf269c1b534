"""One training step of a decoder, beside KerasHub's and PyTorch's.

    KERAS_BACKEND=jax python benchmarks/blocks.py [--quick] [--only TEXT]

All have 4 pre-norm blocks of width 256 with 8 heads, learned positions, a
final norm, logits from the table of tokens, dropout 0.1 at the same places
(attention weights too), sparse cross-entropy and Adam. Ours is trained as it
is, and wrapped in `LinearCrossentropyModel`, which makes no logits. Ours and
KerasHub's are timed at `train_on_batch`, PyTorch's `nn.TransformerEncoder` in
a plain loop that reads the loss as `train_on_batch` does. Ratios above 1 are
in our favour.
"""

import dataclasses

import keras
import numpy as np
from rivals import Rival, compare, comparison_table
from timing import options

RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the model and of a batch."""

    num_layers: int = 4
    width: int = 256
    num_heads: int = 8
    intermediate: int = 1024
    length: int = 256
    batch: int = 8
    vocabulary: int = 8192

    @property
    def shape(self):
        """The shape as text."""
        return f"{self.batch} x {self.length} x {self.width}"

    def data(self):
        """Token ids and the next ones."""
        shape = (self.batch, self.length + 1)
        tokens = np.random.default_rng(0).integers(self.vocabulary, size=shape)
        tokens = tokens.astype("int32")
        return tokens[:, :-1], tokens[:, 1:]


QUICK = Sizes(2, 32, 4, 64, 16, 2, 100)


def stepper(model, sizes):
    """A training step of a Keras model that gives logits."""
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() != "torch",
    )
    return batch_step(model, sizes)


def batch_step(model, sizes):
    """A training step of a compiled model."""
    inputs, targets = map(keras.ops.convert_to_tensor, sizes.data())
    return lambda: model.train_on_batch(inputs, targets)


def our_model(sizes):
    """Our model."""
    from keras_transformer import decoder_only

    return decoder_only(
        sizes.vocabulary,
        num_layers=sizes.num_layers,
        model_dim=sizes.width,
        num_heads=sizes.num_heads,
        intermediate_dim=sizes.intermediate,
        max_length=sizes.length,
        position="learned",
        dropout=RATE,
    )


def ours(sizes):
    """A step of our model."""
    return stepper(our_model(sizes), sizes)


def ours_without_logits(sizes):
    """A step of our model whose loss makes no logits."""
    from keras_transformer.training import LinearCrossentropyModel

    model = LinearCrossentropyModel(our_model(sizes))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        jit_compile=keras.backend.backend() != "torch",
    )
    return batch_step(model, sizes)


def keras_hubs(sizes):
    """A step of KerasHub's layers."""
    import keras_hub

    tokens = keras.Input((sizes.length,), dtype="int32")
    embedding = keras_hub.layers.TokenAndPositionEmbedding(
        sizes.vocabulary, sizes.length, sizes.width
    )
    stream = keras.layers.Dropout(RATE)(embedding(tokens))
    for _ in range(sizes.num_layers):
        stream = keras_hub.layers.TransformerDecoder(
            sizes.intermediate,
            sizes.num_heads,
            dropout=RATE,
            normalize_first=True,
        )(stream)
    stream = keras.layers.LayerNormalization(epsilon=1e-5)(stream)
    logits = embedding.token_embedding(stream, reverse=True)
    return stepper(keras.Model(tokens, logits), sizes)


def torchs(sizes):
    """A step of PyTorch's layers, without Keras."""
    import torch
    from torch import nn

    class Model(nn.Module):
        """The same model."""

        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
            self.positions = nn.Parameter(
                torch.empty(sizes.length, sizes.width).uniform_(-0.05, 0.05)
            )
            nn.init.uniform_(self.tokens.weight, -0.05, 0.05)
            self.dropout = nn.Dropout(RATE)
            self.blocks = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(
                    sizes.width,
                    sizes.num_heads,
                    sizes.intermediate,
                    dropout=RATE,
                    batch_first=True,
                    norm_first=True,
                ),
                sizes.num_layers,
                norm=nn.LayerNorm(sizes.width),
                enable_nested_tensor=False,
            )

        def forward(self, tokens, mask):
            stream = self.dropout(self.tokens(tokens) + self.positions)
            stream = self.blocks(stream, mask=mask, is_causal=True)
            return nn.functional.linear(stream, self.tokens.weight)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    inputs, targets = (
        torch.as_tensor(array, device=device).long() for array in sizes.data()
    )
    mask = nn.Transformer.generate_square_subsequent_mask(
        sizes.length, device=device
    )

    def step():
        optimizer.zero_grad()
        logits = model(inputs, mask)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main(chosen):
    """Prints the table."""
    sizes = QUICK if chosen.quick else Sizes()
    table = comparison_table()
    peers = {
        "KerasHub's layers": Rival(keras_hubs, sizes),
        "torch.nn.TransformerEncoder": Rival(torchs, sizes, backend="torch"),
    }
    steps = {
        "training step": ours,
        "training step, LinearCrossentropy": ours_without_logits,
    }
    for case, step in steps.items():
        for name, peer in peers.items():
            compare(
                table,
                chosen,
                case,
                Rival(step, sizes),
                name,
                peer,
                shape=sizes.shape,
            )
    long = dataclasses.replace(
        sizes, num_layers=1, length=chosen.size(32_768, 64), batch=1
    )
    compare(
        table,
        chosen,
        "one block, long",
        Rival(ours_without_logits, long),
        "",
        None,
        shape=long.shape,
    )


if __name__ == "__main__":
    main(options(__doc__))
