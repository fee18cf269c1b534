"""Builders of functional-API models."""

from keras_transformer.models.decoder_only import decoder_only
from keras_transformer.models.encoder_decoder import encoder_decoder
from keras_transformer.models.encoder_only import encoder_only

__all__ = ["decoder_only", "encoder_decoder", "encoder_only"]
