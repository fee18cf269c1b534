"""Losses and gradients of a de-embedding, chunk by chunk of tokens."""

import dataclasses

from keras import ops

from keras_transformer._internal.backends import backend


def weighted(losses, weights):
    """The product, but 0 without weight, where a loss may be NaN."""
    return ops.where(weights == 0, 0.0, losses * weights)


@dataclasses.dataclass(frozen=True)
class ChunkedHead:
    """Losses and gradients, chunk by chunk.

    Vectors are (chunks, chunk, model_dim), ids and weights (chunks, chunk).
    Each `bias` is a sequence of one or none.

    Args:
        transposed: Whether the kernel is (vocabulary_size, model_dim).
        soft_cap: None or `c`: logits become `c * tanh(logits / c)`.
        smoothing: Share of the probability that is spread evenly.
        dtype: That of the logits and of sums.
    """

    transposed: bool
    soft_cap: float | None
    smoothing: float
    dtype: str

    def losses(self, vectors, ids, kernel, *bias):
        """The losses (chunks, chunk), and what `gradients` needs."""

        def step(_, vectors, ids):
            logits = self._logits(vectors, kernel, bias)
            normalizer = ops.logsumexp(logits, axis=-1)
            return (), (self._losses(logits, normalizer, ids), normalizer)

        empty = ops.zeros(ops.shape(ids), self.dtype)
        _, (losses, normalizers) = _for_each_chunk(
            step, (), (empty, ops.zeros_like(empty)), vectors, ids
        )
        return losses, (vectors, ids, normalizers, kernel, *bias)

    def gradients(self, saved, upstream):
        """Gradients of the arguments of `losses`, from logits made again."""

        vectors, ids, normalizers, kernel, *bias = saved

        def step(totals, vectors, ids, normalizer, upstream):
            logits = self._logits(vectors, kernel, bias)
            return self._add_gradients(
                totals, logits, normalizer, ids, upstream, vectors, kernel
            )

        totals, (of_vectors,) = _for_each_chunk(
            step,
            self._zero_gradients(kernel, bias),
            (ops.zeros_like(vectors),),
            vectors,
            ids,
            normalizers,
            upstream,
        )
        of_kernel, *of_bias = totals
        return of_vectors, None, ops.cast(of_kernel, kernel.dtype), *of_bias

    def total_and_gradients(self, vectors, ids, weights, kernel, *bias):
        """The sum of the weighted losses, and its gradients."""

        def step(totals, vectors, ids, weights):
            total, *totals = totals
            logits = self._logits(vectors, kernel, bias)
            normalizer = ops.logsumexp(logits, axis=-1)
            losses = self._losses(logits, normalizer, ids)
            totals, (of_vectors,) = self._add_gradients(
                totals, logits, normalizer, ids, weights, vectors, kernel
            )
            total += ops.sum(weighted(losses, weights))
            return (total, *totals), (of_vectors, losses)

        totals, (of_vectors, losses) = _for_each_chunk(
            step,
            (ops.zeros((), self.dtype), *self._zero_gradients(kernel, bias)),
            (ops.zeros_like(vectors), ops.zeros_like(weights)),
            vectors,
            ids,
            weights,
        )
        total, *of_parameters = totals
        return total, (of_vectors, losses, *of_parameters)

    def scaled_gradients(self, saved, upstream):
        """Gradients of the arguments of `total_and_gradients`."""

        def scaled(gradient):
            product = ops.cast(gradient, self.dtype) * upstream
            return ops.cast(product, gradient.dtype)

        of_vectors, losses, of_kernel, *of_bias = saved
        return (
            scaled(of_vectors),
            None,
            scaled(losses),
            # Only now: sums of half precision could have overflowed.
            ops.cast(scaled(of_kernel), of_vectors.dtype),
            *map(scaled, of_bias),
        )

    @property
    def _axes(self):
        return "vd" if self.transposed else "dv"

    def _logits(self, vectors, kernel, bias):
        logits = ops.einsum(f"cd,{self._axes}->cv", vectors, kernel)
        logits = ops.cast(logits, self.dtype)
        if bias:
            logits = logits + bias[0]
        if self.soft_cap is not None:
            logits = self.soft_cap * ops.tanh(logits / self.soft_cap)
        return logits

    def _losses(self, logits, normalizer, ids):
        last = logits.shape[-1] - 1
        places = ops.clip(ids, 0, last)[:, None]
        target_logits = ops.take_along_axis(logits, places, axis=-1)[:, 0]
        target_logits = ops.where(ids > last, float("nan"), target_logits)
        # Without smoothing the mean must not act: it may be infinite.
        if not self.smoothing:
            return normalizer - target_logits
        return (
            normalizer
            - (1 - self.smoothing) * target_logits
            - self.smoothing * ops.mean(logits, axis=-1)
        )

    def _zero_gradients(self, kernel, bias):
        # Sums over many chunks: half precision would lose the small ones.
        return tuple(
            ops.zeros(parameter.shape, self.dtype)
            for parameter in (kernel, *bias)
        )

    def _add_gradients(
        self, totals, logits, normalizer, ids, upstream, vectors, kernel
    ):
        """The totals with this chunk's share, and the vectors' gradients."""
        num_logits = logits.shape[-1]
        gradient = ops.exp(logits - normalizer[:, None])
        gradient = _minus_one_hot(gradient, ids, 1 - self.smoothing)
        if self.smoothing:
            gradient -= self.smoothing / num_logits
        gradient *= upstream[:, None]
        if self.soft_cap is not None:
            gradient *= 1 - ops.square(logits / self.soft_cap)
        of_kernel, *of_bias = totals
        if of_bias:
            of_bias = (of_bias[0] + ops.sum(gradient, axis=0),)
        gradient = ops.cast(gradient, kernel.dtype)
        of_vectors = ops.einsum(f"cv,{self._axes}->cd", gradient, kernel)
        pair = (gradient, vectors) if self.transposed else (vectors, gradient)
        names = "cv,cd->vd" if self.transposed else "cd,cv->dv"
        # Where tensors are mutable, this adds in place.
        of_kernel += ops.cast(ops.einsum(names, *pair), self.dtype)
        return (of_kernel, *of_bias), (of_vectors,)


def _for_each_chunk(step, totals, buffers, *arrays):
    """Runs `totals, outputs = step(totals, *chunks)` along the first axes.

    Returns the totals and the buffers with the outputs written in.
    """
    num_chunks = ops.shape(arrays[0])[0]
    if backend.RUNS_STEP_BY_STEP:
        for index in range(num_chunks):
            totals, outputs = step(totals, *(rows[index] for rows in arrays))
            for buffer, output in zip(buffers, outputs, strict=True):
                buffer[index] = output
        return totals, buffers

    def body(index, state):
        totals, buffers = state
        totals, outputs = step(totals, *(rows[index] for rows in arrays))
        buffers = tuple(
            ops.slice_update(
                buffer, (index, *[0] * len(output.shape)), output[None]
            )
            for buffer, output in zip(buffers, outputs, strict=True)
        )
        return totals, buffers

    return ops.fori_loop(0, num_chunks, body, (totals, buffers))


def _minus_one_hot(gradient, ids, value):
    if backend.RUNS_STEP_BY_STEP:
        # Compilers fuse the comparison below; without one it is dear.
        last = gradient.shape[-1] - 1
        places = ops.clip(ids, 0, last)
        gradient[ops.arange(len(ids)), places] -= ops.where(
            ids > last, 0.0, value
        )
        return gradient
    is_target = ops.arange(gradient.shape[-1], dtype="int32") == ids[:, None]
    return gradient - ops.where(is_target, value, 0.0)
