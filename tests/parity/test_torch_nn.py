"""Against PyTorch's own Transformer layers, whatever the backend."""

import numpy as np
import pytest
import torch

from keras_transformer.blocks import TransformerDecoder, TransformerEncoder
from keras_transformer.masks import Causal, Full
from tests.numerics import assert_close, normal
from tests.parity.peers import copy_from_torch
from tests.sizes import (
    BATCH,
    INTERMEDIATE_DIM,
    KEY_LENGTH,
    MODEL_DIM,
    NUM_HEADS,
    QUERY_LENGTH,
)

pytestmark = pytest.mark.parity

OPTIONS = pytest.mark.parametrize(
    ("norm_placement", "activation"),
    [("pre", "relu"), ("pre", "gelu"), ("post", "relu"), ("post", "gelu")],
)
LENGTHS = np.array([[5], [3], [1]])
PADDING_MASK = np.arange(QUERY_LENGTH) < LENGTHS
ENCODER_PADDING_MASK = np.arange(KEY_LENGTH) < LENGTHS + 2
CAUSAL = np.tril(np.ones((QUERY_LENGTH, QUERY_LENGTH), bool))


def layer_pair(
    torch_class, our_class, shapes, norm_placement, activation, **ours
):
    """PyTorch's layer in inference and ours, with the same weights."""
    theirs = torch_class(
        MODEL_DIM,
        NUM_HEADS,
        INTERMEDIATE_DIM,
        activation=activation,
        norm_first=norm_placement == "pre",
        batch_first=True,
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    layer = our_class(
        INTERMEDIATE_DIM,
        NUM_HEADS,
        activation=activation,
        norm_placement=norm_placement,
        # At inference it has no part.
        dropout=0.1,
        **ours,
    )
    layer.build(*shapes)
    copy_from_torch(layer, theirs)
    return theirs, layer


def run(layer, *arrays, **masks):
    """Calls a PyTorch layer; its masks are True where nobody may look."""
    hidden = {
        name: None if mask is None else torch.from_numpy(~mask)
        for name, mask in masks.items()
    }
    with torch.no_grad():
        return layer(*map(torch.from_numpy, arrays), **hidden).numpy()


@OPTIONS
@pytest.mark.parametrize("padding_mask", [None, PADDING_MASK])
@pytest.mark.parametrize("is_causal", [False, True])
def test_encoder_equals_torch(
    norm_placement, activation, padding_mask, is_causal
):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    theirs, ours = layer_pair(
        torch.nn.TransformerEncoderLayer,
        TransformerEncoder,
        (inputs.shape,),
        norm_placement,
        activation,
        mask=Causal() if is_causal else Full(),
    )
    expected = run(
        theirs,
        inputs,
        src_mask=CAUSAL if is_causal else None,
        src_key_padding_mask=padding_mask,
    )
    assert_close(ours(inputs, padding_mask=padding_mask), expected)


@OPTIONS
@pytest.mark.parametrize("is_padded", [False, True])
def test_decoder_equals_torch(norm_placement, activation, is_padded):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    memory = normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=1)
    theirs, ours = layer_pair(
        torch.nn.TransformerDecoderLayer,
        TransformerDecoder,
        (inputs.shape, memory.shape),
        norm_placement,
        activation,
    )
    padding_mask = PADDING_MASK if is_padded else None
    encoder_padding_mask = ENCODER_PADDING_MASK if is_padded else None
    expected = run(
        theirs,
        inputs,
        memory,
        tgt_mask=CAUSAL,
        tgt_key_padding_mask=padding_mask,
        memory_key_padding_mask=encoder_padding_mask,
    )
    outputs = ours(
        inputs,
        memory,
        padding_mask=padding_mask,
        encoder_padding_mask=encoder_padding_mask,
    )
    assert_close(outputs, expected)


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_attention_masks_equal_those_of_torch(norm_placement):
    inputs = normal(BATCH, QUERY_LENGTH, MODEL_DIM)
    memory = normal(BATCH, KEY_LENGTH, MODEL_DIM, seed=1)
    theirs, ours = layer_pair(
        torch.nn.TransformerDecoderLayer,
        TransformerDecoder,
        (inputs.shape, memory.shape),
        norm_placement,
        "relu",
        mask=Full(),
    )
    generator = np.random.default_rng(2)
    own = generator.random((QUERY_LENGTH, QUERY_LENGTH)) < 0.5
    own |= np.eye(QUERY_LENGTH, dtype=bool)
    other = generator.random((QUERY_LENGTH, KEY_LENGTH)) < 0.5
    other[:, 0] = True
    expected = run(theirs, inputs, memory, tgt_mask=own, memory_mask=other)
    outputs = ours(
        inputs,
        memory,
        attention_mask=np.tile(own, (BATCH, 1, 1)),
        encoder_attention_mask=np.tile(other, (BATCH, 1, 1)),
    )
    assert_close(outputs, expected)
