"""Attention: the function, the layer, and their caches."""

from keras_transformer.attention.dot_product import dot_product_attention
from keras_transformer.attention.explain import explain
from keras_transformer.attention.multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention", "dot_product_attention", "explain"]
