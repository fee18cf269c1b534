import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    Padding,
    SlidingWindow,
    Strided,
)
from keras_transformer.masks.lowering import FLAGS, Lowering, lower
from tests.masks.test_properties import many, meaning_of, seeds
from tests.masks.trees import Case, trees

flags = st.sets(st.sampled_from(FLAGS))


def meaning_of_lowering(lowering, case):
    """What a kernel computes: its flags and the residual."""
    rest = Full() if lowering.residual is None else lowering.residual
    allowed = meaning_of(rest, case)
    distance = case.k[:, None, None, :] - case.q[:, None, :, None]
    if lowering.is_causal:
        allowed = allowed & (distance <= 0)
    if lowering.window is not None:
        left, right = lowering.window
        allowed = allowed & (distance >= -left) & (distance <= right)
    if lowering.documents:
        same = case.query_ids[:, :, None] == case.key_ids[:, None, :]
        allowed = allowed & same[:, None]
    if lowering.padding:
        allowed = allowed & case.padding[:, None, None, :]
    return allowed


@many
@given(trees, seeds, flags)
def test_flags_and_residual_together_are_the_mask(tree, seed, flags):
    mask, case = tree[0], Case(seed, plain=True)
    np.testing.assert_array_equal(
        meaning_of_lowering(lower(mask, flags), case), meaning_of(mask, case)
    )


@many
@given(st.lists(trees, min_size=2, max_size=3), seeds, flags)
def test_this_holds_for_rules_beside_those_that_kernels_know(
    trees, seed, flags
):
    mask, case = Causal() & SlidingWindow((3, 1)), Case(seed, plain=True)
    for tree in trees:
        mask = mask & Padding() & tree[0]
    lowering = lower(mask, flags)
    np.testing.assert_array_equal(
        meaning_of_lowering(lowering, case), meaning_of(mask, case)
    )
    assert set(lowering.flags) <= flags


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), Lowering()),
        (Causal(), Lowering(is_causal=True)),
        (Full() & Causal() & Causal(), Lowering(is_causal=True)),
        (SlidingWindow(3), Lowering(window=(2, 2))),
        (
            SlidingWindow(3) & SlidingWindow((1, 5)) & Causal(),
            Lowering(is_causal=True, window=(1, 2)),
        ),
        (Documents() & Padding(), Lowering(documents=True, padding=True)),
        (Causal() & Strided(2), Lowering(is_causal=True, residual=Strided(2))),
        (
            Strided(2) & Causal() & Strided(3),
            Lowering(is_causal=True, residual=Strided(2) & Strided(3)),
        ),
        (Causal() | Documents(), Lowering(residual=Causal() | Documents())),
        (~Causal(), Lowering(residual=~Causal())),
    ],
)
def test_what_stands_under_and_becomes_a_flag(mask, expected):
    assert lower(mask, FLAGS) == expected


def test_a_kernel_without_flags_is_left_the_whole_mask():
    mask = Causal() & SlidingWindow(3) & Documents()
    assert lower(mask, ()) == Lowering(residual=mask)
    assert lower(mask, ()).flags == {}
    assert lower(mask, ("window",)).flags == {"window": (2, 2)}
