"""A counter hash: random bits that depend on keys alone, on every backend.

Keys are mixed one after another. What differs in any key shares no numbers
in practice, and nothing depends on the order in which numbers are drawn.
"""

from keras import ops

# Two hash chains that start apart: together a 64-bit key.
_STARTS = (-0x61C88647, -0x3D4D51CB)


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
        chain = mixed(chain)
        for key in keys[1:]:
            chain = mixed(ops.bitwise_xor(chain, ops.cast(key, "int32")))
        chains.append(chain)
    # An odd stride visits all numbers before it meets one again.
    return ops.bitwise_or(chains[0], 1), chains[1]


def random_bits(stride, offset, indices):
    """32 random bits for each index of a stream, as int32."""
    return mixed(indices * stride + offset)


def mixed(bits):
    """A bijection of int32 in which each bit of the input stirs all bits.

    The constants are those of `lowbias32`, of Chris Wellons' hash prospector.
    """
    bits = ops.bitwise_xor(bits, _shifted_right(bits, 16)) * 0x7FEB352D
    bits = ops.bitwise_xor(bits, _shifted_right(bits, 15)) * -0x7B935975
    return ops.bitwise_xor(bits, _shifted_right(bits, 16))


def _shifted_right(bits, count):
    # int32 is shifted arithmetically: the copies of the sign go.
    return ops.bitwise_and(ops.right_shift(bits, count), (1 << 32 - count) - 1)
