"""Encoder-only models: BERT and its relatives."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.seeds import part_seed
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerEncoder,
)
from keras_transformer.masks import Full, Mask
from keras_transformer.models import parts
from keras_transformer.models.pooling import MeanPooling

_OPTIONAL = ("padding_mask", "segment_ids", "positions", "prefix_length")
_HEADS = (None, "masked_token", "classification")


def encoder_only(
    vocabulary_size: int,
    num_layers: int,
    model_dim: int,
    num_heads: int,
    intermediate_dim: int,
    max_length: int | None = None,
    *,
    inputs=("token_ids",),
    head: str | None = None,
    num_classes: int | None = None,
    mask: Mask | None = None,
    position="learned",
    dropout: float = 0.0,
    normalization="layer_norm",
    layer_norm_epsilon: float = 1e-5,
    norm_placement: str = "pre",
    feed_forward="dense",
    scale_embedding: bool = False,
    embeddings_initializer="uniform",
    seed: int | None = None,
    dtype=None,
    name: str | None = "encoder_only",
    **block_options,
) -> keras.Model:
    """Builds an encoder: tokens to hidden states, token logits or classes.

    Reference: [Devlin et al., 2018](https://arxiv.org/abs/1810.04805), whose
    blocks are post-norm (`norm_placement="post"`).

    Args:
        vocabulary_size: Number of tokens.
        num_layers: Number of blocks.
        model_dim: Width of the model.
        num_heads: Number of heads.
        intermediate_dim: Width of the feed-forward networks.
        max_length: Largest length; needed by `position="learned"`.
        inputs: The model's inputs: `"token_ids"`, and any of
            `"padding_mask"`, `"segment_ids"`, `"positions"` and
            `"prefix_length"`. With one, the model is called with the ids
            alone; with several, with a dict.
        head: None for hidden states; `"masked_token"` for logits over the
            vocabulary at each position (dense, GELU, norm, and the
            embedder's table with a bias); `"classification"` for logits over
            classes from the mean of the real tokens' states.
        num_classes: Number of classes of `"classification"`.
        mask: A `Mask` for all blocks, or a sequence of one per block; None is
            `Full()`.
        position: None, a scheme, or its name; it is handed to the embedder
            or to the blocks, where it acts.
        dropout: Rate on the embeddings and on each sub-layer's output.
        normalization: As in `TransformerEncoder`.
        layer_norm_epsilon: Added to the variance.
        norm_placement: As in `TransformerEncoder`.
        feed_forward: As in `TransformerEncoder`; a layer is copied.
        scale_embedding: Whether embeddings are multiplied by
            `sqrt(model_dim)`.
        embeddings_initializer: For the token table.
        seed: Seed of the dropouts; each layer gets one of its own from it.
        dtype: Dtype policy of all layers; None: Keras's global one.
        name: Name of the model.
        **block_options: Further arguments of `TransformerEncoder`.

    Returns:
        A functional model from int32 (batch, length) to (batch, length,
        model_dim), (batch, length, vocabulary_size) or (batch, num_classes).

    Example:

    ```python
    model = encoder_only(1000, 2, 64, 4, 256, max_length=128,
                         inputs=("token_ids", "padding_mask"))
    ```
    """
    checks.positive_int(num_layers=num_layers)
    checks.one_of(_HEADS, head=head)
    if (head == "classification") != (num_classes is not None):
        checks.fail(
            'given with head="classification", and only then',
            "num_classes",
            num_classes,
        )
    checks.positive_int(num_classes=num_classes, optional=True)
    tensors = parts.model_inputs(inputs, ("token_ids",), _OPTIONAL)
    masks = parts.masks_of(num_layers, Full(), mask=mask)
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
    if head == "masked_token":
        unembed = parts.tied_unembedding(
            embedding, tensors["token_ids"], dtype, use_bias=True
        )
    stream = embedding(tensors["token_ids"], positions=tensors.get("positions"))
    for block in parts.stack(TransformerEncoder, masks, "encoder", options):
        data = parts.block_data(block, tensors, in_blocks)
        stream = block(stream, **data)
    stream = parts.final_norm(options, "final_norm")(stream)
    if head == "masked_token":
        stream = keras.layers.Dense(
            model_dim, activation="gelu", dtype=dtype, name="token_transform"
        )(stream)
        stream = parts.norm(options, "token_norm")(stream)
        stream = unembed(stream)
    elif head == "classification":
        pooled = MeanPooling(dtype=dtype, name="pooling")(
            stream, padding_mask=tensors.get("padding_mask")
        )
        stream = keras.layers.Dense(num_classes, dtype=dtype, name="classes")(
            pooled
        )
    return parts.functional_model(tensors, stream, name)
