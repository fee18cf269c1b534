import pytest

from keras_transformer.masks import (
    And,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Not,
    Or,
    Padding,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal() | Prefix(64), "Causal() | Prefix(64)"),
        (
            Causal() & (SlidingWindow(512) | Global(4)),
            "Causal() & (SlidingWindow(512) | Global(4))",
        ),
        (
            Causal() & SlidingWindow((3, 0)) | Prefix(),
            "Causal() & SlidingWindow((3, 0)) | Prefix()",
        ),
        (~(Causal() & Full()) & ~Full(), "~(Causal() & Full()) & ~Full()"),
        (~(Causal() | Full()), "~(Causal() | Full())"),
        (~~Causal(), "Causal()"),
        (
            PerHead([Causal() | Full(), ~Full()]) & Full(),
            "PerHead([Causal() | Full(), ~Full()]) & Full()",
        ),
    ],
)
def test_prints_with_few_brackets(mask, text):
    assert repr(mask) == text


def test_flattens_what_is_joined_alike():
    a, b, c, d = Causal(), Full(), Strided(2), Prefix(1)
    assert (a & b & c & d).masks == (a, b, c, d)
    assert (a & b) & (c & d) == a & (b & (c & d)) == And([a, b, c, d])
    assert (a | b) | (c | d) == Or([a, b, c, d])
    assert (a & b | c).masks == (a & b, c)


def test_double_negation_is_nothing():
    assert ~~(Causal() & Full()) == Causal() & Full()
    assert (~Causal()).mask == Causal()


def test_reach_follows_the_operators():
    window, chunk = SlidingWindow((5, 1)), Chunked(3)
    assert (Causal().lookback, Causal().lookahead) == (None, 0)
    assert ((window & chunk).lookback, (window & chunk).lookahead) == (2, 1)
    assert ((window | chunk).lookback, (window | chunk).lookahead) == (5, 2)
    assert (Causal() & window).lookahead == 0
    assert (Causal() & window).lookback == 5
    assert (Causal() | window).lookback is None
    assert (~window).lookback is None
    assert PerHead([window, chunk]).lookback == 5
    assert PerHead([window, Full()]).lookahead is None
    for mask in (Full(), Prefix(2), Global(2), Strided(2), Documents()):
        assert mask.lookback is None
        assert mask.lookahead is None


def test_a_mask_of_one_head_has_no_heads_left():
    mask = ~(PerHead([Causal(), Full()]) & Strided(2)) | Global(1)
    assert mask.num_heads == 2
    assert mask.for_head(0) == ~(Causal() & Strided(2)) | Global(1)
    assert mask.for_head(1) == ~(Full() & Strided(2)) | Global(1)
    assert Causal().num_heads is None
    assert Causal().for_head(7) == Causal()
    assert (~PerHead([~Causal(), Full()])).for_head(0) == Causal()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Causal() | Padding(),
        lambda: ~Padding(),
        lambda: ~(Causal() & Padding()),
        lambda: PerHead([Causal(), Padding()]),
    ],
)
def test_padding_stands_only_under_and(make):
    with pytest.raises(ValueError, match=r"`Padding\(\)` must stand only"):
        make()


def test_rejects_unequal_numbers_of_heads():
    with pytest.raises(ValueError, match=r"same number of heads.*\[1, 2\]"):
        PerHead([Causal()]) & PerHead([Causal(), Full()])


def test_rejects_what_is_no_mask():
    with pytest.raises(ValueError, match="`masks` must be a list of masks"):
        And(Causal())
    with pytest.raises(ValueError, match="list of at least 2 masks"):
        Or([Causal()])
    with pytest.raises(ValueError, match="list of at least 1 masks"):
        Not("causal")
    with pytest.raises(ValueError, match=r"`mask` must be a mask other than"):
        Not(~Causal())
