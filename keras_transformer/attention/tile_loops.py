"""Blockwise attention as compiled loops over tiles (JAX and TensorFlow).

Forward, each query block meets its key blocks one after another and keeps a
running maximum, sum and output ("online softmax"). Backward, the weights of
each tile are computed again from the saved log-sum-exp. Only tiles of the
table are visited, and only those that are not full are masked.

References: [Milakov and Gimelshein, 2018](https://arxiv.org/abs/1805.02867);
[Dao et al., 2022](https://arxiv.org/abs/2205.14135), algorithms 1 and 4;
[Dao, 2023](https://arxiv.org/abs/2307.08691).
"""

from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer.attention.tiling import (
    BATCH_DATA,
    dropout_factors,
    dropout_streams,
)

# Below any score that float32 still tells from its neighbours, and finite, so
# that differences of two of them are numbers.
_LOWEST = -1e30


def attention_in_loops(tiling, starts, tensors: dict):
    """Attention, block by block.

    Args:
        tiling: The `Tiling`.
        starts: int32 NumPy `(query blocks,)`, as in `TileTable`.
        tensors: By name. `query` (loops, rows, heads, query, key_dim), `key`
            (loops, rows, groups, key, key_dim) and `value`, of lengths that
            fill whole blocks; `columns`, `num_full` and `num_kept` as in
            `TileTable`; where they are used `sinks` (heads,), `bias_0`...,
            `seed` (2,), the batch's data and `query_positions` and
            `key_positions`, all (loops * rows, length).

    Returns:
        (loops, rows, heads, query, value_dim), in the dtype of the values.
    """
    names = list(tensors)

    def forward(*values):
        walk = _Walk(tiling, starts, dict(zip(names, values, strict=True)))
        outputs, normalizers = walk.forward()
        return outputs, (values, outputs, normalizers)

    def backward(saved, gradient):
        values, outputs, normalizers = saved
        walk = _Walk(tiling, starts, dict(zip(names, values, strict=True)))
        gradients = walk.backward(outputs, normalizers, gradient)
        return tuple(gradients.get(name) for name in names)

    return backend.with_gradient(forward, backward, *tensors.values())


class _Walk:
    """The two walks over the tiles of one attention."""

    def __init__(self, tiling, starts, tensors):
        self.tiling = tiling
        self.tensors = tensors
        self.starts = ops.convert_to_tensor(starts)
        self.loops, self.rows, self.heads = ops.shape(tensors["query"])[:3]
        self.groups = tensors["key"].shape[2]
        self.weights = [
            tensor
            for name, tensor in tensors.items()
            if name.startswith("bias_")
        ]

    # The walks.

    def forward(self):
        """The outputs and the log-sum-exp of each query's scores."""
        shape = ops.shape(self.tensors["query"])[:4]
        value = self.tensors["value"]
        outputs = ops.zeros((*shape, value.shape[-1]), value.dtype)
        normalizers = ops.zeros(shape, "float32")

        def visit(place, state):
            outputs, normalizers = state
            loop, block = self._place(place)
            query = self._queries("query", loop, block) * self.tiling.scale
            shape = ops.shape(query)[:3]
            state = (
                ops.zeros((*shape, value.shape[-1]), "float32"),
                ops.full(shape, _LOWEST, "float32"),
                ops.zeros(shape, "float32"),
            )
            state = self._over_tiles(
                loop,
                block,
                lambda tile, state: self._absorb(tile, query, state),
                state,
            )
            output, highest, total = self._with_sinks(*state)
            any_key = total > 0
            total = ops.where(any_key, total, 1.0)
            output = ops.cast(output / total[..., None], value.dtype)
            normalizer = ops.where(any_key, highest + ops.log(total), 0.0)
            start = (loop, 0, 0, block * self.tiling.block_size)
            return (
                ops.slice_update(outputs, (*start, 0), output[None]),
                ops.slice_update(normalizers, start, normalizer[None]),
            )

        return self._over_queries(visit, (outputs, normalizers))

    def backward(self, outputs, normalizers, gradient):
        """The gradients by name."""
        tensors = self.tensors
        products = ops.sum(
            ops.cast(outputs, "float32") * ops.cast(gradient, "float32"), -1
        )
        self.tensors = {
            **tensors,
            "gradient": gradient,
            "normalizer": normalizers,
            "product": products,
        }
        state = tuple(
            ops.zeros(ops.shape(tensors[name]), "float32")
            for name in ("query", "key", "value")
        )
        weights = tuple(ops.zeros_like(weight) for weight in self.weights)

        def visit(place, state):
            query_gradient, *rest = state
            loop, block = self._place(place)
            of_queries = tuple(
                self._queries(name, loop, block)
                for name in ("query", "gradient", "normalizer", "product")
            )
            query, *others = of_queries
            of_queries = (query * self.tiling.scale, *others)
            mine, *rest = self._over_tiles(
                loop,
                block,
                lambda tile, state: self._retrace(tile, of_queries, state),
                (ops.zeros(ops.shape(query), "float32"), *rest),
            )
            start = (loop, 0, 0, block * self.tiling.block_size, 0)
            mine = (mine * self.tiling.scale)[None]
            return (ops.slice_update(query_gradient, start, mine), *rest)

        query, key, value, *weights = self._over_queries(
            visit, (*state, *weights)
        )
        gradients = {"query": query, "key": key, "value": value}
        for name in gradients:
            gradients[name] = ops.cast(gradients[name], tensors[name].dtype)
        for index, weight in enumerate(weights):
            gradients[f"bias_{index}"] = weight
        if "sinks" in tensors:
            sinks = ops.cast(tensors["sinks"], "float32")
            taken = ops.exp(sinks[:, None] - normalizers) * products
            gradients["sinks"] = ops.cast(
                -ops.sum(taken, axis=(0, 1, 3)), tensors["sinks"].dtype
            )
        return gradients

    # One tile.

    def _absorb(self, tile, query, state):
        """Adds a tile's keys to the running softmax of its queries."""
        output, highest, total = state
        scores, _ = self._scores(tile, query)
        if tile.allowed is not None:
            scores = ops.where(tile.allowed, scores, _LOWEST)
        new_highest = ops.maximum(highest, ops.max(scores, axis=-1))
        weights = ops.exp(scores - new_highest[..., None])
        if tile.allowed is not None:
            # A row that sees nothing here may have seen nothing before.
            weights = ops.where(tile.allowed, weights, 0.0)
        shrink = ops.exp(highest - new_highest)
        total = total * shrink + ops.sum(weights, axis=-1)
        if tile.dropout is not None:
            weights = weights * tile.dropout
        output = output * shrink[..., None] + self._times(weights, tile.value)
        return output, new_highest, total

    def _retrace(self, tile, of_queries, state):
        """Adds what a tile contributes to the gradients."""
        query, gradient, normalizer, product = of_queries
        query_gradient, key_gradient, value_gradient, *weights = state
        scores, slope = self._scores(tile, query)
        attention = ops.exp(scores - normalizer[..., None])
        if tile.allowed is not None:
            attention = ops.where(tile.allowed, attention, 0.0)
        change = self._products(gradient, tile.value)
        kept = attention
        if tile.dropout is not None:
            kept = attention * tile.dropout
            change = change * tile.dropout
        value_gradient = tile.add(
            value_gradient, self._transposed_times(kept, gradient)
        )
        change = attention * (change - product[..., None])
        if self.weights:
            weights = [
                total + part
                for total, part in zip(
                    weights,
                    backend.pulled_back(
                        lambda *weights: self._bias(weights, tile),
                        self.weights,
                        change,
                    ),
                    strict=True,
                )
            ]
        if slope is not None:
            change = change * slope
        query_gradient = query_gradient + self._times(change, tile.key)
        key_gradient = tile.add(
            key_gradient, self._transposed_times(change, query)
        )
        return query_gradient, key_gradient, value_gradient, *weights

    def _scores(self, tile, query):
        """The scores, and the slope of the soft cap where there is one."""
        scores, slope = self._products(query, tile.key), None
        cap = self.tiling.soft_cap
        if cap is not None:
            capped = ops.tanh(scores / cap)
            scores, slope = cap * capped, 1.0 - capped * capped
        if self.tiling.bias is not None:
            scores = scores + self._bias(self.weights, tile)
        return scores, slope

    def _bias(self, weights, tile):
        bias = self.tiling.bias_of(weights, *tile.positions)
        shape = (self.rows, self.heads, *ops.shape(bias)[-2:])
        return ops.broadcast_to(bias, shape)

    def _with_sinks(self, output, highest, total):
        if "sinks" not in self.tensors:
            return output, highest, total
        sinks = ops.cast(self.tensors["sinks"], "float32")[:, None]
        new_highest = ops.maximum(highest, sinks)
        shrink = ops.exp(highest - new_highest)
        total = total * shrink + ops.exp(sinks - new_highest)
        return output * shrink[..., None], new_highest, total

    # Products, with the query heads of a group side by side.

    def _products(self, queries, keys):
        grouped = self._grouped(queries)
        return self._by_heads(
            ops.matmul(grouped, ops.swapaxes(keys, -1, -2)), queries
        )

    def _times(self, weights, values):
        return self._by_heads(
            ops.matmul(self._grouped(weights), values), weights
        )

    def _transposed_times(self, weights, queries):
        return ops.matmul(
            ops.swapaxes(self._grouped(weights), -1, -2),
            self._grouped(queries),
        )

    def _grouped(self, tensor):
        rows, heads, queries, width = ops.shape(tensor)
        if heads == self.groups:
            return tensor
        together = heads // self.groups * queries
        return ops.reshape(tensor, (rows, self.groups, together, width))

    def _by_heads(self, tensor, like):
        if self.heads == self.groups:
            return tensor
        return ops.reshape(tensor, (*ops.shape(like)[:3], tensor.shape[-1]))

    # Places.

    def _over_queries(self, visit, state):
        places = self.loops * self.tiling.num_query_blocks
        return ops.fori_loop(0, places, visit, state)

    def _over_tiles(self, loop, block, visit, state):
        """Visits the full tiles of a query block, then those to mask."""
        tensors = self.tensors
        # One list of tiles may serve all loops.
        shared = tensors["columns"].shape[0] == 1
        row = 0 if shared else loop
        start = self.starts[block]
        full = tensors["num_full"][row, block]
        kept = tensors["num_kept"][row, block]

        def visit_with(masked):
            def at(index, state):
                column = tensors["columns"][row, start + index]
                return visit(_Tile(self, loop, block, column, masked), state)

            return at

        state = ops.fori_loop(0, full, visit_with(False), state)
        return ops.fori_loop(full, kept, visit_with(True), state)

    def _place(self, place):
        blocks = self.tiling.num_query_blocks
        return place // blocks, place % blocks

    def _queries(self, name, loop, block):
        """A block of queries: float32 (rows, heads, queries, ...)."""
        size = self.tiling.block_size
        return _part(self.tensors[name], loop, block * size, size)


class _Tile:
    """What is read of one tile."""

    def __init__(self, walk, loop, block, column, masked):
        tiling, tensors = walk.tiling, walk.tensors
        self._loop, self._size = loop, tiling.key_block_size
        self._start = column * self._size
        self.key, self.value = (
            _part(tensors[name], loop, self._start, self._size)
            for name in ("key", "value")
        )
        query_start = block * tiling.block_size
        query_slots = query_start + ops.arange(tiling.block_size, dtype="int32")
        key_slots = self._start + ops.arange(self._size, dtype="int32")
        starts = {
            "padding_mask": (self._start, self._size),
            "segment_ids": (query_start, tiling.block_size),
            "key_segment_ids": (self._start, self._size),
            "query_positions": (query_start, tiling.block_size),
            "key_positions": (self._start, self._size),
        }
        rows, first = walk.rows, loop * walk.rows

        def data(name):
            if name not in tensors:
                return None
            start, size = starts[name]
            return ops.slice(tensors[name], (first, start), (rows, size))

        self.positions = data("query_positions"), data("key_positions")
        self.allowed = None
        if masked:
            values = {name: data(name) for name in BATCH_DATA}
            if "prefix_length" in tensors:
                values["prefix_length"] = ops.slice(
                    tensors["prefix_length"], (first,), (rows,)
                )
            self.allowed = tiling.allowed(query_slots, key_slots, values)
        self.dropout = None
        if tiling.dropout:
            streams = dropout_streams(
                tensors["seed"],
                first + ops.arange(rows, dtype="int32"),
                walk.heads,
                query_slots,
            )
            self.dropout = dropout_factors(tiling.dropout, streams, key_slots)

    def add(self, total, part):
        """Adds to the keys' places in (loops, rows, groups, key, dim)."""
        place = (self._loop, 0, 0, self._start, 0)
        old = ops.slice(total, place, (1, *ops.shape(part)))
        return ops.slice_update(total, place, old + part[None])


def _part(tensor, loop, start, size):
    """`tensor[loop, :, :, start : start + size]` as float32."""
    rank = len(tensor.shape)
    place = (loop, 0, 0, start, 0)[:rank]
    shape = list(ops.shape(tensor))
    shape[0], shape[3] = 1, size
    return ops.cast(ops.slice(tensor, place, shape)[0], "float32")
