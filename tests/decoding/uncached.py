"""Small models, and what they write when nothing is cached.

The oracle calls the model on whole sequences, outside of any decoding scope.
"""

import keras
import numpy as np
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.blocks import (
    PositionalEmbedding,
    TransformerDecoder,
    TransformerEncoder,
    Unembedding,
)
from keras_transformer.decoding import Greedy, generate
from keras_transformer.masks import (
    Causal,
    Chunked,
    Documents,
    Global,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from keras_transformer.positions import RelativePositionBias
from tests.decoding.compiling import compiled
from tests.numerics import randomize_weights, to_numpy
from tests.sizes import (
    INTERMEDIATE_DIM,
    MODEL_DIM,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    VOCABULARY_SIZE,
)

# Longer than any window, chunk and stride below, and of unequal lengths.
PROMPTS = [[7, 3, 11, 19, 4, 23], [5, 2, 17, 9]]
NEW_TOKENS = 8
SOURCES = [[3, 8, 1, 6, 2], [9, 4, 6]]

MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(4),
    "sinks": Causal() & (SlidingWindow(4) | Global(2)),
    "prefix": Causal() | Prefix(3),
    "prefix_input": Causal() | Prefix(),
    "chunked": Causal() & Chunked(4),
    "strided": Causal() & Strided(3),
    "per_head": PerHead(
        [Causal(), Causal() & SlidingWindow(2)] * (NUM_HEADS // 2)
    ),
    "documents": Causal() & Documents(),
}
POSITIONS = ["none", "sinusoidal", "learned", "rope", "alibi", "t5"]
KINDS = ["block", "by_hand", "nested", "shared", "encoder_decoder"]


def position_of(name):
    """A scheme for the embedder and one for the attention layers."""
    if name in ("sinusoidal", "learned"):
        return name, None
    if name == "t5":
        # Far enough for buckets of several distances.
        scheme = RelativePositionBias(8, 10, bidirectional=False)
        return None, scheme
    return None, None if name == "none" else name


def composed(kind, *layers):
    """A model with attention of the given masks and position schemes.

    Args:
        kind: One of `KINDS`.
        *layers: Pairs of a key of `MASKS` and one of `POSITIONS`.
    """
    rules = [MASKS[mask] for mask, _ in layers]
    schemes = [position_of(position) for _, position in layers]
    inputs = {"token_ids": _ids("token_ids")}
    if kind == "encoder_decoder":
        inputs = {
            "decoder_token_ids": _ids("decoder_token_ids"),
            "encoder_token_ids": _ids("encoder_token_ids"),
            "encoder_padding_mask": keras.Input(
                (None,), dtype="bool", name="encoder_padding_mask"
            ),
        }
    names = frozenset().union(*(rule.data_names for rule in rules))
    data = {}
    if "segment_ids" in names:
        data["segment_ids"] = _ids("segment_ids")
    if "prefix_length" in names:
        data["prefix_length"] = keras.Input(
            (), dtype="int32", name="prefix_length"
        )
    embedding = PositionalEmbedding(
        VOCABULARY_SIZE,
        MODEL_DIM,
        32,
        position=next((name for name, _ in schemes if name), None),
    )
    stream = embedding(next(iter(inputs.values())))
    options = [
        {"mask": rule, "position": scheme}
        for rule, (_, scheme) in zip(rules, schemes, strict=True)
    ]
    blocks = [
        decoder_block(num_key_value_heads=NUM_KEY_VALUE_HEADS, **own)
        for own in options
    ]
    if kind == "block":
        for block in blocks:
            stream = block(stream, **_read(block, data))
    elif kind == "by_hand":
        for own in options:
            normed = keras.layers.LayerNormalization()(stream)
            attention = MultiHeadAttention(NUM_HEADS, **own)
            stream = stream + attention(normed, **_read(attention, data))
            stream = stream + keras.layers.Dense(MODEL_DIM, "gelu")(stream)
    elif kind == "nested":
        stream = _submodel(stream, data, blocks)
    elif kind == "shared":
        for block in [blocks[0], *blocks, blocks[0]]:
            stream = block(stream, **_read(block, data))
    else:
        padding = inputs["encoder_padding_mask"]
        encoded = embedding(inputs["encoder_token_ids"])
        encoded = TransformerEncoder(INTERMEDIATE_DIM, NUM_HEADS)(
            encoded, padding_mask=padding
        )
        for block in blocks:
            stream = block(
                stream,
                encoded,
                encoder_padding_mask=padding,
                **_read(block, data),
            )
    stream = keras.layers.LayerNormalization()(stream)
    logits = Unembedding(embedding)(stream)
    return randomized(functional({**inputs, **data}, logits))


def _read(layer, data):
    """Those of the data that the layer's mask reads."""
    return {k: v for k, v in data.items() if k in layer.mask.data_names}


def _ids(name):
    return keras.Input((None,), dtype="int32", name=name)


def _submodel(stream, data, blocks):
    inner = {
        name: keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=name)
        for name, tensor in {"stream": stream, **data}.items()
    }
    outputs = inner["stream"]
    for block in blocks:
        outputs = block(outputs, **_read(block, inner))
    return keras.Model(inner, outputs)({"stream": stream, **data})


def functional(inputs, outputs):
    """A model called with a tensor, or with a dict of several."""
    if len(inputs) == 1:
        (inputs,) = inputs.values()
    return keras.Model(inputs, outputs)


def language_model(*layers, mask_zero=False, tied=True, max_length=None):
    """A model of `layers` between an embedder and a de-embedding."""
    token_ids = _ids("token_ids")
    embedding = PositionalEmbedding(
        VOCABULARY_SIZE,
        MODEL_DIM,
        max_length,
        mask_zero=mask_zero,
        position="sinusoidal",
    )
    stream = embedding(token_ids)
    for layer in layers:
        stream = layer(stream)
    unembedding = (
        Unembedding(embedding)
        if tied
        else Unembedding(vocabulary_size=VOCABULARY_SIZE)
    )
    return randomized(keras.Model(token_ids, unembedding(stream)))


def decoder_block(**options):
    return TransformerDecoder(INTERMEDIATE_DIM, NUM_HEADS, **options)


def randomized(model):
    """The model with random weights, so that it writes varied text."""
    randomize_weights(model)
    return model


def inputs_of(model, prompts=PROMPTS):
    """What `generate` gets for a composed model."""
    names = [tensor.name for tensor in model.inputs]
    if len(names) == 1:
        return prompts
    given = {token_name(model): prompts}
    if "encoder_token_ids" in names:
        given["encoder_token_ids"] = SOURCES
    if "segment_ids" in names:
        # The last document goes on.
        given["segment_ids"] = [
            [index // 2 for index in range(len(row))] for row in prompts
        ]
    return given


def whole_logits(model, result, prompts):
    """Logits of one uncached call on what `generate` returned, float32.

    Rows are padded on the right, where no mask of a decoder lets them look.
    """
    given = dict(prompts) if isinstance(prompts, dict) else {}
    length = result.tokens.shape[1]
    inputs = {}
    for tensor in model.inputs:
        name = tensor.name
        if len(model.inputs) == 1 or name == token_name(model):
            value = result.tokens
        elif name == "encoder_padding_mask":
            lengths = [[len(row)] for row in given["encoder_token_ids"]]
            value = np.arange(np.max(lengths)) < np.array(lengths)
        elif name == "prefix_length":
            rows = given[token_name(model)]
            value = given.get(name, [len(row) for row in rows])
        elif name == "segment_ids":
            rows = given[name]
            value = [[*row] + row[-1:] * (length - len(row)) for row in rows]
        else:
            rows = given[name]
            longest = max(len(row) for row in rows)
            value = [[*row] + [0] * (longest - len(row)) for row in rows]
        inputs[name] = np.asarray(value, tensor.dtype)
    if len(inputs) == 1:
        (inputs,) = inputs.values()
    logits = compiled(lambda tensors: model(tensors))(inputs)
    return to_numpy(logits).astype("float32")


def token_name(model):
    """The name of the input that holds the generated tokens."""
    names = [tensor.name for tensor in model.inputs]
    return "decoder_token_ids" if "decoder_token_ids" in names else "token_ids"


def log_softmax(logits):
    logits = np.asarray(logits, "float64")
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_against_whole(
    model, prompts, *, decoder=None, seed=0, row_ids=None, **options
):
    """Asserts that generation is what the whole, uncached model says.

    Each new token must be the one that the decoder chooses from the logits of
    one call on the whole text; by induction this is a loop over such calls.

    Returns:
        The result of `generate`.
    """
    decoder = Greedy() if decoder is None else decoder
    result = generate(
        model,
        prompts,
        max_new_tokens=NEW_TOKENS,
        decoder=decoder,
        seed=seed,
        row_ids=row_ids,
        return_log_probs=True,
        **options,
    )
    logits = whole_logits(model, result, prompts)
    row_ids = range(len(logits)) if row_ids is None else row_ids
    for row, row_id in enumerate(row_ids):
        stop = int(result.lengths[row])
        places = np.arange(stop - NEW_TOKENS, stop, dtype="int32")
        tokens, log_probs = decoder.choose(
            ops.convert_to_tensor(logits[row, places - 1]),
            seed=seed,
            row_ids=np.full(len(places), row_id, "int32"),
            positions=places,
        )
        np.testing.assert_array_equal(
            result.tokens[row, places], to_numpy(tokens)
        )
        np.testing.assert_allclose(
            result.log_probs[row, places],
            to_numpy(log_probs),
            atol=1e-4,
            rtol=1e-4,
        )
    return result
