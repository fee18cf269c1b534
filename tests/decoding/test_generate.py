import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.decoding import Greedy, Sample, generate
from keras_transformer.decoding.noise import gumbel
from keras_transformer.masks import Causal, Full, Prefix, SlidingWindow
from keras_transformer.models import encoder_decoder
from tests.decoding.compiling import compiled
from tests.decoding.conftest import SIZES
from tests.decoding.uncached import (
    KINDS,
    MASKS,
    POSITIONS,
    PROMPTS,
    SOURCES,
    check_against_whole,
    composed,
    decoder_block,
    inputs_of,
    language_model,
    log_softmax,
    randomized,
    whole_logits,
)
from tests.numerics import to_numpy
from tests.sizes import VOCABULARY_SIZE

pytestmark = pytest.mark.usefixtures("_quick_compilation")

# Each mask and each position scheme at least twice, in few models, because
# each is compiled.
FEW = [
    (
        "block",
        ("causal", "rope"),
        ("window", "alibi"),
        ("chunked", "t5"),
        ("strided", "learned"),
    ),
    (
        "by_hand",
        ("sinks", "t5"),
        ("prefix", "sinusoidal"),
        ("window", "rope"),
        ("per_head", "alibi"),
    ),
    (
        "nested",
        ("prefix_input", "rope"),
        ("documents", "learned"),
        ("sinks", "alibi"),
        ("per_head", "none"),
    ),
    (
        "shared",
        ("chunked", "rope"),
        ("strided", "alibi"),
        ("prefix_input", "t5"),
        ("documents", "sinusoidal"),
    ),
    (
        "encoder_decoder",
        ("per_head", "t5"),
        ("causal", "none"),
        ("prefix", "alibi"),
    ),
]
# Every mask with every position scheme, and either with every kind of layer.
ALL = [
    (KINDS[index % len(KINDS)], layer, layer)
    for index, layer in enumerate(itertools.product(MASKS, POSITIONS))
]


def name_of(case):
    kind, *layers = case
    return "-".join([kind, *("+".join(layer) for layer in layers[:2])])


@pytest.mark.parametrize(
    ("case", "decoder"),
    list(zip(FEW, itertools.cycle([Greedy(), Sample(0.9)]), strict=False)),
    ids=[case[0] for case in FEW],
)
def test_writes_what_the_uncached_model_says(case, decoder):
    model = composed(*case)
    check_against_whole(
        model, inputs_of(model), decoder=decoder, seed=3, row_ids=[4, 9]
    )


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [Greedy(), Sample(0.9)], ids=repr)
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_every_mask_and_position_writes_what_the_uncached_model_says(
    case, decoder
):
    model = composed(*case)
    check_against_whole(
        model, inputs_of(model), decoder=decoder, seed=3, row_ids=[4, 9]
    )


def test_equals_a_plain_loop_that_calls_the_model(model):
    call = compiled(lambda tokens: model(tokens))
    tokens = [7, 3, 11]
    for _ in range(3):
        logits = to_numpy(call(np.array([tokens], "int32")))
        tokens.append(int(np.argmax(logits[0, -1])))
    result = generate(model, [[7, 3, 11]], max_new_tokens=3)
    assert result.tokens.tolist() == [tokens]


@pytest.mark.slow
def test_sampling_adds_the_noise_to_the_uncached_logits(model):
    result = generate(
        model, [[7, 3]], max_new_tokens=5, decoder=Sample(), seed=8, row_ids=[6]
    )
    logits = whole_logits(model, result, [[7, 3]])[0, 1:-1]
    places = np.arange(2, 7, dtype="int32")
    noise = gumbel(8, np.full(5, 6, "int32"), places, VOCABULARY_SIZE)
    noise = ops.convert_to_numpy(noise)
    expected = np.argmax(logits + noise, axis=-1)
    assert result.tokens[0, 2:].tolist() == expected.tolist()


# One decoder: each is compiled.
SAMPLE = Sample(3.0)
# Rows in different buckets of lengths.
RAGGED = [[5], [7, 3, 11, 2, 8, 1], [9, 9, 9], [4, 2] * 9]


@pytest.mark.parametrize(
    "decoder",
    [SAMPLE, pytest.param(Greedy(), marks=pytest.mark.slow)],
    ids=repr,
)
def test_ragged_rows_equal_each_row_alone(model, decoder):
    options = {
        "max_new_tokens": 5,
        "decoder": decoder,
        "seed": 2,
        "return_log_probs": True,
    }
    result = generate(model, RAGGED, **options)
    assert result.lengths.tolist() == [len(row) + 5 for row in RAGGED]
    for index, row in enumerate(RAGGED):
        alone = generate(model, [row], row_ids=[index], **options)
        stop = len(row) + 5
        assert alone.tokens.shape == (1, stop)
        np.testing.assert_array_equal(
            result.tokens[index, :stop], alone.tokens[0]
        )
        np.testing.assert_allclose(
            result.log_probs[index, :stop], alone.log_probs[0], atol=1e-5
        )
        assert not result.tokens[index, stop:].any()
        assert not result.log_probs[index, stop:].any()


def test_rows_do_not_depend_on_their_order(model):
    options = {"max_new_tokens": 4, "decoder": SAMPLE, "seed": 2}
    result = generate(model, RAGGED, **options)
    order = [2, 0, 3, 1]
    shuffled = generate(
        model, [RAGGED[row] for row in order], row_ids=order, **options
    )
    np.testing.assert_array_equal(shuffled.tokens, result.tokens[order])


def test_seed_row_id_and_place_decide_the_draw(model):
    def draw(**options):
        options = {"seed": 1, "row_ids": [0, 0, 5], **options}
        rows = [[7, 3]] * 3
        return generate(
            model, rows, max_new_tokens=9, decoder=SAMPLE, **options
        ).tokens.tolist()

    first, again, other = draw()
    assert first == again != other
    assert draw() == [first, again, other]
    assert draw(seed=-2)[0] != first
    assert draw(row_ids=np.array([5, 1, 0]))[0] == other


def test_a_stop_token_ends_its_row_and_is_counted(model):
    options = {
        "max_new_tokens": 6,
        "decoder": SAMPLE,
        "return_log_probs": True,
    }
    free = generate(model, PROMPTS, **options)
    first, second = (
        free.tokens[row, len(prompt) : len(prompt) + 6].tolist()
        for row, prompt in enumerate(PROMPTS)
    )
    stop = next(t for t in first[1:5] if t not in [*second, first[0]])
    length = len(PROMPTS[0]) + first.index(stop) + 1
    result = generate(model, PROMPTS, stop=stop, pad_id=-7, **options)
    assert result.finish_reasons == ["stop", "length"]
    assert result.lengths.tolist() == [length, len(PROMPTS[1]) + 6]
    assert result.tokens.shape == result.log_probs.shape
    assert result.tokens.shape[1] == result.lengths.max()
    assert result.tokens.dtype == result.lengths.dtype == np.int32
    for row, stop_at in enumerate(result.lengths):
        np.testing.assert_array_equal(
            result.tokens[row, :stop_at], free.tokens[row, :stop_at]
        )
        assert (result.tokens[row, stop_at:] == -7).all()
        assert not result.log_probs[row, stop_at:].any()
    assert free.finish_reasons == ["length", "length"]
    assert free.log_probs is not None


def test_stop_tokens_are_not_looked_for_in_the_prompt(model):
    free = generate(model, [[7, 3, 11]], max_new_tokens=4)
    written = set(free.tokens[0, 3:].tolist())
    absent = next(t for t in range(VOCABULARY_SIZE) if t not in written)
    result = generate(model, [[7, absent, 11]], max_new_tokens=1, stop=[absent])
    assert result.lengths.tolist() == [4]
    assert result.finish_reasons == [
        "stop" if result.tokens[0, 3] == absent else "length"
    ]


def test_generation_ends_when_all_rows_have_stopped(model):
    every = range(VOCABULARY_SIZE)
    result = generate(model, PROMPTS, max_new_tokens=6, stop=every)
    assert result.lengths.tolist() == [len(row) + 1 for row in PROMPTS]
    assert result.finish_reasons == ["stop", "stop"]
    assert result.log_probs is None


def test_log_probs_are_those_of_the_whole_model(model):
    result = generate(
        model,
        [[7, 3, 11]],
        max_new_tokens=6,
        decoder=SAMPLE,
        return_log_probs=True,
    )
    expected = log_softmax(whole_logits(model, result, [[7, 3, 11]])[0])
    expected = expected[np.arange(2, 8), result.tokens[0, 3:]]
    assert not result.log_probs[0, :3].any()
    np.testing.assert_allclose(result.log_probs[0, 3:], expected, atol=1e-4)


def test_the_last_position_is_used(model):
    result = generate(model, [[3] * 30], max_new_tokens=10)
    assert result.tokens.shape == (1, 40)
    result = generate(model, [[3] * 39], max_new_tokens=1)
    assert result.tokens.shape == (1, 40)


@pytest.mark.slow
def test_a_model_of_few_positions_is_checked_within_them():
    model = language_model(decoder_block(), max_length=6)
    result = generate(model, [[3] * 5], max_new_tokens=1)
    assert result.tokens.shape == (1, 6)


# --- encoder-decoder ---------------------------------------------------------


def test_a_start_token_is_the_prompt_of_each_row(translator):
    sources = {"encoder_token_ids": SOURCES}
    result = generate(translator, sources, start_token=4, max_new_tokens=5)
    given = generate(
        translator,
        {**sources, "decoder_token_ids": [[4], [4]]},
        max_new_tokens=5,
    )
    np.testing.assert_array_equal(result.tokens, given.tokens)
    assert result.lengths.tolist() == [6, 6]
    assert (result.tokens[:, 0] == 4).all()


def test_ragged_sources_and_prompts_equal_each_alone(translator):
    prompts = {
        "encoder_token_ids": SOURCES,
        "decoder_token_ids": [[4], [4, 7, 2]],
    }
    result = generate(translator, prompts, max_new_tokens=5)
    for row in range(2):
        alone = generate(
            translator,
            {name: rows[row : row + 1] for name, rows in prompts.items()},
            max_new_tokens=5,
        )
        np.testing.assert_array_equal(
            result.tokens[row, : result.lengths[row]], alone.tokens[0]
        )


@pytest.mark.slow
def test_sources_of_equal_length_need_no_padding_input():
    model = randomized(encoder_decoder(*SIZES, position="alibi"))
    sources = {"encoder_token_ids": [[3, 8, 1], [9, 4, 6]]}
    result = generate(model, sources, start_token=1, max_new_tokens=2)
    assert result.tokens.shape == (2, 3)
    with pytest.raises(ValueError, match="no input 'encoder_padding_mask'"):
        generate(
            model,
            {"encoder_token_ids": SOURCES},
            start_token=1,
            max_new_tokens=2,
        )


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be a positive integer"),
        ({"decoder": "greedy"}, "`decoder` must be a decoder such as"),
        ({"decoder": Greedy}, "`decoder` must be a decoder such as"),
        ({"stop": [1.5]}, "`stop` must be a token id"),
        ({"stop": 1.5}, "`stop` must be a token id"),
        ({"stop": None}, "`stop` must be a token id"),
        ({"stop": [-1]}, "`stop` must be a token id"),
        ({"seed": 2**31}, "`seed` must be an integer of 32 bits"),
        ({"seed": 1.0}, "`seed` must be an integer of 32 bits"),
        ({"row_ids": [0]}, r"`row_ids` must be integers .* shape \(2,\)"),
        ({"row_ids": [0.0, 1.0]}, "`row_ids` must be integers"),
        ({"row_ids": [0, 2**31]}, "`row_ids` must be integers of 32 bits"),
        ({"pad_id": 0.5}, "`pad_id` must be an integer"),
        ({"return_log_probs": 1}, "`return_log_probs` must be True or False"),
        ({"max_new_tokens": 35}, "must fit the 40 positions of 'decoder_only'"),
        ({"start_token": 1}, "`start_token` is the prompt of rows that have"),
    ],
)
def test_a_bad_argument_is_named_and_leaves_the_model_usable(
    model, options, message
):
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, **{"max_new_tokens": 6, **options})
    result = generate(model, PROMPTS, max_new_tokens=6)
    check = generate(model, PROMPTS, max_new_tokens=6)
    np.testing.assert_array_equal(result.tokens, check.tokens)


@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        pytest.param(Causal() | SlidingWindow((2, 1)), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_mask_that_looks_ahead_is_refused_with_its_layer(mask):
    model = language_model(
        decoder_block(), decoder_block(mask=mask, name="two_ways")
    )
    message = "'two_ways/self_attention' cannot be decoded step by step"
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, max_new_tokens=2)


def test_a_prompt_shorter_than_the_prefix_is_refused():
    mask = Causal() | Prefix(5)
    model = language_model(decoder_block(mask=mask, name="prefixed"))
    for prompts in (PROMPTS, PROMPTS[::-1]):
        message = (
            "'prefixed/self_attention' .* prefix is longer than the prompt"
        )
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, max_new_tokens=2)
    result = generate(model, PROMPTS[:1], max_new_tokens=2)
    assert result.lengths.tolist() == [8]


def test_a_prefix_beyond_its_prompt_is_refused():
    model = composed("block", ("prefix_input", "none"))
    prompts = {"token_ids": PROMPTS, "prefix_length": [2, 5]}
    with pytest.raises(ValueError, match="prefix is longer than the prompt"):
        generate(model, prompts, max_new_tokens=2)


@pytest.mark.slow
def test_a_prefix_may_be_shorter_than_its_prompt():
    model = composed("block", ("prefix_input", "none"))
    check_against_whole(model, {"token_ids": PROMPTS, "prefix_length": [2, 4]})


# --- models of other kinds ---------------------------------------------------


def test_token_zero_inside_a_prompt_is_padding_when_it_masks_zero():
    model = language_model(decoder_block(), mask_zero=True, tied=False)
    prompts = [[7, 0, 11, 4], [5, 0]]
    check_against_whole(model, prompts)


def test_token_zero_is_a_token_otherwise(model):
    check_against_whole(model, [[7, 0, 11, 0], [0, 3]])


def test_a_reloaded_model_writes_the_same(model, tmp_path):
    model.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    results = [
        generate(m, PROMPTS, max_new_tokens=5) for m in (model, reloaded)
    ]
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)


@pytest.fixture
def _mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("_mixed_bfloat16")
def test_a_mixed_precision_model_writes_its_uncached_text():
    model = language_model(decoder_block(position="rope"))
    result = generate(model, PROMPTS, max_new_tokens=6, return_log_probs=True)
    log_probs = log_softmax(whole_logits(model, result, PROMPTS))
    for row, stop in enumerate(result.lengths):
        places = np.arange(stop - 6, stop)
        expected = log_probs[row, places - 1]
        chosen = expected[np.arange(6), result.tokens[row, places]]
        # Logits of half precision tie, or nearly.
        assert (chosen >= expected.max(-1) - 0.15).all()
        np.testing.assert_allclose(
            result.log_probs[row, places], chosen, atol=0.15
        )


@pytest.mark.slow
def test_a_quantised_model_writes_its_uncached_text():
    model = language_model(decoder_block(), tied=False)
    before = generate(model, PROMPTS, max_new_tokens=6, return_log_probs=True)
    kinds = keras.layers.Dense | keras.layers.Embedding
    model.quantize("int8", filters=lambda layer: isinstance(layer, kinds))
    result = generate(model, PROMPTS, max_new_tokens=6, return_log_probs=True)
    assert not np.array_equal(before.log_probs, result.log_probs)
    log_probs = log_softmax(whole_logits(model, result, PROMPTS))
    for row, stop in enumerate(result.lengths):
        places = np.arange(stop - 6, stop)
        chosen = log_probs[row, places - 1, result.tokens[row, places]]
        np.testing.assert_allclose(
            result.log_probs[row, places], chosen, atol=0.02
        )
