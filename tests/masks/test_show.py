import sys

import numpy as np
import pytest

from keras_transformer.masks import Causal, Full, PerHead, Prefix


def test_draws_one_character_a_pair():
    assert Causal().show(3) == "#..\n##.\n###"
    assert Causal().show(2, 4) == "#...\n##.."


def test_draws_heads_and_batch_rows_apart():
    mask = PerHead([Full(), Causal()])
    assert mask.show(2) == "head 0:\n##\n##\n\nhead 1:\n#.\n##"
    rows = Prefix().show(1, 2, prefix_length=[1, 2])
    assert rows == "batch row 0:\n#.\n\nbatch row 1:\n##"
    both = (mask & Prefix()).show(1, 2, prefix_length=[1, 2])
    assert both.startswith("batch row 0, head 0:\n#.\n\nbatch row 0, head 1:")


def test_draws_later_queries_by_their_slots():
    assert Causal().show(None, 4, query_slots=[2]) == "###."


def test_paints_a_panel_for_each_head():
    mask = Causal() & PerHead([Full()] * 5)
    figure = mask.show(3, picture=True)
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in panels] == [
        f"head {head}" for head in range(5)
    ]
    painted = panels[0].get_images()[0].get_array()
    np.testing.assert_array_equal(painted, np.tril(np.ones((3, 3))))
    assert figure.get_suptitle() == repr(mask)


def test_says_what_to_install_for_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"-layers\[plots\]"):
        Causal().show(3, picture=True)
