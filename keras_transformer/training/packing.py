"""Packing of documents: several short ones share a row."""

from typing import NamedTuple

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.training.arrays import token_array


class PackedRows(NamedTuple):
    """What `pack_documents` returns; all of shape `(num_rows, length)`.

    Attributes:
        token_ids: The tokens, int32.
        segment_ids: The number of the document in its row, from 1; 0 for
            padding. `Causal() & Documents()` reads it.
        positions: The place of each token in its document, from 0.
        targets: The next token of the same document; `pad_id` where there is
            none.
        sample_weight: 1 where there is a target, else 0, float32.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    sample_weight: np.ndarray


def pack_documents(documents, length: int, *, pad_id: int = 0) -> PackedRows:
    """Puts each document into the first row that has room for it.

    A document longer than a row is cut into pieces, each of them a segment
    with positions from 0. The last token of a piece keeps its target, the
    first token of the next piece. The last token of a document has none, so no
    target crosses from one document into another.

    Args:
        documents: Sequences of integers; empty ones are left out. Their order
            decides the packing: shuffle them first.
        length: Length of a row.
        pad_id: Token that fills the rows.

    Returns:
        A `PackedRows`.

    Raises:
        ValueError: If `length` is not a positive integer, `pad_id` not an
            integer of at least 0, or a document not a sequence of integers.

    Example:

    ```python
    packed = pack_documents(documents, 512)
    x = {
        "token_ids": packed.token_ids,
        "segment_ids": packed.segment_ids,
        "positions": packed.positions,
    }
    model.fit(x, packed.targets, sample_weight=packed.sample_weight)
    ```
    """
    checks.positive_int(length=length)
    checks.non_negative_int(pad_id=pad_id)
    pieces = []
    for document in documents:
        document = token_array(ndim=1, document=document)
        for start in range(0, len(document), length):
            # One token more, for the target of the last.
            pieces.append(document[start : start + length + 1])
    # The first token of the next piece is not part of this one.
    sizes = [min(len(piece), length) for piece in pieces]
    rows = first_fit(sizes, length)

    shape = (max(rows, default=-1) + 1, length)
    token_ids = np.full(shape, pad_id, "int32")
    targets = np.full(shape, pad_id, "int32")
    segment_ids, positions = np.zeros(shape, "int32"), np.zeros(shape, "int32")
    sample_weight = np.zeros(shape, "float32")
    filled, num_segments = [0] * shape[0], [0] * shape[0]
    for piece, size, row in zip(pieces, sizes, rows, strict=True):
        start, num_targets = filled[row], len(piece) - 1
        filled[row] += size
        num_segments[row] += 1
        token_ids[row, start : start + size] = piece[:size]
        segment_ids[row, start : start + size] = num_segments[row]
        positions[row, start : start + size] = np.arange(size)
        targets[row, start : start + num_targets] = piece[1:]
        sample_weight[row, start : start + num_targets] = 1
    return PackedRows(token_ids, segment_ids, positions, targets, sample_weight)


def first_fit(sizes, capacity: int) -> list:
    """The first row with room for each size, in the order given.

    Args:
        sizes: Integers of at most `capacity`.
        capacity: Size of a row.

    Returns:
        The row of each size.
    """
    # A complete binary tree over as many rows as there could be. A node holds
    # the most room that a row below it has, so that finding the first row
    # takes the depth of the tree, not the number of rows.
    num_leaves = 1
    while num_leaves < len(sizes):
        num_leaves *= 2
    room = [capacity] * (2 * num_leaves)
    rows = []
    for size in sizes:
        node = 1
        while node < num_leaves:
            node *= 2
            node += room[node] < size
        rows.append(node - num_leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows
