"""Blocks: embedder, de-embedder, encoder and decoder."""

from keras_transformer.blocks.decoder import TransformerDecoder
from keras_transformer.blocks.embedding import PositionalEmbedding
from keras_transformer.blocks.encoder import TransformerEncoder
from keras_transformer.blocks.unembedding import Unembedding

__all__ = [
    "PositionalEmbedding",
    "TransformerDecoder",
    "TransformerEncoder",
    "Unembedding",
]
