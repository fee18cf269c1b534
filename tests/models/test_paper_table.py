"""Table 3 of "Attention Is All You Need": how many weights each row has.

The paper's attention has no biases, its feed-forward networks have. It prints
millions, not the vocabulary (about 37,000 tokens) nor all that it counts.
"""

import functools

import numpy as np
import pytest

from keras_transformer.models import encoder_decoder

VOCABULARY = 37_000
BASE = {
    "num_layers": 6,
    "model_dim": 512,
    "intermediate_dim": 2048,
    "num_heads": 8,
    "key_dim": 64,
    "value_dim": 64,
}


def heads(num_heads, head_dim):
    return {
        "num_heads": num_heads,
        "key_dim": head_dim,
        "value_dim": head_dim,
    }


# What differs from the base, the published millions, and the smallest and the
# largest vocabulary whose count is printed so.
PUBLISHED = {
    "base": ({}, 65, (39_841, 41_793)),
    "B, key_dim 16": ({"key_dim": 16}, 58, (39_993, 41_945)),
    "B, key_dim 32": ({"key_dim": 32}, 60, (39_291, 41_244)),
    "C, 2 layers": ({"num_layers": 2}, 36, (40_624, 42_577)),
    "C, 4 layers": ({"num_layers": 4}, 50, (39_256, 41_208)),
    "C, 8 layers": ({"num_layers": 8}, 80, (40_426, 42_378)),
    "C, width 256": (
        {"model_dim": 256, **heads(8, 32)},
        28,
        (39_670, 43_576),
    ),
    "C, width 1024": (
        {"model_dim": 1024, **heads(8, 128)},
        168,
        (40_599, 41_574),
    ),
    "C, inner width 1024": ({"intermediate_dim": 1024}, 53, (41_004, 42_956)),
    "C, inner width 4096": ({"intermediate_dim": 4096}, 90, (39_469, 41_421)),
    "big": (
        {"model_dim": 1024, "intermediate_dim": 4096, "num_heads": 16},
        213,
        (35_368, 36_344),
    ),
}
# The paper prints no count for its rows A: they are as large as the base.
ROWS_A = {
    "A, 1 head": heads(1, 512),
    "A, 4 heads": heads(4, 128),
    "A, 16 heads": heads(16, 32),
    "A, 32 heads": heads(32, 16),
}


def paper_model(vocabulary_size, **row):
    return encoder_decoder(
        vocabulary_size,
        norm_placement="post",
        attention_bias=False,
        # Zeros are quickly made.
        kernel_initializer="zeros",
        embeddings_initializer="zeros",
        **{**BASE, **row},
    )


def count(model, name):
    return model.get_layer(name).count_params()


@functools.cache
def layer_counts(row):
    """Weights of one encoder and one decoder layer, at their real size."""
    model = paper_model(8, **{**dict(row), "num_layers": 1})
    encoder, decoder = (
        count(model, name) for name in ("encoder_0", "decoder_0")
    )
    # Nothing else has weights but the one table.
    rest = model.count_params() - encoder - decoder
    assert rest == 8 * model.get_layer("embedding").model_dim
    return encoder, decoder


def total(row, vocabulary_size):
    row = {**BASE, **row}
    layers = row["num_layers"] * sum(layer_counts(tuple(row.items())))
    return layers + vocabulary_size * row["model_dim"]


def test_the_base_model_has_the_counts_of_its_parts():
    model = paper_model(VOCABULARY)
    for index in range(6):
        assert count(model, f"encoder_{index}") == 3_150_336
        assert count(model, f"decoder_{index}") == 4_199_936
    assert count(model, "embedding") == 18_944_000
    assert count(model, "unembedding") == 0
    block = model.get_layer("encoder_0")
    assert block._self_attention.count_params() == 1_048_576
    assert block._feed_forward.count_params() == 2_099_712
    assert block._attention_branch.count_params() == 1_024
    assert model.count_params() == 63_045_632
    # So that counting one layer of each kind is enough for the other rows.
    assert total({}, VOCABULARY) == 63_045_632


@pytest.mark.parametrize("row", list(PUBLISHED))
def test_a_row_is_near_its_published_size(row):
    changes, millions, _ = PUBLISHED[row]
    assert total(changes, VOCABULARY) == pytest.approx(millions * 1e6, rel=0.07)


@pytest.mark.parametrize("row", list(ROWS_A))
def test_the_number_of_heads_does_not_change_the_size(row):
    assert total(ROWS_A[row], VOCABULARY) == total({}, VOCABULARY)


@pytest.mark.parametrize("row", list(PUBLISHED))
def test_the_vocabularies_that_give_the_published_size(row):
    changes, millions, (smallest, largest) = PUBLISHED[row]

    def printed(vocabulary_size):
        return round(total(changes, vocabulary_size) / 1e6)

    sizes = (smallest - 1, smallest, largest, largest + 1)
    assert [printed(size) - millions for size in sizes] == [-1, 0, 0, 1]


def test_no_one_vocabulary_gives_all_rows():
    ranges = {row: sizes for row, (_, _, sizes) in PUBLISHED.items()}
    big = ranges.pop("big")
    smallest, largest = np.array(list(ranges.values())).T
    assert (smallest.max(), largest.min()) == (41_004, 41_208)
    assert big[1] < smallest.max()
