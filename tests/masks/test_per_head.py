import numpy as np
import pytest

from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from tests.numerics import to_numpy


def test_each_head_has_its_own_mask():
    parts = [Causal(), Full(), SlidingWindow(2), Full(), Prefix(2)]
    dense = to_numpy(PerHead(parts).dense(4, 6))
    assert dense.shape == (5, 4, 6)
    for head, part in enumerate(parts):
        np.testing.assert_array_equal(dense[head], to_numpy(part.dense(4, 6)))


def test_stands_anywhere_in_a_mask():
    ids = [[0, 0, 1, 1]]
    inner = PerHead([Documents(), ~Strided(2)])
    mask = Causal() & ~(inner & Prefix(3))
    dense = to_numpy(mask.dense(4, segment_ids=ids))
    assert dense.shape == (1, 2, 4, 4)
    for head in range(2):
        alone = mask.for_head(head).dense(4, segment_ids=ids)
        alone = np.broadcast_to(to_numpy(alone), (1, 1, 4, 4))
        np.testing.assert_array_equal(dense[:, [head]], alone)


def test_the_plan_of_one_head_is_exact():
    mask = PerHead([SlidingWindow(1), Full()])
    assert mask.plan(4, 4, 2).num_kept == 4
    assert mask.plan(4, 4, 2, head=0).num_kept == 2
    assert mask.plan(4, 4, 2, head=1).num_full == 4
    assert mask.plan(4, 4, 2).num_full == 0


def test_rejects_heads_within_heads():
    with pytest.raises(ValueError, match="masks without `PerHead` inside"):
        PerHead([Causal(), Full() & PerHead([Causal(), Full()])])


def test_rejects_no_masks():
    with pytest.raises(ValueError, match="list of at least 1 masks"):
        PerHead([])


def test_rejects_heads_that_do_not_exist():
    with pytest.raises(ValueError, match="`head` must be below 1"):
        PerHead([Causal()]).for_head(1)
    with pytest.raises(ValueError, match=r"`head` .*=-1"):
        Causal().plan(4, head=-1)
