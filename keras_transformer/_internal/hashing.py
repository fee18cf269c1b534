"""A counter hash: random bits that depend on keys alone, on every backend.

Keys are mixed one after another. What differs in any key shares no numbers
in practice, and nothing depends on the order in which numbers are drawn.
"""

from keras import ops

# Two hash chains that start apart, at fractions of the golden ratio and of the
# MurmurHash3 constants: together a 64-bit key.
_STARTS = (-0x61C88647, -0x3D4D51CB)
# (shift, factor) after (shift, factor) of `lowbias32`, of Chris Wellons' hash
# prospector.
ROUNDS = ((16, 0x7FEB352D), (15, -0x7B935975))
LAST_SHIFT = 16


def stream_keys(*keys):
    """Two numbers that name a stream of random bits.

    Args:
        *keys: int32 tensors or integers that broadcast; each tells streams
            apart.

    Returns:
        An odd stride and an offset, int32, of the keys' common shape: bit
        pattern `i` of the stream is `random_bits(stride, offset, i)`.
    """
    chains = []
    for start in _STARTS:
        chain = ops.cast(ops.convert_to_tensor(keys[0]), "int32") + start
        chain = _mixed(chain)
        for key in keys[1:]:
            chain = _mixed(ops.bitwise_xor(chain, ops.cast(key, "int32")))
        chains.append(chain)
    # An odd stride visits all numbers before it meets one again.
    return ops.bitwise_or(chains[0], 1), chains[1]


def random_bits(stride, offset, indices):
    """32 random bits for each index of a stream, as int32."""
    return _mixed(indices * stride + offset)


def random_halves(stride, offset, indices):
    """16 random bits for each index of a stream, as int32 with sign.

    An even index has the lower half of a bit pattern, the next index the
    upper one.

    Args:
        stride, offset: int32 (...), of `stream_keys`.
        indices: int32 (n,).

    Returns:
        (..., n), each in [-2**15, 2**15).
    """
    pairs, is_odd = ops.right_shift(indices, 1), ops.bitwise_and(indices, 1)
    bits = random_bits(stride[..., None], offset[..., None], pairs)
    # The other half falls off, and the sign fills the place.
    return ops.right_shift(ops.left_shift(bits, 16 * (1 - is_odd)), 16)


def _mixed(bits):
    """A bijection of int32 in which each bit of the input stirs all bits."""
    for shift, factor in ROUNDS:
        bits = ops.bitwise_xor(bits, _shifted_right(bits, shift)) * factor
    return ops.bitwise_xor(bits, _shifted_right(bits, LAST_SHIFT))


def _shifted_right(bits, count):
    # int32 is shifted arithmetically: the copies of the sign go.
    return ops.bitwise_and(ops.right_shift(bits, count), (1 << 32 - count) - 1)
