"""Blockwise attention on PyTorch: one block of queries at a time.

A block of queries meets all the keys that it may attend to at once, so that
one softmax is enough and the products are large. The backward pass computes
the weights again. Memory is that of one block's scores.
"""

import dataclasses

import numpy as np
import torch

from keras_transformer._internal.backends.torch_gradient import with_gradient

# Scores held at once; blocks of queries that need more are cut.
_MOST_SCORES = 1 << 26


def attention_by_rows(tiling, table, tensors, one_row_at_a_time):
    """Attention, a block of queries after the other.

    Args:
        tiling: The `Tiling`.
        table: The `TileTable`, in NumPy.
        tensors: By name: `query` (batch, heads, query, key_dim), `key`
            (batch, groups, key, key_dim), `value`; where they are used
            `sinks` (heads,), `bias_0`..., `seed` (2,), the batch's data and
            `query_positions` and `key_positions`, with a row for each batch
            row.
        one_row_at_a_time: Whether each batch row has its own list of tiles
            and is worked on alone.

    Returns:
        (batch, heads, query, value_dim), in the dtype of the values.
    """
    names = list(tensors)
    batch, heads = tensors["query"].shape[:2]
    rows = 1 if one_row_at_a_time else batch
    places = list(_places(tiling, table, batch, heads, rows))

    def walk(values):
        tensors = dict(zip(names, values, strict=True))
        return _Walk(tiling, places, tensors, rows)

    def forward(*values):
        return walk(values).forward(), values

    def backward(values, gradient):
        gradients = walk(values).backward(gradient)
        return tuple(gradients.get(name) for name in names)

    return with_gradient(forward, backward, *tensors.values())


class _Walk:
    """Both passes. Inside, rows and heads are one axis."""

    def __init__(self, tiling, places, tensors, rows):
        self.tiling = tiling
        self.places = places
        self.tensors = tensors
        self.rows = rows
        self.batch, self.heads = tensors["query"].shape[:2]
        self.groups = tensors["key"].shape[1]
        self.query, self.key, self.value = (
            tensors[name].flatten(0, 1).float()
            for name in ("query", "key", "value")
        )
        self.query = self.query * tiling.scale
        self.weights = [
            tensor
            for name, tensor in tensors.items()
            if name.startswith("bias_")
        ]
        if tiling.dropout:
            streams = tiling.dropout_streams(
                tensors["seed"], self.batch, self.heads
            )
            self.streams = [part.flatten(0, 1) for part in streams]

    def forward(self):
        """The outputs."""
        shape = (*self.query.shape[:2], self.value.shape[-1])
        outputs = self.query.new_zeros(shape)
        for block in self._blocks():
            weights, _, _ = self._weights(block)
            if self.tiling.dropout:
                weights *= block.dropout()
            output = torch.bmm(self._grouped(weights), block.value)
            outputs[block.heads, block.queries] = self._by_heads(output)
        outputs = outputs.unflatten(0, (self.batch, self.heads))
        return outputs.to(self.tensors["value"].dtype)

    def backward(self, gradient):
        """The gradients by name."""
        gradient = gradient.flatten(0, 1).float()
        query_gradient, key_gradient, value_gradient = (
            torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (self.query, self.key, self.value)
        )
        sink_gradient = self.query.new_zeros(self.heads)
        weight_gradients = [torch.zeros_like(w) for w in self.weights]
        for block in self._blocks():
            weights, sinks, slope = self._weights(block)
            upstream = self._grouped(gradient[block.heads, block.queries])
            change = self._by_heads(torch.bmm(upstream, block.value.mT))
            attended = weights
            if self.tiling.dropout:
                factors = block.dropout()
                change *= factors
                attended = factors.mul_(weights)
            block.add(value_gradient, self._grouped(attended).mT, upstream)
            if sinks is not None:
                products = (change * weights).sum(-1, keepdim=True)
                sink_gradient -= self._per_head(sinks * products)
            change = torch.ops.aten._softmax_backward_data(
                change, weights, -1, torch.float32
            )
            self._to_bias(block, change, weight_gradients)
            if slope is not None:
                change *= slope
            change = self._grouped(change)
            query_gradient[block.heads, block.queries] = self._by_heads(
                torch.bmm(change, block.key)
            )
            block.add(key_gradient, change.mT, block.query)
        query_gradient *= self.tiling.scale
        gradients = {
            "query": query_gradient.unflatten(0, (self.batch, self.heads)),
            "key": key_gradient.unflatten(0, (self.batch, self.groups)),
            "value": value_gradient.unflatten(0, (self.batch, self.groups)),
        }
        if "sinks" in self.tensors:
            gradients["sinks"] = sink_gradient
        gradients = {
            name: gradient.to(self.tensors[name].dtype)
            for name, gradient in gradients.items()
        }
        for index, weight_gradient in enumerate(weight_gradients):
            gradients[f"bias_{index}"] = weight_gradient
        return gradients

    def _blocks(self):
        return (_Block(self, place) for place in self.places)

    # One block of queries, (rows * heads, queries, keys).

    def _weights(self, block):
        """Attention weights; those of sinks; the slope of the soft cap."""
        scores = self._by_heads(torch.bmm(block.query, block.key.mT))
        slope, cap = None, self.tiling.soft_cap
        if cap is not None:
            capped = torch.tanh(scores / cap)
            scores, slope = cap * capped, 1 - capped * capped
        if self.tiling.bias is not None:
            scores += self._bias(block, self.weights)
        # A full tile shows its keys to every query.
        visible = None if block.place.has_full else False
        for places, allowed in block.masks():
            part = scores.unflatten(0, (self.rows, self.heads))[..., places]
            # Faster than filling, and as right where scores overflow.
            ceiling = torch.where(allowed, torch.inf, -torch.inf)
            torch.minimum(part, ceiling, out=part)
            if visible is not None:
                visible = allowed.any(-1, keepdim=True) | visible
        if "sinks" in self.tensors:
            sinks = self.tensors["sinks"].float()[:, None, None]
            sinks = sinks.repeat(self.rows, 1, 1)
            normalizer = torch.logaddexp(scores.logsumexp(-1, True), sinks)
            weights = scores.sub_(normalizer).exp_()
            return weights, torch.exp(sinks - normalizer), slope
        if visible is None or visible.all():
            return torch.softmax(scores, dim=-1), None, slope
        by_heads = scores.unflatten(0, (self.rows, self.heads))
        # Finite where all is masked, so that the softmax is.
        by_heads.masked_fill_(~visible, 0.0)
        weights = torch.softmax(scores, dim=-1)
        weights.unflatten(0, (self.rows, self.heads)).mul_(visible)
        return weights, None, slope

    def _bias(self, block, weights):
        bias = self.tiling.bias_of(weights, *block.positions())
        shape = (self.rows, self.heads, *bias.shape[-2:])
        return bias.expand(shape).flatten(0, 1)

    def _to_bias(self, block, change, weight_gradients):
        if not self.weights:
            return
        with torch.enable_grad():
            leaves = [w.detach().requires_grad_() for w in self.weights]
            bias = self._bias(block, leaves)
        parts = torch.autograd.grad(bias, leaves, change, allow_unused=True)
        for total, part in zip(weight_gradients, parts, strict=True):
            if part is not None:
                total += part

    def _per_head(self, values):
        return values.view(self.rows, self.heads, -1).sum((0, 2))

    def _grouped(self, tensor):
        """Query heads of a group side by side: (rows * groups, ..., width)."""
        if self.heads == self.groups:
            return tensor
        return tensor.reshape(self.rows * self.groups, -1, tensor.shape[-1])

    def _by_heads(self, tensor):
        """(rows * heads, queries, width)."""
        return tensor.view(self.rows * self.heads, -1, tensor.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Place:
    """A block of queries and the keys that it may attend to.

    Args:
        first_row: Its first batch row.
        queries: Their slots.
        kept: The keys' slots, and their places among the kept keys: a pair
            for each stretch of neighbouring tiles.
        masked: Likewise, the part of them that is masked.
        has_full: Whether any of them are not.
    """

    first_row: int
    queries: slice
    kept: list
    masked: list
    has_full: bool


def _places(tiling, table, batch, heads, rows):
    """The blocks of queries that attend to anything."""
    size = tiling.block_size
    for first in range(0, batch, rows):
        # One list of tiles may serve all batch rows.
        row = first % len(table.columns)
        for index, start in enumerate(table.starts):
            full = table.num_full[row, index]
            kept = table.num_kept[row, index]
            if not kept:
                continue
            columns = table.columns[row, start : start + kept]
            end = min((index + 1) * size, tiling.query_length)
            width = int(kept) * tiling.key_block_size
            step = _MOST_SCORES // (rows * heads * width)
            step = max(8, min(size, step))
            stretches = _stretches(columns, full, tiling)
            for begin in range(index * size, end, step):
                queries = slice(begin, min(begin + step, end))
                yield _Place(first, queries, *stretches, bool(full))


class _Block:
    """What is read of a block of queries and its keys."""

    def __init__(self, walk, place):
        self._walk = walk
        self.place = place
        self.heads = _times(place.first_row, walk.rows, walk.heads)
        self._groups = _times(place.first_row, walk.rows, walk.groups)
        self._rows = _times(place.first_row, walk.rows, 1)
        self.queries = place.queries
        self.query = walk._grouped(walk.query[self.heads, self.queries])
        self.key = self._of_keys(walk.key)
        self.value = self._of_keys(walk.value)

    def masks(self):
        """Where keys are masked, and who may attend to them."""
        walk = self._walk
        for keys, places in self.place.masked:
            data = {}
            for name, part in (
                ("padding_mask", keys),
                ("segment_ids", self.queries),
                ("key_segment_ids", keys),
            ):
                if name in walk.tensors:
                    data[name] = walk.tensors[name][self._rows, part]
            if "prefix_length" in walk.tensors:
                data["prefix_length"] = walk.tensors["prefix_length"][
                    self._rows
                ]
            allowed = walk.tiling.allowed(
                np.arange(self.queries.start, self.queries.stop, dtype="int32"),
                np.arange(keys.start, keys.stop, dtype="int32"),
                data,
            )
            yield places, torch.as_tensor(allowed, device=walk.query.device)

    def dropout(self):
        """What dropout multiplies each weight by."""
        walk = self._walk
        slots = [
            torch.arange(
                keys.start,
                keys.stop,
                dtype=torch.int32,
                device=walk.query.device,
            )
            for keys, _ in self.place.kept
        ]
        streams = [part[self.heads, self.queries] for part in walk.streams]
        return walk.tiling.dropout_factors(streams, torch.cat(slots))

    def positions(self):
        """The positions of the queries and of the keys."""
        tensors = self._walk.tensors
        keys = tensors["key_positions"][self._rows]
        return (
            tensors["query_positions"][self._rows, self.queries],
            torch.cat([keys[:, run] for run, _ in self.place.kept], dim=1),
        )

    def add(self, total, left, right):
        """Adds the product of both to the keys' places."""
        for keys, places in self.place.kept:
            # Faster than adding inside the product, which walks over heads.
            total[self._groups, keys] += torch.bmm(left[:, places], right)

    def _of_keys(self, tensor):
        parts = [tensor[self._groups, keys] for keys, _ in self.place.kept]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _times(first_row, rows, per_row):
    return slice(first_row * per_row, (first_row + rows) * per_row)


def _stretches(columns, num_full, tiling):
    """Neighbouring tiles as one: those that are kept, those that are masked.

    Returns:
        Two lists of pairs: the slots of keys, and their places among the
        kept keys.
    """
    order = np.argsort(columns, kind="stable")
    is_masked = order >= num_full
    columns = columns[order]
    size = tiling.key_block_size
    starts = columns * size
    widths = np.minimum(starts + size, tiling.key_length) - starts
    places = np.cumsum(widths) - widths

    def joined(chosen):
        breaks = np.diff(chosen) != 1
        breaks |= np.diff(columns[chosen]) != 1
        firsts = chosen[np.append(True, breaks)]
        lasts = chosen[np.append(breaks, True)]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            start, place = int(starts[first]), int(places[first])
            width = int(places[last] + widths[last]) - place
            yield slice(start, start + width), slice(place, place + width)

    kept = list(joined(np.arange(len(columns))))
    masked = np.flatnonzero(is_masked)
    return kept, list(joined(masked)) if len(masked) else []
