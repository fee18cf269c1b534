"""Which blocks of a long attention matrix hold work.

A mask answers for whole tiles whether anything in them may be allowed and
whether everything must be. Tiles are asked from the largest down: a tile that
is certain is done, any other is cut in four. So a causal mask over a million
slots costs its diagonal, not its area.
"""

import dataclasses

import numpy as np

# Tiles asked about at once; bounds the memory a plan takes.
_TILES_AT_ONCE = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPlan:
    """The kept blocks of each query block, as runs of one kind.

    Runs are sorted by row, then column, and neighbours differ in kind. A
    block outside every run holds no allowed pair. A full block needs no mask;
    any other must be masked.

    Args:
        query_length, key_length: Shape of the attention matrix.
        block_size, key_block_size: Shape of a block; the last ones may be cut.
        row_offsets: `(query blocks + 1,)`; the runs of row `i` are those from
            `row_offsets[i]` to `row_offsets[i + 1]`.
        starts, ends: First key block of each run, and the one past its last.
        is_full: Whether every pair of the run's blocks is allowed.
    """

    query_length: int
    key_length: int
    block_size: int
    key_block_size: int
    row_offsets: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    is_full: np.ndarray

    @property
    def num_query_blocks(self) -> int:
        return -(-self.query_length // self.block_size)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.key_length // self.key_block_size)

    @property
    def num_kept(self) -> int:
        """How many blocks are computed."""
        return int((self.ends - self.starts).sum())

    @property
    def num_full(self) -> int:
        """How many of them need no mask."""
        return int((self.ends - self.starts)[self.is_full].sum())

    @property
    def density(self) -> float:
        """The share of blocks that is computed."""
        total = self.num_query_blocks * self.num_key_blocks
        return self.num_kept / total if total else 0.0

    def kept_per_row(self):
        """How many blocks each query block keeps, `(query blocks,)`."""
        total = np.append(0, np.cumsum(self.ends - self.starts))
        return np.diff(total[self.row_offsets])

    def row(self, query_block: int):
        """The runs of one query block: a list of `(start, end, is_full)`."""
        runs = slice(*self.row_offsets[query_block : query_block + 2])
        return list(
            zip(
                self.starts[runs].tolist(),
                self.ends[runs].tolist(),
                self.is_full[runs].tolist(),
                strict=True,
            )
        )

    def tiles(self):
        """The runs written out, one entry a kept block.

        Returns:
            `offsets`, `(query blocks + 1,)`: where each row begins;
            `key_blocks`: the kept key blocks, row after row;
            `is_full`: whether each needs no mask.
        """
        lengths = self.ends - self.starts
        before = np.cumsum(lengths) - lengths
        key_blocks = np.arange(self.num_kept) - np.repeat(
            before - self.starts, lengths
        )
        offsets = np.append(0, np.cumsum(self.kept_per_row()))
        return offsets, key_blocks, np.repeat(self.is_full, lengths)

    def __repr__(self):
        return (
            f"BlockPlan({self.query_length} x {self.key_length} in blocks of "
            f"{self.block_size} x {self.key_block_size}: "
            f"{self.num_kept} kept, {self.num_full} full, "
            f"density {self.density:.3g})"
        )


def plan_blocks(
    tile, query_length, key_length, block_size, key_block_size, query_start
):
    """A `BlockPlan` from a function that answers for tiles.

    Args:
        tile: Takes arrays `q0, q1, k0, k1` of slots; returns `(may, must)`.
        query_length, key_length, block_size, key_block_size: As in the plan.
        query_start: Slot of the first query.
    """
    rows = -(-query_length // block_size)
    columns = -(-key_length // key_block_size)

    def ask(row, column, size):
        q0, k0 = row * block_size, column * key_block_size
        q1 = np.minimum(q0 + size * block_size, query_length)
        k1 = np.minimum(k0 + size * key_block_size, key_length)
        return tile(q0 + query_start, q1 + query_start, k0, k1)

    size = 1
    while size < max(rows, columns):
        size *= 2
    runs = [np.empty((4, 0), "int64")]
    corner = np.zeros(1, "int64")
    pending = [(corner, corner, size)] if rows and columns else []
    while pending:
        row, column, size = pending.pop()
        if len(row) > _TILES_AT_ONCE and row[0] != row[-1]:
            cut = _between_rows(row)
            pending.append((row[cut:], column[cut:], size))
            row, column = row[:cut], column[:cut]
        may, must = ask(row, column, size)
        full, partial = may & must, may & ~must
        if size > 1:
            quarters = _quarters(
                row[partial], column[partial], size // 2, rows, columns
            )
            pending.append((*quarters, size // 2))
        kept = full if size > 1 else may
        runs.append(
            _runs(row[kept], column[kept], full[kept], size, rows, columns)
        )
    row, start, end, kind = _merged(np.concatenate(runs, axis=1), columns)
    return BlockPlan(
        query_length,
        key_length,
        block_size,
        key_block_size,
        row_offsets=np.searchsorted(row, np.arange(rows + 1)),
        starts=start,
        ends=end,
        is_full=kind.astype(bool),
    )


def _between_rows(row):
    """A place near the middle of sorted rows where one ends."""
    cut = np.searchsorted(row, row[len(row) // 2])
    return cut or np.searchsorted(row, row[0], "right")


# Sorting one number a tile is several times faster than sorting pairs.


def _quarters(row, column, size, rows, columns):
    """The four quarters of each tile that lie inside, sorted by row."""
    row = np.concatenate([row, row, row + size, row + size])
    column = np.concatenate([column, column + size, column, column + size])
    inside = (row < rows) & (column < columns)
    return divmod(np.sort((row * columns + column)[inside]), columns)


def _runs(row, column, is_full, size, rows, columns):
    """Square tiles as runs (row, start, end, kind), one for each row."""
    row = (row[:, None] + np.arange(size)).ravel()
    place = (row * columns + np.repeat(column, size)) * 2
    place = np.sort((place + np.repeat(is_full, size))[row < rows])
    row, start = divmod(place >> 1, columns)
    end = np.minimum(start + size, columns)
    return _joined(np.stack([row, start, end, place & 1]))


def _merged(runs, columns):
    """Sorts runs and joins neighbours."""
    # Stable: it is the fast one where long stretches are sorted already.
    order = np.argsort(runs[0] * columns + runs[1], kind="stable")
    return _joined(runs[:, order])


def _joined(runs):
    """Joins sorted neighbours of one kind."""
    row, start, end, kind = runs
    differs = (
        (row[1:] != row[:-1])
        | (start[1:] != end[:-1])
        | (kind[1:] != kind[:-1])
    )
    first = np.append(True, differs)[: len(row)]
    last = np.append(differs, True)[: len(row)]
    return np.stack([row[first], start[first], end[last], kind[first]])
