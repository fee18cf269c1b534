"""Encoder-decoder models: the original Transformer, T5."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.seeds import part_seed
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerDecoder,
    TransformerEncoder,
    Unembedding,
)
from keras_transformer.masks import Causal, Full, Mask
from keras_transformer.models import parts

_REQUIRED = ("encoder_token_ids", "decoder_token_ids")
_OPTIONAL = ("encoder_padding_mask", "decoder_padding_mask")


def encoder_decoder(
    vocabulary_size: int,
    num_layers: int,
    model_dim: int,
    num_heads: int,
    intermediate_dim: int,
    max_length: int | None = None,
    *,
    inputs=_REQUIRED,
    num_decoder_layers: int | None = None,
    encoder_mask: Mask | None = None,
    mask: Mask | None = None,
    cross_mask: Mask | None = None,
    position="sinusoidal",
    dropout: float = 0.0,
    normalization="layer_norm",
    layer_norm_epsilon: float = 1e-5,
    norm_placement: str = "pre",
    feed_forward="dense",
    scale_embedding: bool = True,
    share_embeddings: bool = True,
    embeddings_initializer="uniform",
    seed: int | None = None,
    dtype=None,
    name: str | None = "encoder_decoder",
    **block_options,
) -> keras.Model:
    """Builds a sequence-to-sequence model: two token sequences to logits.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), whose
    blocks are post-norm (`norm_placement="post"`).

    Args:
        vocabulary_size: Number of tokens, of both sequences.
        num_layers: Number of encoder blocks.
        model_dim: Width of the model.
        num_heads: Number of query heads.
        intermediate_dim: Width of the feed-forward networks.
        max_length: Largest length of a sequence; needed by
            `position="learned"`.
        inputs: The model's inputs, called with a dict:
            `"encoder_token_ids"`, `"decoder_token_ids"`, and any of
            `"encoder_padding_mask"` and `"decoder_padding_mask"`.
        num_decoder_layers: Number of decoder blocks; None: `num_layers`.
        encoder_mask: A `Mask` in the encoder, or a sequence of one per block;
            None is `Full()`.
        mask: A `Mask` in the decoder, or a sequence of one per block; None is
            `Causal()`.
        cross_mask: A `Mask` from the decoder to the encoder; None is
            `Full()`.
        position: None, a scheme, or its name; it is handed to the embedder
            or to the self-attentions, where it acts. A trained bias is one
            table per stack.
        dropout: Rate on the embeddings and on each sub-layer's output.
        normalization: As in `TransformerDecoder`.
        layer_norm_epsilon: Added to the variance.
        norm_placement: As in `TransformerDecoder`.
        feed_forward: As in `TransformerDecoder`; a layer is copied.
        scale_embedding: Whether embeddings are multiplied by
            `sqrt(model_dim)`.
        share_embeddings: Whether encoder, decoder and de-embedding use one
            table; else each has its own.
        embeddings_initializer: For the token tables.
        seed: Seed of the dropouts; each layer gets one of its own from it.
        dtype: Dtype policy of all layers; None: Keras's global one.
        name: Name of the model.
        **block_options: Further arguments of both kinds of block.

    Returns:
        A functional model from a dict of int32 (batch, length) to logits
        (batch, decoder_length, vocabulary_size).

    Example:

    ```python
    model = encoder_decoder(1000, 2, 64, 4, 256)
    result = generate(model, {"encoder_token_ids": [[5, 6, 7]]},
                      start_token=1, max_new_tokens=5)
    ```
    """
    checks.positive_int(num_layers=num_layers)
    checks.positive_int(num_decoder_layers=num_decoder_layers, optional=True)
    tensors = parts.model_inputs(inputs, _REQUIRED, _OPTIONAL)
    encoder_masks = parts.masks_of(
        num_layers, Full(), encoder_mask=encoder_mask
    )
    masks = parts.masks_of(
        num_decoder_layers or num_layers, Causal(), mask=mask
    )
    on_embeddings, in_encoder = parts.split_position(
        position, encoder_masks, max_length
    )
    _, in_decoder = parts.split_position(
        parts.fresh(position), masks, max_length
    )
    options = {
        "intermediate_dim": intermediate_dim,
        "num_heads": num_heads,
        "dropout": dropout,
        "normalization": normalization,
        "layer_norm_epsilon": layer_norm_epsilon,
        "norm_placement": norm_placement,
        "feed_forward": feed_forward,
        "seed": seed,
        "dtype": dtype,
        **block_options,
    }

    def embedder(name, scheme):
        return PositionalEmbedding(
            vocabulary_size,
            model_dim,
            max_length,
            position=scheme,
            scale=scale_embedding,
            dropout=dropout,
            embeddings_initializer=embeddings_initializer,
            seed=part_seed(seed, name),
            dtype=dtype,
            name=name,
        )

    if share_embeddings:
        encoder_embedding = embedder("embedding", on_embeddings)
        decoder_embedding = encoder_embedding
        unembed = parts.tied_unembedding(
            encoder_embedding, tensors["encoder_token_ids"], dtype
        )
    else:
        encoder_embedding = embedder("encoder_embedding", on_embeddings)
        decoder_embedding = embedder(
            "decoder_embedding", parts.fresh(on_embeddings)
        )
        unembed = Unembedding(
            vocabulary_size=vocabulary_size, dtype=dtype, name="unembedding"
        )

    encoded = encoder_embedding(tensors["encoder_token_ids"])
    encoder_padding = tensors.get("encoder_padding_mask")
    for block in parts.stack(
        TransformerEncoder,
        encoder_masks,
        "encoder",
        {**options, "position": in_encoder},
    ):
        encoded = block(encoded, padding_mask=encoder_padding)
    encoded = parts.final_norm(options, "encoder_norm")(encoded)

    stream = decoder_embedding(tensors["decoder_token_ids"])
    for block in parts.stack(
        TransformerDecoder,
        masks,
        "decoder",
        {**options, "position": in_decoder, "cross_mask": cross_mask},
    ):
        stream = block(
            stream,
            encoded,
            padding_mask=tensors.get("decoder_padding_mask"),
            encoder_padding_mask=encoder_padding,
        )
    stream = parts.final_norm(options, "decoder_norm")(stream)
    return parts.functional_model(tensors, unembed(stream), name)
