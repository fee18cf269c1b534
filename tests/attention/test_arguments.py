"""What the door to attention refuses, and how it says so."""

import numpy as np
import pytest
from keras import ops

from keras_transformer.attention import dot_product_attention
from keras_transformer.masks import Causal, Documents, Full, PerHead, Prefix
from keras_transformer.positions import ALiBi
from tests.numerics import normal

QUERY = (3, 5, 4, 6)
KEY = (3, 7, 2, 6)
VALUE = (3, 7, 2, 8)
IDS = np.zeros((3, 5), "int32")
KEY_IDS = np.zeros((3, 7), "int32")


def attend(query=QUERY, key=KEY, value=VALUE, dtypes=("float32",) * 3, **call):
    tensors = (
        ops.convert_to_tensor(normal(*shape), dtype)
        for shape, dtype in zip((query, key, value), dtypes, strict=True)
    )
    return dot_product_attention(*tensors, **call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": (2, 3, 4)}, r"`query` must have shape \(batch, length"),
        ({"key": (3, 7, 2, 5)}, "the same last axis"),
        ({"value": (3, 7, 4, 8)}, "equally many and divide"),
        ({"query": (3, 5, 3, 6)}, "3 query, 2 key and 2 value heads"),
        ({"value": (3, 6, 2, 8)}, "`key` and `value` must have the same leng"),
        ({"query": (1, 5, 4, 6)}, r"as many batch rows.*\[1, 3, 3\]"),
        ({"query": (3, 5, 4, 0)}, r"at least one head and a dim of at least 1"),
        ({"value": (3, 7, 2, 0)}, r"at least one head and a dim of at least 1"),
        ({"key": (3, 7, 0, 6)}, r"at least one head and a dim of at least 1"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("int32", "int32", "int32"),
        ("float32", "float32", "float16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_tensors_of_no_or_several_floating_dtypes_are_rejected(dtypes):
    with pytest.raises(ValueError, match="one and the same floating dtype"):
        attend(dtypes=dtypes)


# Arguments that fit no scores of (3, 4, 5, 7), and what the error names.
MISFITS = {
    "mask of other lengths": (
        {"attention_mask": np.ones((3, 5, 8), bool)},
        r"`attention_mask.shape` must be broadcastable to .*\(3, 4, 5, 7\)",
    ),
    "mask of another batch": (
        {"attention_mask": np.ones((2, 1, 5, 7), bool)},
        r"`attention_mask.shape` must be broadcastable",
    ),
    "mask of five axes": (
        {"attention_mask": np.ones((1, 3, 4, 5, 7), bool)},
        r"`attention_mask.shape` must be",
    ),
    "bias of another batch": (
        {"bias": np.zeros((2, 4, 5, 7), "float32")},
        r"`bias.shape` must be broadcastable",
    ),
    "bias of one axis too many": (
        {"bias": np.zeros((1, 3, 4, 5, 7), "float32")},
        r"`bias.shape` must be broadcastable",
    ),
    "bias of other lengths": (
        {"bias": np.zeros((7, 5), "float32")},
        r"`bias.shape` must be broadcastable",
    ),
    "boolean bias": (
        {"bias": np.ones((5, 7), bool)},
        "Pass them as `attention_mask`",
    ),
    "padding of another batch": (
        {"padding_mask": np.ones((2, 7), bool)},
        "`padding_mask` must have one row for each of the 3",
    ),
    "padding of the queries": (
        {"padding_mask": np.ones((3, 5), bool)},
        "`padding_mask` must have one entry for each of the 7",
    ),
    "ids of another batch": (
        {
            "mask": Documents(),
            "segment_ids": IDS[:2],
            "key_segment_ids": KEY_IDS,
        },
        "`segment_ids` must have one row for each of the 3",
    ),
    "ids that are no integers": (
        {
            "mask": Documents(),
            "segment_ids": IDS + 0.5,
            "key_segment_ids": KEY_IDS,
        },
        "`segment_ids` must hold integers.*float64.*Pass int32",
    ),
    "ids of the keys alone": (
        {"mask": Documents(), "key_segment_ids": KEY_IDS},
        "Pass `segment_ids` too",
    ),
    "prefixes of another batch": (
        {"mask": Prefix(), "prefix_length": np.array([1, 2])},
        "`prefix_length` must have one row for each of the 3",
    ),
    "prefix of no integer": (
        {"mask": Prefix(), "prefix_length": 1.5},
        "`prefix_length` must hold integers",
    ),
    "too few slots": (
        {"query_slots": np.arange(4)},
        r"`query_slots.shape` must be of shape \(length,\).*\(3, 5\)",
    ),
    "slots that are no integers": (
        {"key_slots": np.arange(7) + 0.5},
        "`key_slots` must hold integers",
    ),
    "too few positions": (
        {"bias": ALiBi(), "positions": np.arange(3)},
        r"`positions.shape` must be of shape \(length,\)",
    ),
    "positions of another batch": (
        {"bias": ALiBi(), "key_positions": np.zeros((2, 7), "int32")},
        r"`key_positions.shape` must be .* \(3, 7\)",
    ),
    "positions that are no integers": (
        {"bias": ALiBi(), "positions": np.arange(5) + 0.5},
        "`positions` must hold integers",
    ),
    "infinite scale": (
        {"scale": float("inf")},
        "`scale` must be a finite number above 0",
    ),
    "sinks of another number of heads": (
        {"sinks": np.zeros(3, "float32")},
        r"`sinks.shape` must be \(4,\)",
    ),
}


@pytest.mark.parametrize("implementation", ["auto", "dense", "blockwise"])
@pytest.mark.parametrize("case", MISFITS)
def test_arguments_that_do_not_fit_are_rejected(case, implementation):
    arguments, message = MISFITS[case]
    if implementation == "blockwise" and (
        {"attention_mask", "query_slots", "key_slots"} & set(arguments)
        or isinstance(arguments.get("bias"), np.ndarray)
    ):
        # It takes none of them; that or the misfit may be named first.
        message = f"{message}|cannot be honoured"
    with pytest.raises(ValueError, match=message):
        attend(**arguments, implementation=implementation)


def test_a_mask_for_another_number_of_heads_is_rejected():
    with pytest.raises(ValueError, match=r"2 masks, one a head.*num_heads=4"):
        attend(mask=PerHead([Causal(), Full()]))


def test_an_unknown_implementation_is_rejected():
    with pytest.raises(ValueError, match="`implementation` must be one of"):
        attend(implementation="flash")


def test_refuses_an_additive_attention_mask():
    query = normal(3, 5, 4, 6)
    mask = np.where(np.tri(5, dtype=bool), 0.0, -1e9).astype("float32")
    with pytest.raises(ValueError, match=r"must be boolean.*pass `mask == 0`"):
        dot_product_attention(query, query, query, attention_mask=mask)
