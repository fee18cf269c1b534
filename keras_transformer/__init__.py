"""The parts of Transformers as Keras 3 layers.

The public names of the rooms, flat. `keras_transformer.training` is used
through its module.
"""

from keras_transformer import training
from keras_transformer.attention import (
    MultiHeadAttention,
    dot_product_attention,
    explain,
)
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerDecoder,
    TransformerEncoder,
    Unembedding,
)
from keras_transformer.decoding import (
    GenerationResult,
    Greedy,
    Sample,
    generate,
)
from keras_transformer.feed_forward import (
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
)
from keras_transformer.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Explicit,
    Fixed,
    Full,
    Global,
    Mask,
    Padding,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from keras_transformer.models import (
    decoder_only,
    encoder_decoder,
    encoder_only,
)
from keras_transformer.positions import (
    ALiBi,
    Learned,
    RelativePositionBias,
    RoPE,
    RoPEScaling,
    Sinusoidal,
    sinusoidal_encoding,
)

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "BlockSparse",
    "Causal",
    "Chunked",
    "Documents",
    "Explicit",
    "FeedForward",
    "Fixed",
    "Full",
    "GatedFeedForward",
    "GenerationResult",
    "Global",
    "Greedy",
    "Learned",
    "Mask",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "Padding",
    "PerHead",
    "PositionalEmbedding",
    "Prefix",
    "RelativePositionBias",
    "RoPE",
    "RoPEScaling",
    "Sample",
    "Sinusoidal",
    "SlidingWindow",
    "Strided",
    "TransformerDecoder",
    "TransformerEncoder",
    "Unembedding",
    "decoder_only",
    "dot_product_attention",
    "encoder_decoder",
    "encoder_only",
    "explain",
    "generate",
    "sinusoidal_encoding",
    "training",
]
