"""The fused kernels as far as they run without a GPU or TPU.

PyTorch's runs uncompiled, JAX's cuDNN kernel is replaced by the same function
of XLA, and the TPU's is interpreted.
"""

import shutil

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer.attention import dot_product_attention
from keras_transformer.attention.choice import Call, choose
from keras_transformer.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Explicit,
    Fixed,
    Full,
    Global,
    MaskData,
    Padding,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)
from keras_transformer.masks.lowering import lower
from keras_transformer.masks.pairs import Pairs
from keras_transformer.positions import ALiBi, RelativePositionBias
from tests.attention.checks import fast_gradients
from tests.masks.test_pairs import Diagonal
from tests.masks.test_properties import few, many, seeds
from tests.masks.trees import Case, trees
from tests.numerics import assert_close, normal, to_numpy
from tests.reference.attention import attention
from tests.sizes import BATCH, KEY_DIM, NUM_HEADS, NUM_KEY_VALUE_HEADS

BACKEND = keras.backend.backend()
KERNELS = {kernel.name: kernel for kernel in backend.KERNELS}
on_torch = pytest.mark.skipif(
    BACKEND != "torch", reason="flex_attention is PyTorch's"
)
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="this kernel is JAX's")
fewest = settings(many, max_examples=12)


def call_of(mask=None, **changes):
    """A call that every kernel takes, unless changed."""
    values = {
        "batch": BATCH,
        "query_length": 256,
        "key_length": 256,
        "num_heads": NUM_HEADS,
        "key_dim": 64,
        "value_dim": 64,
        "dtype": "bfloat16",
        "device": "gpu",
        "mask": Causal() if mask is None else mask,
    }
    return Call(**{**values, **changes})


def tensors(queries, keys, value_dim=KEY_DIM):
    return {
        "query": normal(BATCH, queries, NUM_HEADS, KEY_DIM, seed=1),
        "key": normal(BATCH, keys, NUM_KEY_VALUE_HEADS, KEY_DIM, seed=2),
        "value": normal(BATCH, keys, NUM_KEY_VALUE_HEADS, value_dim, seed=3),
    }


def allowed_by(mask, data, queries, keys):
    allowed = mask.evaluate(np.arange(queries), np.arange(keys), data)
    return np.broadcast_to(allowed, (BATCH, NUM_HEADS, queries, keys))


def data_of(case):
    """The batch's data as tensors."""
    arrays = case.arrays.items()
    return MaskData(**{k: ops.convert_to_tensor(v) for k, v in arrays})


def run(name, inputs, mask, data, **options):
    """The outputs of a kernel, called as the door calls it."""
    kernel = KERNELS[name]
    queries, keys = inputs["query"].shape[1], inputs["key"].shape[1]
    lowering = lower(mask, kernel.flags if queries == keys else ())
    allowed = None
    if kernel.skips:
        allowed = Pairs(mask, data, queries, keys)
    elif lowering.residual is not None or data.padding_mask is not None:
        rest = Full() if lowering.residual is None else lowering.residual
        allowed = rest.evaluate(np.arange(queries), np.arange(keys), data)
    options = {"bias": None, "scale": 0.7, "soft_cap": None, **options}
    return kernel.run(
        *(ops.convert_to_tensor(x) for x in inputs.values()),
        lowering,
        allowed=allowed,
        **options,
    )


def check(name, inputs, mask, data, options=None, **expected):
    """Asserts outputs and gradients equal to dense attention's formula."""
    options = {} if options is None else options
    queries, keys = inputs["query"].shape[1], inputs["key"].shape[1]
    allowed = allowed_by(mask, data, queries, keys)
    formula, _ = attention(**inputs, allowed=allowed, scale=0.7, **expected)
    outputs = to_numpy(run(name, inputs, mask, data, **options))
    assert_close(outputs, formula)
    blind = ~allowed.any(-1).swapaxes(1, 2)
    assert (outputs[blind] == 0).all()
    cotangent = normal(*formula.shape, seed=9)

    def loss(*values):
        values = dict(zip(inputs, values, strict=True))
        outputs = run(name, values, mask, data, **options)
        return ops.sum(ops.multiply(outputs, cotangent))

    def dense_loss(*values):
        found = dot_product_attention(
            *values,
            attention_mask=allowed,
            bias=expected.get("bias"),
            soft_cap=expected.get("soft_cap"),
            scale=0.7,
            implementation="dense",
        )
        return ops.sum(ops.multiply(found, cotangent))

    found = fast_gradients(loss, *inputs.values())
    dense = fast_gradients(dense_loss, *inputs.values())
    for actual, gradient in zip(found, dense, strict=True):
        assert_close(actual, gradient)
    assert (found[0][blind] == 0).all()


# PyTorch's flex_attention.


@pytest.fixture
def flex(monkeypatch):
    """Lets it run on the CPU without compiling, with gradients."""
    from torch.nn.attention import flex_attention as library

    monkeypatch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)


@on_torch
@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal(),
        ~Full(),
        Causal() & Documents(),
        SlidingWindow(40) & ~Causal(),
        (Causal() | Prefix()) & Padding(),
        PerHead([Causal(), Strided(3), Documents(), SlidingWindow(9)]),
        Causal() & (Explicit(np.tri(3, 4)) | BlockSparse([[1, 0], [0, 1]], 50)),
    ],
    ids=repr,
)
def test_flex_attention_equals_the_formula(mask, flex):
    case = Case(3, 140, 140, plain=True)
    check("flex_attention", tensors(140, 140), mask, data_of(case))


@on_torch
def test_flex_attention_takes_keys_of_another_length(flex):
    case = Case(4, 30, 150, plain=True)
    check("flex_attention", tensors(30, 150), Causal(), data_of(case))


@on_torch
def test_flex_attention_has_soft_caps_and_alibi(flex):
    case = Case(5, 20, 20, plain=True)
    positions = np.random.default_rng(0).integers(0, 50, (2, BATCH, 20))
    scheme = ALiBi(num_heads=NUM_HEADS)
    check(
        "flex_attention",
        tensors(20, 20),
        Causal(),
        data_of(case),
        {
            "soft_cap": 0.5,
            "bias": (
                ops.reshape(scheme(np.array([0]), np.array([1])), (-1,)),
                *positions,
            ),
        },
        soft_cap=0.5,
        bias=to_numpy(scheme(*positions)),
    )


EVERY_RULE = (
    (Causal() | Prefix()) & ~Strided(5) & Documents() & Padding()
) & PerHead(
    [
        Global(3),
        Chunked(7) | Fixed(4, 2),
        Explicit(np.tri(20)),
        BlockSparse([[1, 1]], 10) | Full(),
    ]
)


def run_compiled(mask, case, soft_cap, monkeypatch, **how):
    """The kernel uncompiled, and compiled on the CPU."""
    from keras_transformer._internal.backends import torch_flex

    program, length = torch_flex.program, case.q.shape[1]
    inputs = {k: v.repeat(3, -1) for k, v in tensors(length, length).items()}
    slopes = normal(NUM_HEADS, seed=4)
    options = {"soft_cap": soft_cap, "bias": (slopes, case.q, case.q)}

    def compiled(*static):
        return torch_flex.compiled(program(*static), **how)

    expected = run("flex_attention", inputs, mask, case.data, **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch_flex, "program", compiled)
        found = run("flex_attention", inputs, mask, case.data, **options)
    return found, to_numpy(expected)


@on_torch
def test_flex_attention_is_traced_as_one_graph_a_mask(flex, monkeypatch):
    import torch

    graphs = []

    def noting(graph, examples):
        # Numbers that vary would be inputs, which the kernel does not take.
        graphs.append(all(isinstance(x, torch.Tensor) for x in examples))
        return graph.forward

    how = {"backend": noting, "fullgraph": True}
    windows = [SlidingWindow(size) for size in range(1, 12)]
    for cap, mask in enumerate([EVERY_RULE, *windows], 1):
        case = Case(6, 20, 20, plain=True)
        assert_close(*run_compiled(mask, case, 0.3 * cap, monkeypatch, **how))
    assert len(graphs) >= 12
    assert all(graphs)


@on_torch
@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++"), reason="PyTorch compiles with g++, not found"
)
@pytest.mark.parametrize("mask", [Causal() & SlidingWindow(9), EVERY_RULE])
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"
)
def test_flex_attention_compiled_for_the_cpu_skips_what_the_plan_skips(
    mask, flex, monkeypatch
):
    # Unlike the uncompiled kernel, it reads the lists of blocks.
    case = Case(6, 400, 400, plain=True)
    assert_close(*run_compiled(mask, case, 0.3, monkeypatch))


@on_torch
@few
@given(trees, seeds)
def test_the_blocks_of_flex_attention_hold_the_mask(tree, seed):
    from torch.nn.attention.flex_attention import BlockMask

    from keras_transformer._internal.backends import torch_flex

    mask, queries, keys, size = tree[0], 17, 22, 4
    case = Case(seed, queries, keys, plain=True)
    pairs = Pairs(mask, data_of(case), queries, keys)
    lists = torch_flex.block_lists(pairs.table(size), -(-keys // size), "cpu")
    partial, full = (
        to_numpy(
            BlockMask.from_kv_blocks(
                *lists[first : first + 2], BLOCK_SIZE=size
            ).to_dense()
        )
        for first in (0, 2)
    )
    assert not (partial & full).any()
    partial, full = (
        blocks.repeat(size, -1).repeat(size, -2)[..., :queries, :keys]
        for blocks in (partial, full)
    )
    allowed = allowed_by(mask, case.data, queries, keys)
    np.testing.assert_array_equal((partial & allowed) | full, allowed)


@on_torch
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it needs a CUDA GPU"),
        ({"has_slots": True}, "planned for slots from 0"),
        ({"attention_mask": (1, 1, 1, 1)}, "which has no plan"),
        ({"bias": "array"}, "as large as the scores"),
        ({"bias": "scheme"}, "gradient of a trained table"),
        ({"key_dim": 8}, "at least 16 wide"),
        ({"value_dim": 8}, "at least 16 wide"),
        ({"query_length": 64}, "at least 128 queries"),
        ({"query_length": None}, "at least 128 queries"),
        ({"mask": Causal()}, "the other kernel is faster"),
        ({"mask": Causal() & Diagonal()}, "no rule of the library"),
        ({"sinks": True}, "no `sinks`"),
        ({"dropout": True}, "dropout on the weights"),
        ({"scores": True}, "scores were asked for"),
    ],
)
def test_flex_attention_refuses(changes, reason, monkeypatch):
    on_cuda(monkeypatch)
    assert choose(call_of(Documents())).kernel.name == "flex_attention"
    choice = choose(call_of(**{"mask": Documents(), **changes}))
    assert reason in choice.refusals["flex_attention"]


@on_torch
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "scaled_dot_product_attention"),
        ({"mask": Full()}, "scaled_dot_product_attention"),
        ({"has_padding": True}, "flex_attention"),
        ({"mask": Causal() & SlidingWindow(9)}, "flex_attention"),
        ({"soft_cap": True}, "flex_attention"),
        ({"bias": "scheme", "alibi": True}, "flex_attention"),
        ({"key_length": 300}, "flex_attention"),
    ],
)
def test_flex_attention_is_taken_where_there_is_something_to_plan(
    changes, name, monkeypatch
):
    on_cuda(monkeypatch)
    choice = choose(call_of(**changes))
    assert (choice.executor, choice.kernel.name) == ("fused", name)
    if name == "flex_attention":
        assert choice.residual_shape is None


def on_cuda(monkeypatch):
    from keras_transformer._internal.backends import torch_flex

    monkeypatch.setattr(torch_flex, "has_cuda", lambda: True)


@on_torch
def test_the_door_hands_the_kernel_all_that_it_reads(flex, monkeypatch):
    on_cuda(monkeypatch)
    monkeypatch.setattr(backend, "device_of", lambda tensor: "gpu")
    inputs = {
        name: normal(2, 130, 2, 16, seed=seed)
        for seed, name in enumerate(("query", "key", "value"))
    }
    arguments = {
        "mask": Causal() & Documents(),
        "segment_ids": np.arange(260).reshape(2, 130) // 50,
        "padding_mask": np.arange(130) < np.array([[130], [70]]),
        "bias": ALiBi(num_heads=2),
        "positions": np.arange(130)[::-1].copy(),
        "key_positions": np.arange(130) * 2,
        "soft_cap": 2.0,
    }
    outputs, expected = (
        dot_product_attention(
            **inputs, **arguments, implementation=implementation
        )
        for implementation in ("fused", "dense")
    )
    assert_close(outputs, to_numpy(expected))


# JAX on a GPU: cuDNN.


def with_cudnn(monkeypatch, capability=(9, 0)):
    from keras_transformer._internal.backends import jax_kernels

    monkeypatch.setattr(jax_kernels, "compute_capability", lambda: capability)


@on_jax
@fewest
@given(trees, seeds)
def test_cudnn_is_told_the_mask(tree, seed):
    # Causal, as all windows are that cuDNN takes.
    mask, case = tree[0] & Causal(), Case(seed, 8, 8, plain=True)
    outputs = run("cudnn", tensors(8, 8), mask, case.data, implementation="xla")
    allowed = allowed_by(mask, case.data, 8, 8)
    expected, _ = attention(**tensors(8, 8), allowed=allowed, scale=0.7)
    assert_close(outputs, expected)


@on_jax
@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal(),
        SlidingWindow((3, 0)),
        Causal() & SlidingWindow(4),
        Causal() & Strided(2) & ~Prefix(3),
        PerHead([Causal(), Full(), Strided(2), ~Full()]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("padded", [False, True])
def test_cudnn_equals_the_formula(mask, padded):
    data = MaskData()
    if padded:
        data = MaskData(padding_mask=Case(3, 8, 8).padding)
    options = {"implementation": "xla"}
    check("cudnn", tensors(8, 8), mask, data, options)


@on_jax
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it needs a CUDA GPU"),
        ({"dtype": "float32"}, "float16 or bfloat16"),
        ({"bias": "array"}, "score biases"),
        ({"bias": "scheme"}, "score biases"),
        ({"value_dim": 32}, "as wide as keys"),
        ({"key_dim": 60, "value_dim": 60}, "a multiple of 8, up to 256"),
        ({"key_dim": 264, "value_dim": 264}, "a multiple of 8, up to 256"),
        ({"mask": SlidingWindow(3)}, "a window of earlier keys only"),
        (
            {"mask": SlidingWindow((3, 0)), "has_padding": True},
            "only without a mask array",
        ),
        ({"has_padding": True, "dtype": "float16"}, "outweigh"),
        ({"mask": Strided(2), "query_length": 255}, "known and even"),
        ({"soft_cap": True}, "no `soft_cap`"),
    ],
)
def test_cudnn_refuses(changes, reason, monkeypatch):
    with_cudnn(monkeypatch)
    for mask in (Causal(), Full(), SlidingWindow((3, 0)), Strided(2)):
        assert choose(call_of(mask)).kernel.name == "cudnn"
    choice = choose(call_of(**changes))
    assert reason in choice.refusals["cudnn"]


@on_jax
def test_cudnn_takes_wide_heads_on_later_gpus_only(monkeypatch):
    wide = call_of(key_dim=256, value_dim=256)
    with_cudnn(monkeypatch, (8, 0))
    assert "up to 128" in choose(wide).refusals["cudnn"]
    with_cudnn(monkeypatch, (10, 0))
    assert choose(wide).kernel.name == "cudnn"


@on_jax
def test_cudnn_is_refused_by_gpus_that_are_no_cuda():
    assert "needs a CUDA GPU" in choose(call_of()).refusals["cudnn"]


# JAX on a TPU: splash attention.


@on_jax
@pytest.mark.parametrize(
    ("mask", "padded", "soft_cap"),
    [
        (Full(), True, None),
        (Causal(), False, 0.5),
        (Causal() & Documents(), False, None),
        (Causal() & SlidingWindow(40) & Documents() & Padding(), True, None),
    ],
)
def test_splash_attention_equals_the_formula(mask, padded, soft_cap):
    case = Case(3, 128, 128, plain=True)
    arrays = {"segment_ids": case.query_ids}
    if padded:
        # One row has no key at all, one begins with a pad.
        arrays["padding_mask"] = case.padding & [[False], [True], [True]]
        arrays["padding_mask"][1, 0] = False
    check(
        "splash_attention",
        tensors(128, 128, value_dim=8),
        mask,
        MaskData(**arrays),
        {"interpret": True, "soft_cap": soft_cap},
        soft_cap=soft_cap,
    )


@on_jax
@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(70)])
def test_splash_attention_skips_blocks(mask):
    # Five blocks of queries and keys: no larger ones divide the length.
    inputs, allowed = tensors(640, 640), allowed_by(mask, None, 640, 640)
    outputs = run("splash_attention", inputs, mask, MaskData(), interpret=True)
    expected = dot_product_attention(
        **inputs, attention_mask=allowed, scale=0.7, implementation="dense"
    )
    assert_close(outputs, to_numpy(expected))


@on_jax
def test_splash_attention_rounds_only_what_goes_in_and_out():
    inputs = {
        name: ops.convert_to_tensor(array, "bfloat16")
        for name, array in tensors(128, 128).items()
    }
    exact = {k: to_numpy(ops.cast(v, "float32")) for k, v in inputs.items()}
    allowed = allowed_by(Causal(), None, 128, 128)
    expected, _ = attention(**exact, allowed=allowed, scale=0.7)
    outputs = run(
        "splash_attention", inputs, Causal(), MaskData(), interpret=True
    )
    assert outputs.dtype == "bfloat16"
    outputs = to_numpy(ops.cast(outputs, "float32"))
    assert_close(outputs, expected, "bfloat16", scale=0.3)


@on_jax
def test_splash_attention_requires_the_data_of_its_rules():
    for mask in (Documents(), Causal() & Padding()):
        with pytest.raises(ValueError, match="must be given because the mask"):
            run(
                "splash_attention",
                tensors(128, 128),
                mask,
                MaskData(),
                interpret=True,
            )


@on_jax
def test_splash_attention_takes_keys_of_another_length():
    data = MaskData(padding_mask=Case(3, 128, 256).padding)
    options = {"interpret": True}
    check("splash_attention", tensors(128, 256), Full(), data, options)


@on_jax
@pytest.mark.parametrize(
    "ids", [[0, 0, 1, 1], [3, 2, 1, 0], [-1, -5, 4, 3], [2**31 - 1, -(2**31)]]
)
def test_padding_gets_a_number_that_no_document_has(ids):
    from keras_transformer._internal.backends import jax_kernels

    unused = jax_kernels._unused_id(ops.convert_to_tensor(ids, "int32"))
    assert int(unused) not in ids


@on_jax
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it needs a TPU"),
        ({"dtype": "float32"}, "it needs bfloat16"),
        ({"dtype": "float16"}, "it needs bfloat16"),
        ({"has_slots": True}, "planned for slots from 0"),
        ({"attention_mask": (1, 1, 1, 1)}, "which has no plan"),
        ({"bias": "scheme"}, "score biases"),
        ({"mask": Causal() & Strided(2)}, "it cannot say Strided(2)"),
        ({"mask": Causal(), "key_length": 384}, "it cannot say Causal()"),
        ({"mask": SlidingWindow(4)}, "windows of earlier keys"),
        ({"query_length": 250, "key_length": 250}, "multiples of 128"),
        ({"key_dim": 300}, "at most 256 wide"),
        ({"sinks": True}, "no `sinks`"),
        ({"mask": Diagonal()}, "no rule of the library"),
    ],
)
def test_splash_attention_refuses(changes, reason):
    for mask in (Full(), Causal(), Causal() & SlidingWindow(4) & Documents()):
        call = call_of(mask, device="tpu", soft_cap=True, has_padding=True)
        assert choose(call).kernel.name == "splash_attention"
        assert choose(call).residual_shape is None
    choice = choose(call_of(**{"device": "tpu", **changes}))
    assert reason in choice.refusals["splash_attention"]


# All backends.


def test_a_call_that_no_kernel_takes_is_told_each_reason():
    with pytest.raises(ValueError, match="cannot be honoured") as error:
        choose(call_of(device="cpu", scores=True), "fused")
    for kernel in backend.KERNELS:
        assert f"{kernel.name}: attention scores were" in str(error.value)
    if not backend.KERNELS:
        assert "fused: TensorFlow has no fused" in str(error.value)


def test_a_learned_bias_is_never_rounded_or_lost():
    # Whatever kernel there is, the table keeps its gradient.
    scheme = RelativePositionBias(8, 16, num_heads=NUM_HEADS)
    scheme.build()
    inputs = tensors(6, 6)

    def loss(implementation):
        def function(table):
            state = [(scheme.embeddings, table)]
            with keras.StatelessScope(state_mapping=state):
                return ops.sum(
                    dot_product_attention(
                        **inputs, bias=scheme, implementation=implementation
                    )
                    ** 2
                )

        return function

    table = to_numpy(scheme.embeddings).astype("float32")
    found, expected = (
        fast_gradients(loss(implementation), table)[0]
        for implementation in ("auto", "dense")
    )
    assert (expected != 0).any()
    assert_close(found, expected)
