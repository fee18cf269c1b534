"""Corrupted inputs for denoising: masked tokens (BERT) and spans (T5)."""

import numpy as np

from keras_transformer._internal import checks
from keras_transformer.training.arrays import mask_array, token_array


def mask_tokens(
    token_ids,
    mask_token: int,
    *,
    vocabulary_size: int,
    seed,
    rate: float = 0.15,
    mask_share: float = 0.8,
    random_share: float = 0.1,
    special_tokens=(),
    padding_mask=None,
):
    """Hides some tokens of each row, for the model to restore.

    In each row, `rate` of the tokens that may be chosen (rounded; at least one
    if there is one) are drawn. Of those, `mask_share` become `mask_token`,
    `random_share` become a random token and the rest stay as they are: the
    model cannot tell which of the tokens that it sees are right.

    Reference: [Devlin et al., 2018](https://arxiv.org/abs/1810.04805),
    section 3.1.

    Args:
        token_ids: `(batch_size, length)` integers.
        mask_token: Token that stands for a hidden one.
        vocabulary_size: Random tokens are below it.
        seed: An integer, or a `numpy.random.Generator`: with one of those,
            each call (each epoch) hides other tokens.
        rate: Share of tokens to choose.
        mask_share: Share of the chosen tokens that become `mask_token`.
        random_share: Share of the chosen tokens that become a random one.
        special_tokens: Tokens that are neither chosen nor put in at random.
        padding_mask: `(batch_size, length)`, True for tokens that may be
            chosen.

    Returns:
        A tuple of the corrupted inputs, the targets (`token_ids`; both int32)
        and the sample weights (float32: 1 for chosen tokens, else 0), each
        `(batch_size, length)`.

    Raises:
        ValueError: If an argument has the wrong shape or is out of range.

    Example:

    ```python
    inputs, targets, weights = mask_tokens(
        token_ids, 4, vocabulary_size=1000, special_tokens=[0, 1], seed=0
    )
    model.fit(inputs, targets, sample_weight=weights)
    ```
    """
    token_ids = token_array(ndim=2, token_ids=token_ids)
    checks.positive_int(vocabulary_size=vocabulary_size)
    checks.non_negative_int(mask_token=mask_token)
    checks.rate(rate=rate)
    for name, share in (
        ("mask_share", mask_share),
        ("random_share", random_share),
    ):
        if not 0 <= share <= 1:
            checks.fail("a share in [0, 1]", name, share)
    # A hair above 1 is rounding: 0.7 + 0.2 + 0.1 is.
    if mask_share + random_share > 1 + 1e-9:
        checks.fail(
            f"at most 1 - mask_share = {1 - mask_share:.3g}",
            "random_share",
            random_share,
        )
    special_tokens = token_array(ndim=1, special_tokens=special_tokens)
    ordinary = np.setdiff1d(
        np.arange(vocabulary_size, dtype="int32"),
        np.append(special_tokens, mask_token),
    )
    if not len(ordinary):
        checks.fail(
            "larger than the number of special tokens",
            "vocabulary_size",
            vocabulary_size,
        )
    generator = np.random.default_rng(seed)

    may_choose = mask_array(token_ids.shape, padding_mask)
    may_choose &= ~np.isin(token_ids, special_tokens)
    num_candidates = may_choose.sum(axis=1)
    num_chosen = np.round(num_candidates * rate).astype("int64")
    if rate > 0:
        num_chosen = np.minimum(np.maximum(num_chosen, 1), num_candidates)
    # The candidates come first in a random order; the others never count.
    keys = np.where(may_choose, generator.random(token_ids.shape), 2.0)
    ranks = np.argsort(np.argsort(keys, axis=1), axis=1)
    is_chosen = ranks < num_chosen[:, None]

    fate = generator.random(token_ids.shape)
    random_tokens = generator.choice(ordinary, size=token_ids.shape)
    corrupted = np.where(fate < mask_share, mask_token, token_ids)
    becomes_random = (fate >= mask_share) & (fate < mask_share + random_share)
    corrupted = np.where(becomes_random, random_tokens, corrupted)
    inputs = np.where(is_chosen, corrupted, token_ids).astype("int32")
    return inputs, token_ids, is_chosen.astype("float32")


def corrupt_spans(
    token_ids,
    sentinels,
    *,
    seed,
    rate: float = 0.15,
    mean_span_length: float = 3.0,
):
    """Replaces spans of a sequence by sentinels; the targets are the spans.

    For the tokens `a b c d e f`, the spans `b c` and `f` and the sentinels `X`
    `Y` `Z`, the inputs are `a X d e Y` and the targets `X b c Y f Z`. Spans do
    not touch; their number and their total length are fixed by the arguments,
    and where they are is uniformly random.

    Reference: [Raffel et al., 2019](https://arxiv.org/abs/1910.10683),
    section 3.1.4. (Its code makes each sequence end in a span; here, like in
    the paper's figure, it may or may not.)

    Args:
        token_ids: `(length,)` integers, at least two. Documents differ in
            length, and so do the results: corrupt one at a time, and pad with
            `keras.utils.pad_sequences`.
        sentinels: Tokens that stand for spans, in the order of their use, one
            more than there are spans.
        seed: An integer, or a `numpy.random.Generator`: with one of those,
            each call (each epoch) replaces other spans.
        rate: Share of tokens in spans (rounded; at least one, never all).
        mean_span_length: Mean length of a span.

    Returns:
        A tuple of the inputs and the targets, both `(new_length,)` int32.

    Raises:
        ValueError: If there are fewer than two tokens or too few sentinels, or
            an argument is out of range.

    Example:

    ```python
    # The sentinels of T5, in the order that it uses them.
    sentinels = range(32099, 31999, -1)
    pairs = [corrupt_spans(d, sentinels, seed=generator) for d in documents]
    ```
    """
    token_ids = token_array(ndim=1, token_ids=token_ids)
    sentinels = token_array(ndim=1, sentinels=list(sentinels))
    checks.rate(rate=rate)
    checks.positive(rate=rate)
    checks.positive(mean_span_length=mean_span_length)
    length = len(token_ids)
    if length < 2:
        checks.fail(
            "at least two tokens",
            "token_ids",
            token_ids.tolist(),
            "One must stay and one must go.",
        )
    generator = np.random.default_rng(seed)
    num_noise = int(np.clip(round(length * rate), 1, length - 1))
    num_kept = length - num_noise
    num_spans = max(round(num_noise / mean_span_length), 1)
    # A token must stay between two spans.
    num_spans = min(num_spans, num_noise, num_kept + 1)
    if len(sentinels) < num_spans + 1:
        checks.fail(
            f"at least {num_spans + 1} tokens for {num_spans} spans",
            "len(sentinels)",
            len(sentinels),
        )
    spans = _random_parts(generator, num_noise, num_spans)
    # The first and the last gap may be empty: one more, then one less.
    gaps = _random_parts(generator, num_kept + 2, num_spans + 1)
    gaps[[0, -1]] -= 1

    inputs, targets, place = [], [], 0
    for span, gap, sentinel in zip(spans, gaps, sentinels, strict=False):
        inputs += [token_ids[place : place + gap], [sentinel]]
        place += gap
        targets += [[sentinel], token_ids[place : place + span]]
        place += span
    inputs.append(token_ids[place:])
    targets.append([sentinels[num_spans]])
    return (
        np.concatenate(inputs).astype("int32"),
        np.concatenate(targets).astype("int32"),
    )


def _random_parts(generator, total, num_parts):
    """`num_parts` positive integers of sum `total`, uniformly random."""
    cuts = generator.choice(total - 1, size=num_parts - 1, replace=False) + 1
    return np.diff(np.sort(cuts), prepend=0, append=total)
