"""Generation: how a model writes."""

from keras_transformer.decoding.decoders import Greedy, Sample
from keras_transformer.decoding.generate import GenerationResult, generate

__all__ = ["GenerationResult", "Greedy", "Sample", "generate"]
