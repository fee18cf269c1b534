"""What a block computes at each position alone."""

from keras_transformer.feed_forward.dense import FeedForward
from keras_transformer.feed_forward.gated import GatedFeedForward
from keras_transformer.feed_forward.mixture import MixtureOfExperts

__all__ = ["FeedForward", "GatedFeedForward", "MixtureOfExperts"]
