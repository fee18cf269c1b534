"""Decoder-only models: GPT and its successors."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.seeds import part_seed
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerDecoder,
    Unembedding,
)
from keras_transformer.masks import Causal, Mask
from keras_transformer.models import parts

_OPTIONAL = ("padding_mask", "segment_ids", "positions", "prefix_length")


def decoder_only(
    vocabulary_size: int,
    num_layers: int,
    model_dim: int,
    num_heads: int,
    intermediate_dim: int,
    max_length: int | None = None,
    *,
    inputs=("token_ids",),
    mask: Mask | None = None,
    position="rope",
    dropout: float = 0.0,
    normalization="layer_norm",
    layer_norm_epsilon: float = 1e-5,
    norm_placement: str = "pre",
    feed_forward="dense",
    scale_embedding: bool = False,
    tie_embeddings: bool = True,
    embeddings_initializer="uniform",
    seed: int | None = None,
    dtype=None,
    name: str | None = "decoder_only",
    **block_options,
) -> keras.Model:
    """Builds a language model: tokens to logits of the next token.

    Embedder, `num_layers` blocks, a final norm (unless the blocks are
    post-norm), de-embedding.

    Reference: [Radford et al., 2018](https://openai.com/research/language-unsupervised);
    the defaults of position and norm placement are those of later models.

    Args:
        vocabulary_size: Number of tokens.
        num_layers: Number of blocks.
        model_dim: Width of the model.
        num_heads: Number of query heads.
        intermediate_dim: Width of the feed-forward networks.
        max_length: Largest length; needed by `position="learned"`.
        inputs: The model's inputs: `"token_ids"`, and any of
            `"padding_mask"`, `"segment_ids"`, `"positions"` and
            `"prefix_length"`. With one, the model is called with the ids
            alone; with several, with a dict.
        mask: A `Mask` for all blocks, or a sequence of one per block; None is
            `Causal()`.
        position: None, a scheme, or its name; it is handed to the embedder
            or to the blocks, where it acts.
        dropout: Rate on the embeddings and on each sub-layer's output.
        normalization: As in `TransformerDecoder`.
        layer_norm_epsilon: Added to the variance.
        norm_placement: As in `TransformerDecoder`.
        feed_forward: As in `TransformerDecoder`; a layer is copied.
        scale_embedding: Whether embeddings are multiplied by
            `sqrt(model_dim)`.
        tie_embeddings: Whether the de-embedding uses the embedder's table.
        embeddings_initializer: For the token table.
        seed: Seed of the dropouts; each layer gets one of its own from it.
        dtype: Dtype policy of all layers; None: Keras's global one.
        name: Name of the model.
        **block_options: Further arguments of `TransformerDecoder`.

    Returns:
        A functional model from int32 (batch, length) to (batch, length,
        vocabulary_size).

    Example:

    ```python
    model = decoder_only(1000, num_layers=2, model_dim=64, num_heads=4,
                         intermediate_dim=256)
    result = generate(model, [[1, 2, 3]], max_new_tokens=5)
    ```
    """
    checks.positive_int(num_layers=num_layers)
    tensors = parts.model_inputs(inputs, ("token_ids",), _OPTIONAL)
    masks = parts.masks_of(num_layers, Causal(), mask=mask)
    on_embeddings, in_blocks = parts.split_position(position, masks, max_length)
    options = {
        "intermediate_dim": intermediate_dim,
        "num_heads": num_heads,
        "position": in_blocks,
        "dropout": dropout,
        "normalization": normalization,
        "layer_norm_epsilon": layer_norm_epsilon,
        "norm_placement": norm_placement,
        "feed_forward": feed_forward,
        "seed": seed,
        "dtype": dtype,
        **block_options,
    }
    parts.check_read(
        tensors,
        masks,
        on_embeddings or in_blocks,
        block_options.get("attention"),
    )
    embedding = PositionalEmbedding(
        vocabulary_size,
        model_dim,
        max_length,
        position=on_embeddings,
        scale=scale_embedding,
        dropout=dropout,
        embeddings_initializer=embeddings_initializer,
        seed=part_seed(seed, "embedding"),
        dtype=dtype,
        name="embedding",
    )
    unembed = (
        parts.tied_unembedding(embedding, tensors["token_ids"], dtype)
        if tie_embeddings
        else Unembedding(
            vocabulary_size=vocabulary_size, dtype=dtype, name="unembedding"
        )
    )
    stream = embedding(tensors["token_ids"], positions=tensors.get("positions"))
    for block in parts.stack(TransformerDecoder, masks, "decoder", options):
        data = parts.block_data(block, tensors, in_blocks)
        stream = block(stream, **data)
    stream = parts.final_norm(options, "final_norm")(stream)
    return parts.functional_model(tensors, unembed(stream), name)
