"""The counter hash on PyTorch: in place, in pieces that stay in the cache."""

import torch

from keras_transformer._internal.hashing import LAST_SHIFT, ROUNDS

# Bit patterns of a piece on a CPU: no more than one thread works on.
_PIECE = 1 << 15


def random_halves(stride, offset, indices):
    """As `hashing.random_halves`, two of each bit pattern that is made.

    Args:
        stride, offset: int32 (...).
        indices: int32 (n,): pairs of an even number and the next one; the
            last may miss its second.

    Returns:
        int16 (..., n).
    """
    shape, pairs = stride.shape, indices[::2] >> 1
    streams, (size,) = stride.numel(), pairs.shape
    bits = pairs.new_empty(streams, size)
    step = max(1, streams)
    if bits.device.type == "cpu":
        step = max(1, _PIECE // max(1, size))
    stride, offset = stride.reshape(-1, 1), offset.reshape(-1, 1)
    shifted = torch.empty_like(bits[:step])
    for start in range(0, streams, step):
        piece = bits[start : start + step]
        rows = slice(start, start + len(piece))
        torch.mul(stride[rows], pairs, out=piece)
        piece += offset[rows]
        _mix(piece, shifted[: len(piece)])
    halves = bits.view(torch.int16)[:, : len(indices)]
    return halves.reshape(*shape, len(indices))


def _mix(bits, shifted):
    for shift, factor in (*ROUNDS, (LAST_SHIFT, None)):
        torch.bitwise_right_shift(bits, shift, out=shifted)
        # int32 is shifted arithmetically: the copies of the sign go.
        shifted &= (1 << 32 - shift) - 1
        bits ^= shifted
        if factor is not None:
            bits *= factor
