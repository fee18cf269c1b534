"""What can be tried with a GPU only: `make test-gpu`."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer.attention import dot_product_attention, explain
from keras_transformer.decoding import generate
from keras_transformer.masks import (
    Causal,
    Documents,
    Full,
    PerHead,
    SlidingWindow,
    Strided,
)
from keras_transformer.models import decoder_only
from keras_transformer.positions import ALiBi
from tests.attention.checks import fast_gradients
from tests.numerics import assert_close, normal, to_numpy

BACKEND = keras.backend.backend()
HAS_GPU = backend.device_of(ops.zeros(1)) == "gpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_GPU, reason=f"Keras on {BACKEND} sees no GPU here"
    ),
]

BATCH, LENGTH, NUM_HEADS, GROUPS, KEY_DIM = 3, 384, 4, 2, 64
LENGTHS = np.array([[LENGTH], [200], [0]])
DATA = {
    "padding_mask": np.arange(LENGTH) < LENGTHS,
    "segment_ids": np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) // 150,
}
FLEX, SDPA = "flex_attention", "scaled_dot_product_attention"
# Name to the arguments, and the kernels of PyTorch and JAX (in bfloat16).
CASES = {
    "nothing": ({}, SDPA, "cudnn"),
    "causal": ({"mask": Causal()}, SDPA, "cudnn"),
    "window": ({"mask": Causal() & SlidingWindow(100)}, FLEX, "cudnn"),
    "one-sided window": ({"mask": SlidingWindow((70, 0))}, FLEX, "cudnn"),
    "two-sided window": ({"mask": SlidingWindow(70)}, FLEX, "cudnn"),
    "padding": (
        {"mask": Causal(), "padding_mask": DATA["padding_mask"]},
        FLEX,
        "cudnn",
    ),
    "documents and padding": (
        {"mask": Causal() & Documents(), **DATA},
        FLEX,
        "cudnn",
    ),
    "one mask a head": (
        {"mask": PerHead([Causal(), Strided(5), SlidingWindow(9), Full()])},
        FLEX,
        "cudnn",
    ),
    "nothing allowed": ({"mask": ~Full()}, FLEX, "cudnn"),
    "soft cap": ({"mask": Causal(), "soft_cap": 2.0}, FLEX, None),
    "alibi": (
        {"mask": Causal(), "bias": ALiBi(num_heads=NUM_HEADS)},
        FLEX,
        None,
    ),
}
# Without causal attention cuDNN has no such window.
TWO_SIDED = "two-sided window"


@pytest.fixture(autouse=True)
def _exact_products():
    """No TensorFloat-32: what is compared must not be rounded."""
    if BACKEND == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            yield
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        config = tf.config.experimental
        before = config.tensor_float_32_execution_enabled()
        config.enable_tensor_float_32_execution(False)
        yield
        config.enable_tensor_float_32_execution(before)
    else:
        yield


def inputs(dtype="float32"):
    shapes = {
        "query": (BATCH, LENGTH, NUM_HEADS, KEY_DIM),
        "key": (BATCH, LENGTH, GROUPS, KEY_DIM),
        "value": (BATCH, LENGTH, GROUPS, KEY_DIM),
    }
    arrays = (
        normal(*shape, seed=seed)
        for seed, shape in enumerate(shapes.values(), 1)
    )
    return [ops.convert_to_tensor(array, dtype) for array in arrays]


def expected_kernel(case, dtype):
    _, of_torch, of_jax = CASES[case]
    if BACKEND == "torch":
        return of_torch
    takes = BACKEND == "jax" and dtype == "bfloat16" and case != TWO_SIDED
    return of_jax if takes else None


def taken(function):
    """Outputs of a function, and the names of the kernels it ran on."""
    names = []

    def noting(kernel):
        @functools.wraps(kernel.run)
        def run(*args, **kwargs):
            names.append(kernel.name)
            return kernel.run(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        replaced = []
        for kernel in backend.KERNELS:
            values = {**vars(kernel), "run": noting(kernel)}
            replaced.append(type(kernel)(**values))
        patch.setattr(backend, "KERNELS", tuple(replaced))
        return function(), names


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_taken_and_equals_dense_attention(case, dtype):
    arguments = CASES[case][0]
    rounded = inputs(dtype)
    exact = [ops.cast(tensor, "float32") for tensor in rounded]
    cotangent = normal(BATCH, LENGTH, NUM_HEADS, KEY_DIM, seed=9)

    def call(values, implementation):
        outputs = dot_product_attention(
            *values, **arguments, implementation=implementation
        )
        return ops.cast(outputs, "float32")

    def loss(implementation, *values):
        outputs = call(values, implementation)
        return ops.sum(ops.multiply(outputs, cotangent))

    outputs, names = taken(lambda: call(rounded, "auto"))
    kernel = expected_kernel(case, dtype)
    assert names == ([] if kernel is None else [kernel])
    assert_close(outputs, to_numpy(call(exact, "dense")), dtype)
    found = fast_gradients(functools.partial(loss, "auto"), *rounded)
    dense = fast_gradients(functools.partial(loss, "dense"), *exact)
    for actual, gradient in zip(found, dense, strict=True):
        assert_close(actual, gradient, dtype)
    blind = np.zeros((BATCH, LENGTH), bool)
    if "padding_mask" in arguments:
        blind[2] = True
    if case == "nothing allowed":
        blind[:] = True
    assert (to_numpy(outputs)[blind] == 0).all()
    assert (found[0][blind] == 0).all()


def test_a_kernel_can_be_asked_for():
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="TensorFlow has no fused"):
            dot_product_attention(*inputs(), implementation="fused")
        return
    outputs = dot_product_attention(
        *inputs("bfloat16"), mask=Causal(), implementation="fused"
    )
    assert outputs.shape == (BATCH, LENGTH, NUM_HEADS, KEY_DIM)


@pytest.mark.parametrize("length", [129, 250, 512])
def test_a_mask_serves_sequences_of_any_length(length):
    mask = Causal() & SlidingWindow(60) & ~Strided(7)
    tensors = [tensor[:, :length] for tensor in inputs()]
    outputs, expected = (
        dot_product_attention(*tensors, mask=mask, implementation=name)
        for name in ("auto", "dense")
    )
    assert_close(outputs, to_numpy(expected))


def model(dtype="float32", **arguments):
    return decoder_only(
        32, 2, 64, 4, 128, mask=Causal() & SlidingWindow(100), dtype=dtype,
        **arguments,
    )  # fmt: skip


TOKENS = np.arange(4 * 257).reshape(4, 257) * 7 % 32


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("position", ["rope", "alibi", "t5"])
def test_a_model_learns(position, dtype):
    language_model = model(dtype, position=position)
    language_model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = language_model.fit(
        TOKENS[:, :-1], TOKENS[:, 1:], epochs=12, batch_size=2, verbose=0
    ).history["loss"]
    assert np.isfinite(history).all()
    assert history[-1] < 0.5 * history[0]


def test_generation_follows_the_whole_model():
    language_model = model()
    prompts = [TOKENS[0, :150].tolist(), TOKENS[1, :9].tolist()]
    result = generate(language_model, prompts, max_new_tokens=4)
    tokens = to_numpy(result.tokens)
    for row, prompt in zip(tokens, prompts, strict=True):
        for step in range(len(prompt), len(prompt) + 4):
            logits = language_model(row[None, :step].astype("int32"))
            assert to_numpy(logits)[0, -1].argmax() == row[step]


def test_a_saved_model_gives_the_same_outputs(tmp_path):
    language_model = model()
    language_model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    tokens = TOKENS[:, :256].astype("int32")
    assert_close(loaded(tokens), to_numpy(language_model(tokens)))


def test_explain_names_the_executor_that_runs():
    language_model = model("bfloat16")
    rows = explain(language_model, (4, 256), print_fn=lambda text: None)
    _, names = taken(lambda: language_model(TOKENS[:, :256].astype("int32")))
    for row in rows:
        assert (row.executor == "fused") == bool(names)
