"""PyTorch."""

import torch
from torch.nn import functional


def fused_refusal(*, has_mask, has_bias, is_half, same_width):
    """Why the kernel cannot take the call, or None when it can."""
    del has_mask, same_width
    if has_bias and is_half:
        return "it would round score biases to half precision"
    return None


def fused_attention(query, key, value, *, allowed, bias, is_causal, scale):
    """Attention by `scaled_dot_product_attention`.

    Its answer for a query that sees no key depends on the kernel, so such a
    query is let see everything and its output is then replaced by zero.
    """
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
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    if rows is not None:
        outputs = torch.where(rows, outputs, 0.0)
    return outputs.transpose(1, 2)


def is_concrete(tensor):
    """Whether the tensor has values now, and is not being traced."""
    return not torch.compiler.is_compiling() and not tensor.is_meta


def current_trace():
    """What is being traced now: nothing, control flow runs eagerly."""
    return None


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
