import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_transformer.training import corrupt_spans, mask_tokens

VOCABULARY_SIZE, MASK = 50, 3
SPECIAL = [0, 1, 2]


def token_rows(num_rows=200, length=40):
    generator = np.random.default_rng(0)
    return generator.integers(4, VOCABULARY_SIZE, (num_rows, length))


def corrupt(tokens, **options):
    options = {"seed": 0, "special_tokens": SPECIAL, **options}
    return mask_tokens(tokens, MASK, vocabulary_size=VOCABULARY_SIZE, **options)


def test_mask_tokens_changes_chosen_tokens_only_and_keeps_the_targets():
    tokens = token_rows()
    inputs, targets, weights = corrupt(tokens)
    np.testing.assert_array_equal(targets, tokens)
    np.testing.assert_array_equal(inputs[weights == 0], tokens[weights == 0])
    assert set(np.unique(weights)) == {0, 1}
    assert inputs.dtype == targets.dtype == np.int32
    assert weights.dtype == np.float32


def test_mask_tokens_chooses_the_rate_in_each_row():
    _, _, weights = corrupt(token_rows())
    assert (weights.sum(axis=1) == 6).all()  # 15 % of 40
    _, _, weights = corrupt(token_rows(), rate=0.5)
    assert (weights.sum(axis=1) == 20).all()
    _, _, weights = corrupt(token_rows(length=2))
    assert (weights.sum(axis=1) == 1).all()
    inputs, _, weights = corrupt(token_rows(), rate=0)
    assert not weights.any()
    np.testing.assert_array_equal(inputs, token_rows())


def test_mask_tokens_chooses_each_place_equally_often():
    _, _, weights = corrupt(token_rows(num_rows=4000))
    # Binomial(4000, 0.15): five standard deviations.
    deviation = np.sqrt(0.15 * 0.85 / 4000)
    assert np.abs(weights.mean(axis=0) - 0.15).max() < 5 * deviation


@pytest.mark.parametrize(
    "shares", [(0.8, 0.1), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)]
)
def test_mask_tokens_masks_replaces_and_keeps_by_the_shares(shares):
    mask_share, random_share = shares
    tokens = token_rows(num_rows=4000)
    inputs, _, weights = corrupt(
        tokens, mask_share=mask_share, random_share=random_share
    )
    chosen, original = inputs[weights > 0], tokens[weights > 0]
    is_kept = (chosen == original).mean()
    num_ordinary = VOCABULARY_SIZE - len(SPECIAL) - 1
    # A random token may be the original one.
    expected_kept = 1 - mask_share - random_share + random_share / num_ordinary
    deviation = 5 * np.sqrt(0.25 / len(chosen))
    assert abs((chosen == MASK).mean() - mask_share) < deviation
    assert abs(is_kept - expected_kept) < deviation
    replaced = chosen[(chosen != MASK) & (chosen != original)]
    if random_share:
        assert set(replaced) == set(range(4, VOCABULARY_SIZE))
    else:
        assert not len(replaced)


def test_mask_tokens_never_chooses_padding_or_special_tokens():
    tokens = token_rows()
    tokens[:, 0], tokens[:, 20] = 1, 2
    is_real = np.arange(40) < np.arange(200)[:, None] % 41
    _, _, weights = corrupt(tokens, padding_mask=is_real, rate=0.9)
    hidden = ~is_real | np.isin(tokens, SPECIAL)
    assert not weights[hidden].any()
    num_candidates = (~hidden).sum(axis=1)
    expected = np.maximum(np.round(num_candidates * 0.9), num_candidates > 0)
    np.testing.assert_array_equal(weights.sum(axis=1), expected)


def test_mask_tokens_repeats_with_a_seed_and_goes_on_with_a_generator():
    tokens = token_rows()
    first, again, other = (corrupt(tokens, seed=s)[0] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    generator = np.random.default_rng(1)
    epochs = [corrupt(tokens, seed=generator)[0] for _ in range(2)]
    np.testing.assert_array_equal(epochs[0], first)
    assert (epochs[1] != first).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0}, r"`rate` must be a rate in \[0, 1\).*=1.0"),
        ({"mask_share": 1.2}, r"`mask_share` must be a share in.*=1.2"),
        ({"random_share": -1}, r"`random_share` must be a share in.*=-1"),
        ({"random_share": 0.5}, r"`random_share` must be at most.*0.2.*=0.5"),
        ({"special_tokens": 0}, r"`special_tokens.shape` must be.*rank 1"),
        (
            {"special_tokens": range(VOCABULARY_SIZE)},
            r"`vocabulary_size` must be larger than the number of special",
        ),
        ({"padding_mask": [True]}, r"`padding_mask.shape` must be of the sha"),
    ],
)
def test_mask_tokens_rejects_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        corrupt(token_rows(), **options)


def test_mask_tokens_rejects_bad_token_ids():
    with pytest.raises(
        ValueError, match=r"`mask_token` must be an integer.*-1"
    ):
        mask_tokens(token_rows(), -1, vocabulary_size=9, seed=0)
    with pytest.raises(
        ValueError, match=r"`vocabulary_size` must be a pos.*=0"
    ):
        mask_tokens(token_rows(), 1, vocabulary_size=0, seed=0)
    with pytest.raises(ValueError, match=r"`token_ids.shape` must be an array"):
        corrupt([1, 2])


SENTINELS = np.arange(1000, 1100)


def restored(inputs, targets):
    """The sequence, by putting the spans back, and their number and lengths."""
    spans, current = {}, None
    for token in targets:
        if token >= 1000:
            current = token
            spans[current] = []
        else:
            spans[current].append(token)
    sequence = []
    for token in inputs:
        sequence += spans[token] if token >= 1000 else [token]
    return sequence, spans


@given(
    st.integers(2, 60),
    st.floats(0.01, 0.99),
    st.floats(0.5, 8),
    st.integers(0, 2**32 - 1),
)
def test_spans_and_what_is_left_of_them_make_the_sequence(
    length, rate, mean_span_length, seed
):
    tokens = np.arange(length)
    inputs, targets = corrupt_spans(
        tokens,
        SENTINELS,
        rate=rate,
        mean_span_length=mean_span_length,
        seed=seed,
    )
    sequence, spans = restored(inputs, targets)
    assert sequence == tokens.tolist()
    # The sentinels in order, one empty "span" at the end of the targets.
    assert list(spans) == SENTINELS[: len(spans)].tolist()
    *spans, last = spans.values()
    assert last == []
    assert all(spans)
    num_noise = min(max(round(length * rate), 1), length - 1)
    assert sum(map(len, spans)) == num_noise
    wanted = max(round(num_noise / mean_span_length), 1)
    assert len(spans) == min(wanted, num_noise, length - num_noise + 1)
    # Two sentinels never touch in the inputs.
    assert not ((inputs[1:] >= 1000) & (inputs[:-1] >= 1000)).any()
    assert inputs.dtype == targets.dtype == np.int32


def test_spans_are_everywhere_equally_likely():
    # One span of two tokens in six: five places.
    starts = []
    generator = np.random.default_rng(0)
    for _ in range(2000):
        _, targets = corrupt_spans(
            np.arange(6), SENTINELS, rate=1 / 3, seed=generator
        )
        starts.append(targets[1])
    counts = np.bincount(starts)
    assert len(counts) == 5
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 23.5  # 99.99 % of four degrees of freedom


def test_spans_repeat_with_a_seed():
    first, again, other = (
        corrupt_spans(np.arange(40), SENTINELS, seed=s)[0] for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(other) or (first != other).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0}, r"`rate` must be a rate in \[0, 1\).*=1.0"),
        ({"rate": 0.0}, r"`rate` must be a finite number above 0.*=0.0"),
        ({"mean_span_length": 0}, "`mean_span_length` must be a finite.*=0"),
        ({"token_ids": [7]}, r"`token_ids` must be at least two.*\[7\].*stay"),
        ({"token_ids": [[7, 8]]}, r"`token_ids.shape` must be an array of ra"),
        ({"sentinels": [9]}, "at least 3 tokens for 2 spans.*=1"),
    ],
)
def test_spans_reject_arguments_out_of_range(options, message):
    options = {
        "token_ids": np.arange(40),
        "sentinels": SENTINELS,
        "seed": 0,
        **options,
    }
    with pytest.raises(ValueError, match=message):
        corrupt_spans(**options)
