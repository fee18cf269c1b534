"""How the next token is chosen: the most likely one, or by chance."""

import dataclasses
import math
import numbers

from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.decoding.noise import gumbel_at


@register
@dataclasses.dataclass(frozen=True)
class Greedy:
    """Chooses the most likely token, and the lower id of two equal ones.

    Example:
        >>> generate(model, prompt, decoder=Greedy(), max_new_tokens=20)
    """

    def choose(self, logits, *, seed=None, row_ids=None, positions=None):
        """The most likely token of each row.

        Args:
            logits: (batch, vocabulary).
            seed: Unused, as are the next two: nothing is left to chance.
            row_ids: Unused.
            positions: Unused.

        Returns:
            The tokens, (batch,) int32, and their log-probabilities, (batch,)
            float32.
        """
        logits = ops.cast(logits, "float32")
        centred = logits - ops.max(logits, axis=-1, keepdims=True)
        # Without their signs all zeros are equal, also where -0 is below 0.
        tokens = ops.argmin(ops.abs(centred), axis=-1)
        return tokens, _log_prob(centred, tokens)

    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@register
@dataclasses.dataclass(frozen=True)
class Sample:
    """Draws the token by chance, among all tokens or among the likelier.

    The filters apply in the order of the arguments, each to the distribution
    that the one before left. The noise belongs to the token, the row id and
    the position, so a row draws the same token in any batch.

    Reference: [Holtzman et al., 2020](https://arxiv.org/abs/1904.09751)
    (top-p), [Nguyen et al., 2024](https://arxiv.org/abs/2407.01082) (min-p)

    Args:
        temperature: Divides the logits: below 1 favours likely tokens, above
            1 evens out.
        top_k: How many of the likeliest tokens may be drawn; of equally
            likely ones, those with the lower ids. None keeps all, as does a
            number beyond the vocabulary.
        top_p: The fewest likeliest tokens that have at least this probability
            together may be drawn, in (0, 1].
        min_p: A token may be drawn if it has at least this share of the
            probability of the likeliest one, in [0, 1].

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> decoder = Sample(0.7, top_p=0.9)
        >>> generate(model, prompt, decoder=decoder, max_new_tokens=20)
    """

    temperature: float = 1.0
    _: dataclasses.KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        if not _is_real(self.temperature) or not (
            0 < self.temperature < math.inf
        ):
            checks.fail(
                "a finite number above 0",
                "temperature",
                self.temperature,
                "For the most likely token at each step use `Greedy()`.",
            )
        checks.positive_int(top_k=self.top_k, optional=True)
        top_p, min_p = self.top_p, self.min_p
        if top_p is not None and not (_is_real(top_p) and 0 < top_p <= 1):
            checks.fail("a number in (0, 1] or None", "top_p", top_p)
        if min_p is not None and not (_is_real(min_p) and 0 <= min_p <= 1):
            checks.fail("a number in [0, 1] or None", "min_p", min_p)
        # Plain numbers, which JSON can hold, also where NumPy's came.
        for name, kind in (
            ("temperature", float),
            ("top_k", int),
            ("top_p", float),
            ("min_p", float),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, kind(value))

    def choose(self, logits, *, seed, row_ids, positions):
        """A token of each row, drawn by chance.

        Args:
            logits: (batch, vocabulary). A token at minus infinity is never
                drawn.
            seed: An integer of 32 bits, or a scalar int32 tensor.
            row_ids: (batch,) int32, what tells the rows apart.
            positions: (batch,) int32, where the drawn token will stand.

        Returns:
            The tokens, (batch,) int32, and their log-probabilities, (batch,)
            float32, before temperature and filters.
        """
        logits = ops.cast(logits, "float32")
        # From the largest logit on, no temperature can make it overflow.
        centred = logits - ops.max(logits, axis=-1, keepdims=True)
        ids, scores, kept = self._candidates(logits, centred)
        if self.min_p:
            kept = _both(kept, scores >= math.log(self.min_p))
        # The largest sum of score and Gumbel noise falls on each token with
        # its probability, and the scores need not even be normalised.
        scores = scores + gumbel_at(seed, row_ids, positions, ids)
        if kept is not None:
            scores = ops.where(kept, scores, -math.inf)
        # XLA would compute the noise inside of an argmax, many times slower.
        winners = ops.top_k(scores, 1)[1]
        ids = ops.broadcast_to(ids, ops.shape(scores))
        tokens = ops.take_along_axis(ids, winners, axis=-1)[:, 0]
        return tokens, _log_prob(centred, tokens)

    def _candidates(self, logits, centred):
        """The token ids after top-k, their scores, and which top-p keeps."""
        # Temperatures that float32 cannot hold mean the largest logit alone.
        temperature = max(self.temperature, 1e-30)
        top_p = None if self.top_p == 1 else self.top_p
        vocabulary_size = logits.shape[-1]
        if self.top_k is None or self.top_k >= vocabulary_size:
            ids = ops.arange(vocabulary_size, dtype="int32")[None]
            scores = centred / temperature
            if top_p is None:
                return ids, scores, None
            return ids, scores, _nucleus(logits, ops.exp(scores), top_p)
        sorted_logits, ids = _top_k(logits, self.top_k)
        scores = ops.take_along_axis(centred, ids, axis=-1) / temperature
        if top_p is None:
            return ids, scores, None
        logits = ops.take_along_axis(logits, ids, axis=-1)
        largest = ops.max(logits, axis=-1, keepdims=True)
        weights = ops.exp((sorted_logits - largest) / temperature)
        kept = _sorted_nucleus(logits, sorted_logits, weights, top_p)
        return ids, scores, kept

    def get_config(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def _is_real(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _both(first, second):
    return second if first is None else first & second


def _log_prob(centred, tokens):
    chosen = ops.take_along_axis(centred, tokens[:, None], axis=-1)[:, 0]
    return chosen - ops.log(ops.sum(ops.exp(centred), axis=-1))


def _top_k(logits, k):
    """The k largest logits in falling order, and their ids in another order.

    Backends differ in which of several equal logits they take. Here the lower
    ids win, and equal logits stand in the order of their ids.
    """
    sorted_logits = ops.top_k(logits, k)[0]
    # Not a slice: XLA would no longer see a top-k, and sort all.
    last = ops.min(sorted_logits, axis=-1, keepdims=True)
    size = logits.shape[-1]
    # Keys without ties: first what is above the last, then what equals it.
    # float32 is exact for vocabularies of up to 8 million, and XLA has a fast
    # top-k for nothing else.
    by_id = ops.arange(size, 0, -1, dtype="float32")[None]
    keys = ops.where(logits == last, by_id, 0.0)
    keys = ops.where(logits > last, by_id + size, keys)
    return sorted_logits, ops.cast(ops.top_k(keys, k)[1], "int32")


def _sorted_nucleus(logits, sorted_logits, weights, top_p):
    """Which of `logits` are in the nucleus, from their sorted weights.

    Args:
        logits: (batch, k), in any order in which equal ones go by their ids.
        sorted_logits: The same logits in falling order.
        weights: The unnormalised probabilities of `sorted_logits`.
        top_p: The mass to reach.
    """
    mass = ops.cumsum(weights, axis=-1)
    # The prefixes that fall short; the token after the longest one reaches.
    last = _count(mass < top_p * mass[:, -1:])
    threshold = ops.take_along_axis(sorted_logits, last, axis=-1)
    return _first(logits, threshold, last + 1)


def _nucleus(logits, weights, top_p):
    """Which tokens are in the nucleus, without a sort.

    The logit of the last token in the nucleus is found bit by bit: XLA does 32
    sums over the vocabulary in a quarter of the time of a sort on a CPU.

    Args:
        logits: (batch, vocabulary).
        weights: Their unnormalised probabilities.
        top_p: The mass to reach.
    """
    # Integers in the order of the floats; -0 and 0 are one.
    bits = ops.view(logits, dtype="int32")
    keys = ops.where(bits < 0, -(2**31) - bits, bits)
    target = top_p * ops.sum(weights, axis=-1, keepdims=True)

    def mass(tokens):
        return ops.sum(ops.where(tokens, weights, 0.0), axis=-1, keepdims=True)

    def with_next_bit(step, threshold):
        bit = ops.left_shift(ops.ones_like(threshold), 31 - step)
        candidate = threshold + bit
        reaches = mass(keys >= candidate) >= target
        return ops.where(reaches, candidate, threshold)

    smallest = ops.full_like(keys[:, :1], -(2**31))
    threshold = ops.fori_loop(0, 32, with_next_bit, smallest)
    above = keys > threshold
    # Of the tokens with exactly this logit, as many as it takes.
    weight = ops.max(ops.where(keys == threshold, weights, 0.0), -1, True)
    missing = ops.ceil((target - mass(above)) / ops.maximum(weight, 1e-30))
    missing = ops.cast(ops.clip(missing, 1, logits.shape[-1]), "int32")
    return _first(keys, threshold, _count(above) + missing)


def _first(values, threshold, count):
    """Marks the `count` largest values, of equal ones those that come first.

    Args:
        values: (batch, size).
        threshold: (batch, 1), the smallest value to mark.
        count: (batch, 1) int32.
    """
    above, equal = values > threshold, values == threshold
    rank = ops.cumsum(ops.cast(equal, "int32"), axis=-1)
    return above | (equal & (rank <= count - _count(above)))


def _count(marks):
    return ops.sum(ops.cast(marks, "int32"), axis=-1, keepdims=True)
