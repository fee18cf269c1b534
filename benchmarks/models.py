"""The forward pass of an encoder, beside KerasHub's and Hugging Face's BERT.

    KERAS_BACKEND=jax python benchmarks/models.py [--quick]

The shape of BERT-base (width 768, 12 heads, 3072) cut to 4 blocks, with
padding in half of the rows. Hugging Face's model, where it is installed, runs
on PyTorch in its own process. The peers add segments and pool the first
token, which is little. Ratios above 1 are in our favour.
"""

import dataclasses

import execution
import numpy as np
from keras import ops
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import encoder_only


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the model and of a batch."""

    num_layers: int = 4
    width: int = 768
    num_heads: int = 12
    intermediate: int = 3072
    vocabulary: int = 30_522
    length: int = 512
    batch: int = 8

    def data(self):
        """Token ids and which of them are real."""
        shape = (self.batch, self.length)
        tokens = np.random.default_rng(0).integers(self.vocabulary, size=shape)
        lengths = np.where(np.arange(self.batch) % 2, self.length // 2, 10**9)
        real = np.arange(self.length) < lengths[:, None]
        return tokens.astype("int32"), real


QUICK = Sizes(2, 32, 4, 64, 100, 16, 2)


def ours(sizes):
    """Our encoder."""
    model = encoder_only(
        sizes.vocabulary,
        sizes.num_layers,
        sizes.width,
        sizes.num_heads,
        sizes.intermediate,
        max_length=sizes.length,
        inputs=("token_ids", "padding_mask"),
        norm_placement="post",
        activation="gelu",
    )
    tokens, real = map(ops.convert_to_tensor, sizes.data())
    inputs = {"token_ids": tokens, "padding_mask": real}
    return execution.layer_runner(model, inputs)


def keras_hubs(sizes):
    """KerasHub's encoder."""
    import keras_hub

    model = keras_hub.models.BertBackbone(
        sizes.vocabulary,
        sizes.num_layers,
        sizes.num_heads,
        sizes.width,
        sizes.intermediate,
        max_sequence_length=sizes.length,
    )
    tokens, real = map(ops.convert_to_tensor, sizes.data())
    inputs = {
        "token_ids": tokens,
        "segment_ids": ops.zeros_like(tokens),
        "padding_mask": real,
    }
    return execution.layer_runner(model, inputs)


def hugging_faces(sizes):
    """Hugging Face's encoder, on PyTorch."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate,
        max_position_embeddings=sizes.length,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.BertModel(config).to(device).eval()
    tokens, real = (
        torch.as_tensor(array, device=device) for array in sizes.data()
    )

    def forward(tokens, real):
        return model(tokens.long(), attention_mask=real.long())[0]

    return execution.runner(forward, tokens, real)


def main(chosen):
    """Prints the table."""
    table = comparison_table()
    sizes = QUICK if chosen.quick else Sizes()
    for length in (sizes.length // 4, sizes.length):
        sizes = dataclasses.replace(sizes, length=length)
        for peer, rival in (
            ("KerasHub's BertBackbone", Rival(keras_hubs, sizes)),
            (
                "transformers.BertModel",
                Rival(hugging_faces, sizes, backend="torch"),
            ),
        ):
            compare(
                table,
                chosen,
                "encoder, forward",
                Rival(ours, sizes),
                peer,
                rival,
                shape=f"{sizes.batch} x {length} x {sizes.width}",
            )


if __name__ == "__main__":
    main(options(__doc__))
