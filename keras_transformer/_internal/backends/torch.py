"""PyTorch."""

import keras
import torch
from torch.nn import functional

from keras_transformer._internal.backends import (
    torch_flex,
    torch_gradient,
    torch_hashing,
    torch_rows,
)
from keras_transformer._internal.kernels import Kernel


def device_of(tensor):
    """Where the tensor is: "cpu" or "gpu"."""
    kind = tensor.device.type
    if kind == "meta":
        # A tensor without values stands for one on the default device.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if kind == "cpu" else "gpu"


def _sdpa_refusal(call, lowering):
    del lowering
    if call.bias and call.is_half:
        return "it would round score biases to half precision"
    if call.bias == "scheme" and call.pairs > 1 << 20:
        return "the bias would be an array as large as the scores"
    return None


def _sdpa(query, key, value, lowering, *, allowed, bias, scale, soft_cap):
    """Attention by `scaled_dot_product_attention`.

    Its answer for a query that sees no key depends on the kernel, so such a
    query is let see everything and its output is then replaced by zero.
    """
    del soft_cap
    mask = rows = None
    if allowed is not None:
        mask = torch.as_tensor(allowed, device=query.device)
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        rows = mask.any(dim=-1, keepdim=True)
        mask = mask | ~rows
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        mask = mask.to(query.dtype)
    outputs = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=lowering.is_causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    if rows is not None:
        outputs = torch.where(rows, outputs, 0.0)
    return outputs.transpose(1, 2)


KERNELS = (
    Kernel(
        "flex_attention",
        frozenset({"is_causal"}),
        torch_flex.refusal,
        torch_flex.attention,
        skips=True,
        options=frozenset({"soft_cap", "alibi"}),
    ),
    Kernel(
        "scaled_dot_product_attention",
        frozenset({"is_causal"}),
        _sdpa_refusal,
        _sdpa,
        # It takes either a mask or the flag.
        adds_to_flags=False,
    ),
)


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not torch.compiler.is_compiling() and not tensor.is_meta


def current_trace():
    """What is being traced now: nothing, control flow runs eagerly."""
    return None


def traced(function, *specs):
    """Calls the function with tensors of these shapes and dtypes, no values.

    An operation that needs values makes it be called again, with zeros.

    Args:
        function: Takes the tensors; what it returns is dropped.
        *specs: Anything with `shape` and `dtype`.
    """

    def call(device):
        function(
            *(
                torch.zeros(
                    spec.shape, dtype=getattr(torch, spec.dtype), device=device
                )
                for spec in specs
            )
        )

    device = keras.ops.zeros(()).device
    with torch.no_grad():
        try:
            with keras.device("meta"):
                call("meta")
        except (NotImplementedError, RuntimeError, TypeError):
            call(device)


attention_by_rows = torch_rows.attention_by_rows
random_halves = torch_hashing.random_halves
with_gradient = torch_gradient.with_gradient

# Pairs of slots from which on blocks are faster than dense scores.
BLOCKS_FROM = 1 << 18
# Sizes of tiles of attention, and what a pair of slots in one costs.
TILE_SIZES = {(256, 256): 1.0, (128, 128): 1.05, (64, 64): 1.2}


def write_token(cache, new, indices, in_place):
    """`cache[row, indices[row]] = new[row]` for every row.

    Args:
        cache: (batch, size, ...).
        new: (batch, ...).
        indices: int32 (batch,), below size.
        in_place: Whether `cache` itself may change.
    """
    if not in_place:
        cache = cache.clone()
    rows = torch.arange(cache.shape[0], device=cache.device)
    cache[rows, indices.long()] = new.to(cache.dtype)
    return cache


def compiled(function, donated=None):
    """The function itself: steps run eagerly."""
    del donated
    return function


def for_one_run(function):
    """The function itself: compiling it would cost more than it saves."""
    return function


def while_loop(condition, body, state):
    """`state = body(state)` while `condition(state)`, on the host."""
    while bool(condition(state)):
        state = body(state)
    return state


TAKES_WEIGHTS = False
RUNS_STEP_BY_STEP = True

no_gradients = torch.no_grad
